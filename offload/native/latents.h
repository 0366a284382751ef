// Scores and sums of rows over latents: tokens' rows that are both key and value, and that all query heads share.
//
// Each number of a latent is read and widened once for all rows, into panels that stay in the first cache. A score's
// sum runs in fp32 over every fourth lane of a row, first to last, then over the four; an output's over the tokens,
// first to last. Where the processor multiplies bf16 in pairs, queries and latents are its pairs of neighbours, and
// tokens two by two those of the outputs: their weights are rounded to bf16, and a row's sum of weights is that of the
// rounded ones. Otherwise both are fp32. What a row sees nothing of adds exact zeros.
//
// A lane is what is multiplied at once: a pair, or a number. A latent is in two halves, of `dim` numbers each.
#pragma once
#include "vectors.h"

namespace latents {

constexpr int QUAD = 4;           // lanes of a row that a vector has beside each other
constexpr int OF_VECTOR = W / QUAD;  // tokens of a vector
constexpr int TOKENS = 2 * OF_VECTOR;  // of a panel of scores
constexpr int AHEAD = 2 * TOKENS;  // tokens that are fetched ahead, to the second cache
template <class E>
constexpr int parts = in_pairs<E> ? 1 : E::per_unit;  // vectors of lanes that a vector of units makes
template <class E>
constexpr int step = in_pairs<E> ? 2 : 1;  // tokens of a lane of the outputs

template <class E>
INLINE f32 multiply_add(u32 a, u32 b, f32 acc) {
    if constexpr (in_pairs<E>) return add_pairs(acc, a, b);
    else return fma((f32)a, (f32)b, acc);
}

// Lanes of half a row.
template <class E>
inline int lanes(int dim) {
    return padded<E>(dim) / E::per_unit * parts<E>;
}

#if defined(__AVX512F__)
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define FIRST_QUADS 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23
#define SECOND_QUADS 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31
#define ONE_QUAD 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3
#elif defined(__AVX2__)
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#define FIRST_QUADS 0, 1, 2, 3, 8, 9, 10, 11
#define SECOND_QUADS 4, 5, 6, 7, 12, 13, 14, 15
#define ONE_QUAD 0, 1, 2, 3, 0, 1, 2, 3
#else
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#define FIRST_QUADS 0, 1, 2, 3
#define SECOND_QUADS 4, 5, 6, 7
#define ONE_QUAD 0, 1, 2, 3
#endif

// Of two vectors in a row: every other lane.
template <class V>
INLINE V evens(V a, V b) { return __builtin_shufflevector(a, b, EVEN_LANES); }
template <class V>
INLINE V odds(V a, V b) { return __builtin_shufflevector(a, b, ODD_LANES); }

INLINE u32 all_quads(const uint32_t* from) {
    using quad = uint32_t __attribute__((vector_size(16)));
    const quad q = load<quad>(from);
    return __builtin_shufflevector(q, q, ONE_QUAD);
}

// OF_VECTOR vectors of as many quads: rows become columns.
INLINE void transpose_quads(u32 (&rows)[OF_VECTOR]) {
#pragma unroll
    for (int done = 1; done < OF_VECTOR; done *= 2) {
        u32 next[OF_VECTOR];
#pragma unroll
        for (int i = 0; i < OF_VECTOR / 2; i++) {
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + OF_VECTOR / 2], FIRST_QUADS);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + OF_VECTOR / 2], SECOND_QUADS);
        }
#pragma unroll
        for (int i = 0; i < OF_VECTOR; i++) rows[i] = next[i];
    }
}

// Lanes of W units of a row that stand at `from` as fp32, of which `count` numbers are there.
template <class E>
INLINE void lanes_of(const float* from, int count, u32 (&to)[parts<E>]) {
    if constexpr (E::per_unit == 1) {
        to[0] = (u32)read_some<Fp32>(from, count);
    } else {
        const f32 one = read_some<Fp32>(from, count), other = read_some<Fp32>(from + W, count - W);
        const f32 halves[] = {evens(one, other), odds(one, other)};
        if constexpr (in_pairs<E>) to[0] = pairs_of(halves);
        else to[0] = (u32)halves[0], to[1] = (u32)halves[1];
    }
}

// Queries [rows, 2 dim] -> [rows, 2 lanes].
template <class E>
void fill_queries(const float* queries, int rows, int dim, uint32_t* to) {
    for (int half = 0; half < 2 * rows; half++)
        for (int at = 0; at < dim; at += wide<E>, to += parts<E> * W) {
            u32 made[parts<E>];
            lanes_of<E>(queries + int64_t(half) * dim + at, dim - at, made);
            for (int e = 0; e < parts<E>; e++) store(to + e * W, made[e]);
        }
}

// A vector of units of one token, zeros where it has none. units: of the token from there on. whole: all are there.
template <class E, bool whole>
INLINE u32 units_at(const typename E::element* from, bool there, int units) {
    if constexpr (whole) return load<u32>(from);
    if (!there) return u32{};
    return units >= W ? load<u32>(from) : load_some(from, units);
}

// Half of a vector of units of TOKENS tokens from number `at` on -> the panel. count: tokens that are there.
template <class E, bool whole>
INLINE void fill_columns(const typename E::element* keys, int count, int dim, int at, uint32_t* to) {
#pragma unroll
    for (int vector = 0; vector < 2; vector++) {
        u32 rows[parts<E>][OF_VECTOR];
#pragma unroll
        for (int i = 0; i < OF_VECTOR; i++) {
            const int token = vector * OF_VECTOR + i;
            const auto from = keys + int64_t(token) * dim + at;
            const u32 units = units_at<E, whole>(from, token < count, (dim - at) / E::per_unit);
#pragma unroll
            for (int e = 0; e < parts<E>; e++) rows[e][i] = in_pairs<E> ? units : (u32)widen<E>(units, e);
        }
#pragma unroll
        for (int e = 0; e < parts<E>; e++) {
            transpose_quads(rows[e]);
#pragma unroll
            for (int i = 0; i < OF_VECTOR; i++) store(to + (e * OF_VECTOR + i) * 2 * W + vector * W, rows[e][i]);
        }
    }
}

// Half of the panel of TOKENS tokens, of which `count` are there: a quad of each of OF_VECTOR tokens, then of as many
// more, then the next quads.
template <class E>
void fill_keys(const typename E::element* keys, int count, int dim, uint32_t* to) {
    int at = 0;
    for (; count >= TOKENS && at + wide<E> <= dim; at += wide<E>, to += parts<E> * TOKENS * W)
        fill_columns<E, true>(keys, count, dim, at, to);
    for (; at < dim; at += wide<E>, to += parts<E> * TOKENS * W) fill_columns<E, false>(keys, count, dim, at, to);
}

// scores[r][0..TOKENS) of ROWS rows. count: lanes of a row, of both halves. ahead: what is fetched meanwhile, of each
// half: a panel's worth.
template <class E, int ROWS>
INLINE void score(const uint32_t* queries, const uint32_t* panel, int count, float* scores, int stride,
                  const char* const* ahead) {
    f32 acc[ROWS][2] = {};
    for (int at = 0; at < count; at += QUAD, panel += 2 * W) {
        const int bytes = at * TOKENS * E::per_unit * int(sizeof(typename E::element)) / (2 * parts<E>);
        __builtin_prefetch(ahead[0] + bytes, 0, 2), __builtin_prefetch(ahead[1] + bytes, 0, 2);
        const u32 first = load<u32>(panel), second = load<u32>(panel + W);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u32 q = all_quads(queries + int64_t(r) * count + at);
            acc[r][0] = multiply_add<E>(q, first, acc[r][0]);
            acc[r][1] = multiply_add<E>(q, second, acc[r][1]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
        const int other = r + 1 < ROWS ? r + 1 : r;
        const f32 one = evens(acc[r][0], acc[r][1]) + odds(acc[r][0], acc[r][1]);
        const f32 next = evens(acc[other][0], acc[other][1]) + odds(acc[other][0], acc[other][1]);
        alignas(64) float found[W];
        store(found, evens(one, next) + odds(one, next));
        __builtin_memcpy(scores + r * stride, found, TOKENS * sizeof(float));
        __builtin_memcpy(scores + other * stride, found + (other - r) * TOKENS, TOKENS * sizeof(float));
    }
}

// Queries [rows, 2 dim] and `count` tokens -> scores [rows, stride], zeros past them. scratch: `score_room`.
template <class E>
void score_all(const float* queries, int rows, int dim, const typename E::element* const* halves, int count,
               float* scores, int stride, float* scratch) {
    const int own = lanes<E>(dim);
    auto panel = reinterpret_cast<uint32_t*>(scratch), lanes_of_rows = panel + 2 * own * TOKENS;
    fill_queries<E>(queries, rows, dim, lanes_of_rows);
    for (int at = 0; at < stride; at += TOKENS) {
        for (int half = 0; half < 2; half++)
            fill_keys<E>(halves[half] + int64_t(at) * dim, count - at, dim, panel + half * own * TOKENS);
        const char* const ahead[] = {reinterpret_cast<const char*>(halves[0] + int64_t(at + AHEAD) * dim),
                                     reinterpret_cast<const char*>(halves[1] + int64_t(at + AHEAD) * dim)};
        by_rows(rows, [&]<int ROWS>(int r) {
            score<E, ROWS>(lanes_of_rows + int64_t(r) * 2 * own, panel, 2 * own, scores + int64_t(r) * stride + at,
                           stride, ahead);
        });
    }
}

template <class E>
inline int64_t score_room(int rows, int dim) {
    return int64_t(2) * lanes<E>(dim) * (TOKENS + rows);
}

// Weights [stride] of a row to lanes, in place. Where they are rounded: -> sum of the rounded ones.
template <class E>
inline float fill_weights(float* weights, int stride, float total) {
    if constexpr (!in_pairs<E>) return total;
    f32 added = {};
    for (int i = 0; i < stride; i += 2 * W) {
        const f32 one = E::rounded(load<f32>(weights + i)), other = E::rounded(load<f32>(weights + i + W));
        added += one + other;
        const f32 halves[] = {evens(one, other), odds(one, other)};
        store(weights + i / 2, pairs_of(halves));
    }
    return sum(added);
}

// Two vectors of the values of token j, or of j and the next: the lanes of `wide` numbers, in the order of units.
template <class E, bool whole>
INLINE void fill_lanes(const typename E::element* values, int dim, int units, int from, int to, int j,
                       uint32_t* panel) {
    const auto at = values + int64_t(j) * dim;
    const bool there = j >= from && j < to;
    const u32 one = units_at<E, whole>(at, there, units);
    u32 first, second;
    if constexpr (in_pairs<E>) {
        const u32 other = units_at<E, whole>(at + dim, j + 1 >= from && j + 1 < to, units);
        first = (one & 0xffffu) | other << 16, second = one >> 16 | (other & 0xffff0000u);
    } else if constexpr (E::per_unit == 2) {
        first = (u32)widen<E>(one, 0), second = (u32)widen<E>(one, 1);
    } else {
        first = one, second = units_at<E, whole>(at + W, there && units > W, units - W);
    }
    store(panel, first), store(panel + W, second);
}

// Those of tokens `from` to `to`; nothing else is read. units: of a token from there on.
template <class E>
void fill_values(const typename E::element* values, int dim, int units, int from, int to, uint32_t* panel) {
    const int first = from + from % step<E>, last = units * E::per_unit >= 2 * W ? to - to % step<E> : first;
    const auto fill = [&]<bool whole>(int j, int end) {
        for (; j < end; j += step<E>)
            fill_lanes<E, whole>(values, dim, units, from, to, j, panel + j / step<E> * 2 * W);
    };
    fill.template operator()<false>(0, first);
    fill.template operator()<true>(first, last);
    fill.template operator()<false>(last < first ? first : last, to);
}

// out[r] of ROWS rows and `vectors` vectors, 1 or 2: the sum over `count` lanes of weight * value.
template <class E, int ROWS>
INLINE void mix(const uint32_t* panel, int count, const uint32_t* weights, int stride, float* out, int64_t out_stride,
                int vectors) {
    f32 acc[ROWS][2] = {};
    for (int j = 0; j < count; j++) {
        const u32 first = load<u32>(panel + j * 2 * W), second = load<u32>(panel + j * 2 * W + W);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u32 weight = weights[r * stride + j] - u32{};
            acc[r][0] = multiply_add<E>(weight, first, acc[r][0]);
            acc[r][1] = multiply_add<E>(weight, second, acc[r][1]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        store(out + r * out_stride, acc[r][0]);
        if (vectors == 2) store(out + r * out_stride + W, acc[r][1]);
    }
}

// Weights [rows, stride] as lanes, and values of half a row of tokens `from` to `to` -> out, in the order of units.
// scratch: `mix_room`.
template <class E>
void mix_all(const float* weights, int rows, int stride, const typename E::element* values, int dim, int from, int to,
             float* out, int64_t out_stride, float* scratch) {
    auto panel = reinterpret_cast<uint32_t*>(scratch);
    auto lanes_of_weights = reinterpret_cast<const uint32_t*>(weights);
    const int room = padded<E>(dim), count = (to + step<E> - 1) / step<E>;
    for (int at = 0; at < room; at += 2 * W) {
        fill_values<E>(values + at, dim, (dim - at) / E::per_unit, from, to, panel);
        by_rows(rows, [&]<int ROWS>(int r) {
            mix<E, ROWS>(panel, count, lanes_of_weights + int64_t(r) * stride, stride, out + r * out_stride + at,
                         out_stride, room - at > W ? 2 : 1);
        });
    }
}

template <class E>
inline int64_t mix_room(int tokens) {
    return int64_t(tokens + 1) / step<E> * 2 * W;
}

}  // namespace latents
