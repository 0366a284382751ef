// Products of a few rows with a weight, with what stands before and after them in a layer.
//
// A row's bits do not depend on the rows beside it: every sum runs over the inputs in the same order, W lanes of it at
// a time, and the lanes are added in the same order at the end.
#pragma once
#include "codes.h"
#include "stored_fixed.h"
#include "stored_products.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"

enum class Ending : int64_t { write, add, gate, activate };
enum class Activation : int64_t { silu, gelu_tanh, relu_squared, clamped_silu };

// out = ending(norm(x) · weight^T + bias), for x [rows, inputs] and weight [outputs, inputs], of the dtype, in codes
// (codes.h) or stored in blocks (stored.h), rounded to the dtype after the norm, after the product and after each
// step of the ending. Where the norm is null, x is taken as it is. centred: LayerNorm, which takes the mean away;
// norm_bias: what it adds, or null; both are fp32 where norm_fp32 is set.
// write: out [rows, outputs]. add: factor * product is added to out. gate: out = activation(product) * (the product with
// `up`, whose bias comes after the other's). activate: out = activation(product).
// Where the weight is null, there is no product: out [rows, inputs] += factor * norm(x).
// beside: the step reads nothing that the steps before it write, from the last one on that is beside none, and has
// scratch of its own: they run together.
struct Product {
    const void* x;
    const void* norm;
    const void* norm_bias;
    stored::Matrix weight, up;  // with a kind where they are stored in blocks
    const void* bias;
    void* out;
    float *widened, *widened_up;  // scratch for rows in the forms of weight and of up; kernels/products.py has its size
    int64_t x_stride, out_stride;  // elements
    int64_t inputs, outputs;
    int64_t bits;  // of the weight's codes, 4 or 6; 0: it is of the dtype
    Ending ending;
    Activation activation;
    int64_t centred, norm_fp32;
    int64_t beside;
    int64_t fixed;  // whether products with matrices of GGUF's kinds are in fixed point even where that is not quicker
    double epsilon, factor;
};

namespace products {

constexpr int OUTPUTS = codes::TILE;
constexpr int MOST_ROWS = stored::MOST_ROWS;  // that are worked on together
constexpr int MOST_STEPS = 320;                // of a call
// Blocks of outputs that are fetched ahead, to the second cache. A block is read column by column, its outputs at once,
// and no prefetcher of a processor's own follows that: without this each core waits for its memory.
constexpr int AHEAD = 2;

// Where the rows are while they are multiplied with codes.
inline codes::Rows codes_of(const Product& p) { return {reinterpret_cast<char*>(p.widened), int(p.inputs)}; }

// The units of a row of `inputs` from element `at` on, and zeros past its end.
template <class E>
INLINE u32 units_of(const typename E::element* row, int inputs, int at) {
    const int rest = inputs - at;
    return rest >= wide<E> ? load<u32>(row + at) : load_some(row + at, rest / E::per_unit);
}

// What a norm does to a row before it is multiplied by the weight: (x - mean) * scale.
struct Normal {
    f32 mean, scale;
};

// part(at, e): numbers of the row, zeros past its end.
template <class E, class Part>
INLINE f32 sum_of_row(int inputs, Part&& part) {
    f32 total = {};
    for (int at = 0; at < inputs; at += wide<E>)
        for (int e = 0; e < E::per_unit; e++) total += part(at, e);
    return all(sum(total));
}

template <class E>
Normal normal_of(const Product& p, const typename E::element* x) {
    const int inputs = int(p.inputs);
    f32 mean = {}, squares = {};
    if (p.centred) {
        mean = sum_of_row<E>(inputs, [&](int at, int e) { return widen<E>(units_of<E>(x, inputs, at), e); }) /
               float(inputs);
        i32 lane;
        for (int i = 0; i < W; i++) lane[i] = i * E::per_unit;
        squares = sum_of_row<E>(inputs, [&](int at, int e) {
            const f32 part = widen<E>(units_of<E>(x, inputs, at), e) - mean;
            return lane + (at + e) < inputs ? part * part : f32{};
        });
    } else {
        for (int at = 0; at < inputs; at += wide<E>)
            for (int e = 0; e < E::per_unit; e++) {
                const f32 part = widen<E>(units_of<E>(x, inputs, at), e);
                squares = fma(part, part, squares);
            }
        squares = all(sum(squares));
    }
    return {mean, all(1.0f / __builtin_sqrtf(squares[0] / float(inputs) + float(p.epsilon)))};
}

// Numbers of a row, normed. norm, bias: those of the same numbers.
template <class E>
INLINE f32 normed(const Normal& n, f32 x, f32 norm, bool has_bias, f32 bias) {
    const f32 y = (x - n.mean) * n.scale * norm;
    return E::rounded(has_bias ? y + bias : y);
}

// W numbers of a vector of the norm from `first` on, `step` apart, zeros past the row's end. read: those of the dtype.
template <class E, class Read>
INLINE f32 of_norm(const Product& p, const void* vector, int first, int step, Read&& read) {
    if (!vector) return f32{};
    if (!p.norm_fp32) return read(static_cast<const typename E::element*>(vector));
    auto from = static_cast<const float*>(vector) + first;
    if (step == 1 && first + W <= p.inputs) return load<f32>(from);
    f32 found = {};
    for (int i = 0; i < W; i++)
        if (first + i * step < p.inputs) found[i] = from[i * step];
    return found;
}

// take(read) for one row, normed. read(i): elements i to i + W, fp32.
template <class E, class Take>
void read_row(const Product& p, int64_t row, Take&& take) {
    using element = typename E::element;
    auto x = static_cast<const element*>(p.x) + row * p.x_stride;
    const Normal normal = p.norm ? normal_of<E>(p, x) : Normal{};
    take([&](int at) {
        const f32 part = E::read(x + at);
        auto own = [&](const void* vector) {
            return of_norm<E>(p, vector, at, 1, [&](const element* from) { return E::read(from + at); });
        };
        return p.norm ? normed<E>(normal, part, own(p.norm), p.norm_bias, own(p.norm_bias)) : part;
    });
}

// One row, normed and widened to fp32 in the order of units; or kept as units of bf16, for tiles in their order.
template <class E>
void widen_row(const Product& p, float* widened, int64_t row) {
    using element = typename E::element;
    const int inputs = int(p.inputs);
    auto x = static_cast<const element*>(p.x) + row * p.x_stride;
    auto units = [&](const element* from, int at) { return units_of<E>(from, inputs, at); };
    const Normal normal = p.norm ? normal_of<E>(p, x) : Normal{};
    for (int at = 0; at < inputs; at += wide<E>) {
        f32 parts[E::per_unit];
        for (int e = 0; e < E::per_unit; e++) {
            parts[e] = widen<E>(units(x, at), e);
            auto own = [&](const void* vector) {
                return of_norm<E>(p, vector, at + e, E::per_unit,
                                  [&](const element* from) { return widen<E>(units(from, at), e); });
            };
            if (p.norm) parts[e] = normed<E>(normal, parts[e], own(p.norm), p.norm_bias, own(p.norm_bias));
        }
        if constexpr (tiles::take<E>) {
            tiles::put(parts, widened, inputs, row, at / wide<E>);
        } else if constexpr (in_pairs<E>) {
            store(widened + row * padded<E>(inputs) + at / 2, pairs_of(parts));
        } else {
            for (int e = 0; e < E::per_unit; e++) store(widened + row * padded<E>(inputs) + at + e * W, parts[e]);
        }
    }
}

template <class E>
bool in_fixed_point(const Product& p, const stored::Matrix& matrix) {
    bool found = false;
    if (matrix.kind != stored::Kind::none)
        stored::with_kind(matrix.kind, [&]<stored::Kind KIND>() {
            found = stored::is_gguf(KIND) && (p.fixed || stored::quicker_in_fixed_point<E>(KIND));
        });
    return found;
}

// One row, normed, as it is multiplied with a matrix.
template <class E>
void prepare_row(const Product& p, const stored::Matrix& matrix, float* widened, int64_t row) {
    const bool is_stored = matrix.kind != stored::Kind::none;
    if (!is_stored && !p.bits) return widen_row<E>(p, widened, row);
    read_row<E>(p, row, [&](auto&& read) {
        if (in_fixed_point<E>(p, matrix)) stored::fixed::take({widened, int(p.inputs)}, row, matrix.kind, read);
        else if (is_stored) stored::take({widened, int(p.inputs)}, row, stored::order_for<E>(matrix.kind), read);
        else codes::take(codes_of(p), row, read);
    });
}

// acc[r][o] += x[r] * units[o], for one vector of units. x: the rows from its first unit on.
template <class E, int ROWS, int OUTS>
INLINE void step(const u32 (&units)[OUTS], const float* x, int stride, f32 (&acc)[ROWS * OUTS]) {
    if constexpr (in_pairs<E>) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int o = 0; o < OUTS; o++)
                acc[r * OUTS + o] = add_pairs(acc[r * OUTS + o], load<u32>(x + r * stride), units[o]);
        return;
    }
#pragma unroll
    for (int e = 0; e < E::per_unit; e++) {
        f32 w[OUTS];
#pragma unroll
        for (int o = 0; o < OUTS; o++) w[o] = widen<E>(units[o], e);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            f32 in = load<f32>(x + r * stride + e * W);
#pragma unroll
            for (int o = 0; o < OUTS; o++) acc[r * OUTS + o] = fma(in, w[o], acc[r * OUTS + o]);
        }
    }
}

// results[r][o] of ROWS rows and OUTS outputs.
template <class E, int ROWS, int OUTS>
inline void dots(const typename E::element* weight, int inputs, const float* x, float (*results)[OUTPUTS]) {
    constexpr int shrunk = in_pairs<E> ? 2 : 1;
    const int stride = padded<E>(inputs), whole = inputs / wide<E> * wide<E>;
    f32 acc[ROWS * OUTS] = {};
    u32 units[OUTS];
    for (int at = 0; at < whole; at += wide<E>) {
#pragma unroll
        for (int o = 0; o < OUTS; o++) {
            auto unit = weight + int64_t(o) * inputs + at;
            units[o] = load<u32>(unit);
            __builtin_prefetch(unit + AHEAD * int64_t(OUTS) * inputs, 0, 2);
        }
        step<E, ROWS, OUTS>(units, x + at / shrunk, stride, acc);
    }
    if (whole < inputs) {
        for (int o = 0; o < OUTS; o++)
            units[o] = load_some(weight + int64_t(o) * inputs + whole, (inputs - whole) / E::per_unit);
        step<E, ROWS, OUTS>(units, x + whole / shrunk, stride, acc);
    }
    put_sums<ROWS, OUTS>(acc, results);
}

// results[r][0..count) of ROWS rows: a register of sums at a time.
template <class E, int ROWS>
inline void dots_of_rows(const typename E::element* weight, int inputs, const float* x, int count,
                         float (*results)[OUTPUTS]) {
    constexpr int outs = W / ROWS;
    auto from = [&](int o) { return reinterpret_cast<float(*)[OUTPUTS]>(&results[0][o]); };
    int o = 0;
    for (; o + outs <= count; o += outs) dots<E, ROWS, outs>(weight + int64_t(o) * inputs, inputs, x, from(o));
    for (; o < count; o++) dots<E, ROWS, 1>(weight + int64_t(o) * inputs, inputs, x, from(o));
}

// results[r][0..count) of `rows` rows from row `from` on, for the tile of a matrix's outputs that begins with `first`.
// widened: where the rows are. bias: of the matrix, or null.
template <class E>
void block(const Product& p, const stored::Matrix& matrix, float* widened, const typename E::element* bias, int64_t from,
           int64_t first, int count, int rows, float (*results)[OUTPUTS]) {
    const int inputs = int(p.inputs), stride = padded<E>(inputs);
    auto weight = static_cast<const typename E::element*>(matrix.rows) + first * inputs;
    if (in_fixed_point<E>(p, matrix))
        stored::fixed::tile(matrix, stored::fixed::Rows{widened, inputs}.from(from), rows, first, count, results);
    else if (matrix.kind != stored::Kind::none)
        stored::tile<E>(matrix, stored::Rows{widened, inputs}.from(from), rows, first, count, results);
    else if (p.bits == 4)
        codes::tile<4>(matrix.rows, codes_of(p).from(from), rows, first, results);
    else if (p.bits == 6)
        codes::tile<6>(matrix.rows, codes_of(p).from(from), rows, first, results);
    else if constexpr (tiles::take<E>)
        tiles::block(weight, inputs, count, widened + from * stride / 2, rows, results);
    else
        by_rows(rows, [&]<int ROWS>(int r) {
            dots_of_rows<E, ROWS>(weight, inputs, widened + (from + r) * stride, count, results + r);
        });
    if (bias)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < count; i++) results[r][i] += E::widen_one(bias[first + i]);
}

// x / (1 + 2^power). Past 2^126 the power is taken as infinite.
template <class E>
INLINE f32 opened(f32 x, f32 power) {
    return E::rounded(x / (1.0f + (power > 126.0f ? all(__builtin_huge_valf()) : exp2(power))));
}

// silu: x / (1 + e^-x). gelu_tanh: x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + .044715 x^3), which is
// x / (1 + e^-2u). relu_squared: max(x, 0)^2. clamped_silu: g / (1 + e^-1.702g) of g = min(x, 7).
template <class E>
INLINE f32 activated(Activation activation, f32 x) {
    if (activation == Activation::relu_squared) {
        x = x < 0.0f ? f32{} : x;
        return E::rounded(x * x);
    }
    if (activation == Activation::silu) return opened<E>(x, x * -1.44269504f);
    if (activation == Activation::clamped_silu) {
        x = x > 7.0f ? all(7.0f) : x;
        return opened<E>(x, x * (-1.702f * 1.44269504f));
    }
    return opened<E>(x, x * (1.0f + .044715f * x * x) * -2.30220818f);  // -2 sqrt(2 / pi) log2(e)
}

// What a gate opens: with clamped_silu between -7 and 7, plus 1.
template <class E>
INLINE f32 opening(const Product& p, const float* ups) {
    const f32 up = E::rounded(load<f32>(ups));
    if (p.activation != Activation::clamped_silu) return up;
    const f32 most = up > 7.0f ? all(7.0f) : up;
    return E::rounded((most < -7.0f ? all(-7.0f) : most) + 1.0f);
}

// One row's results, and where there is a gate what they open, to `count` elements of out.
template <class E>
INLINE void finish(const Product& p, const float* results, const float* ups, typename E::element* out, int count) {
    typename E::element row[OUTPUTS] = {};
    if (p.ending == Ending::add) __builtin_memcpy(row, out, count * sizeof row[0]);
    for (int i = 0; i < OUTPUTS; i += W) {
        f32 y = E::rounded(load<f32>(results + i));
        if (p.ending == Ending::add) {
            if (p.factor != 1) y = E::rounded(y * float(p.factor));
            y = E::rounded(y + E::read(row + i));
        }
        if (p.ending == Ending::gate) y = E::rounded(activated<E>(p.activation, y) * opening<E>(p, ups + i));
        if (p.ending == Ending::activate) y = activated<E>(p.activation, y);
        E::write(row + i, y);
    }
    __builtin_memcpy(out, row, count * sizeof row[0]);
}

// A tile of outputs of `rows` rows from row `begin` on, a multiple of the rows of a tile of AMX.
template <class E>
void work_out(const Product& p, int64_t begin, int64_t rows, int64_t tile) {
    const int64_t first = tile * OUTPUTS;
    const int count = int(p.outputs - first < OUTPUTS ? p.outputs - first : OUTPUTS);
    alignas(64) float results[MOST_ROWS][OUTPUTS], ups[MOST_ROWS][OUTPUTS];
    auto bias = static_cast<const typename E::element*>(p.bias);
    for (int64_t from = begin; from < begin + rows; from += MOST_ROWS) {
        const int some = int(begin + rows - from < MOST_ROWS ? begin + rows - from : MOST_ROWS);
        block<E>(p, p.weight, p.widened, bias, from, first, count, some, results);
        if (p.ending == Ending::gate)
            block<E>(p, p.up, p.widened_up, bias ? bias + p.outputs : bias, from, first, count, some, ups);
        auto out = static_cast<typename E::element*>(p.out) + from * p.out_stride + first;
        for (int r = 0; r < some; r++) finish<E>(p, results[r], ups[r], out + r * p.out_stride, count);
    }
}

// A row of out, to which one of x is added, normed. The numbers lie as they are in memory: `finish` takes them so.
template <class E>
void add_row(const Product& p, int64_t row) {
    using element = typename E::element;
    const int inputs = int(p.inputs);
    auto x = static_cast<const element*>(p.x) + row * p.x_stride;
    auto out = static_cast<element*>(p.out) + row * p.out_stride;
    const Normal normal = normal_of<E>(p, x);
    for (int first = 0; first < inputs; first += OUTPUTS) {
        const int count = inputs - first < OUTPUTS ? inputs - first : OUTPUTS;
        const size_t bytes = count * sizeof(element);
        element from[OUTPUTS] = {};
        __builtin_memcpy(from, x + first, bytes);
        alignas(64) float results[OUTPUTS];
        for (int i = 0; i < OUTPUTS; i += W) {
            auto own = [&](const void* vector) {
                return of_norm<E>(p, vector, first + i, 1, [&](const element* all_of_it) {
                    element some[W] = {};
                    for (int j = 0; j < W && i + j < count; j++) some[j] = all_of_it[first + i + j];
                    return E::read(some);
                });
            };
            store(results + i, normed<E>(normal, E::read(from + i), own(p.norm), p.norm_bias, own(p.norm_bias)));
        }
        finish<E>(p, results, results, out + first, count);
    }
}

// `count` steps, at most MOST_STEPS, of `rows` rows, one after the other but for those beside each other.
template <class E>
void run(const Product* steps, int64_t count, int64_t rows, int64_t how_many) {
    int64_t counts[2 * MOST_STEPS];  // of each group of steps rows to widen, then items: tiles to work out
    int64_t before[MOST_STEPS];      // of each step, items of its group before its own
    int first_of[MOST_STEPS + 1];    // of each group, its first step
    int groups = 0;
    auto drawn = [](const Product& p) { return p.bits ? 4 : 1; };  // tiles at a time: about as many bytes of either weight
    for (int i = 0; i < int(count); i++) {
        const int64_t step = drawn(steps[i]) * OUTPUTS, outputs = steps[i].weight.rows ? steps[i].outputs : 0;
        if (!i || !steps[i].beside) counts[2 * groups] = counts[2 * groups + 1] = 0, first_of[groups++] = i;
        int64_t* own = counts + 2 * (groups - 1);
        before[i] = own[1], own[0] += rows, own[1] += (outputs + step - 1) / step;
    }
    first_of[groups] = int(count);
    threads::in_phases<tiles::Use>(how_many, counts, 2 * groups, [&](int phase, int64_t item, tiles::Use&, int) {
        int at = first_of[phase / 2];
        if (phase % 2) {  // the last step that begins at the item or before
            for (int end = first_of[phase / 2 + 1]; end - at > 1;) {
                const int middle = (at + end) / 2;
                (before[middle] <= item ? at : end) = middle;
            }
            item -= before[at];
        } else {
            at += int(item / rows), item %= rows;
        }
        const Product& p = steps[at];
        if (phase % 2) {
            const int64_t first = item * drawn(p);
            for (int64_t tile = first; tile < first + drawn(p) && tile * OUTPUTS < p.outputs; tile++)
                work_out<E>(p, 0, rows, tile);
        } else if (!p.weight.rows) {
            add_row<E>(p, item);
        } else {
            prepare_row<E>(p, p.weight, p.widened, item);
            if (p.widened_up != p.widened) prepare_row<E>(p, p.up, p.widened_up, item);
        }
    });
}

}  // namespace products
