// The gated delta rule over new rows of one layer (kernels/delta.py; Yang et al. 2024, arXiv 2412.06464), and Mamba-2
// (kernels/mamba.py; Dao and Gu 2024, arXiv 2405.21060), in which u = step * value, whatever the state holds. In Kimi
// Delta Attention (arXiv 2510.26692) each row of a state has a decay of its own.
//
// An item of work is a value head. Of its state S [key_dim, value_dim] a token needs p = S^T key and r = S^T query. With
// u = step * (value - decay * p) its output is decay * r + (key . query) * u, and S becomes decay * S + key u^T; while
// it does, the next token's sums are made. Decays of rows multiply the key and the query of these sums instead. Lanes
// are columns of S, sums over its rows run in their order, and a token is computed alike wherever it stands: bits depend
// neither on which tokens run together nor on which of them were held.
#pragma once
#include "delta_rows.h"
#include "threads.h"

namespace delta {

constexpr int BLOCK = W == 8 ? 2 : 4;  // vectors of columns that are worked on together: their sums stay in registers
constexpr int WIDE = 2 * BLOCK;        // the same where most of the time goes to reading memory, in its order
constexpr int FEW = 4;                 // tokens for which that is so
constexpr int SLICES = 64;             // that held rows are moved in

inline int64_t block_size(const Delta& d) { return d.key_dim * WIDE * W; }

// Floats of scratch that a thread needs.
inline int64_t room(const Delta& d) {
    const int64_t rows = TOKENS * int64_t((d.by_channel ? 4 : 2) * in_vectors(d.key_dim) + in_vectors(d.value_dim));
    return (rows + block_size(d) + d.key_dim * d.value_dim + 31) / 32 * 32;
}

// block: columns of a state, which lie together, so that they stay in the first cache; a head's own are too far apart.
// state: of a head, where it is not to be kept.
inline Room room_of(const Delta& d, int thread) {
    Room r;
    r.queries = d.scratch + thread * room(d);
    r.keys = r.queries + TOKENS * in_vectors(d.key_dim);
    r.values = r.keys + TOKENS * in_vectors(d.key_dim);
    r.decays = r.values + TOKENS * in_vectors(d.value_dim);
    r.decayed_keys = r.decays + (d.by_channel ? TOKENS * in_vectors(d.key_dim) : 0);
    r.block = r.decayed_keys + (d.by_channel ? TOKENS * in_vectors(d.key_dim) : 0);
    r.state = r.block + block_size(d);
    return r;
}

// Some columns of a state, a row every `stride` numbers.
struct Columns {
    float* at;
    int64_t stride;
};

// N vectors of one row. partial: one of so many lanes.
template <int N, bool partial>
INLINE void get(const float* from, int lanes, f32 (&row)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) row[n] = partial ? (f32)load_some(from, lanes) : load<f32>(from + n * W);
}

template <int N, bool partial>
INLINE void put(float* to, int lanes, const f32 (&row)[N]) {
    if constexpr (partial) {
        for (int i = 0; i < lanes; i++) to[i] = row[0][i];
    } else {
#pragma unroll
        for (int n = 0; n < N; n++) store(to + n * W, row[n]);
    }
}

enum Sums { NONE, BY_KEY, BY_QUERY, ALL };  // of the next token; a held one has no output, and Mamba-2 needs no p

// What tokens make of N vectors of columns.
template <int N>
struct Made {
    f32 update[N], by_key[N], by_query[N];
};

// The state before `next`, and its sums over it. updates: the state is first brought past `token`, from one place to
// another.
template <int N, bool partial, bool by_channel, bool updates, Sums sums>
INLINE void pass(Columns from, Columns to, int64_t rows, int lanes, const Token& token, const Token& next, Made<N>& m) {
    f32 by_key[N] = {}, by_query[N] = {}, update[N];
#pragma unroll
    for (int n = 0; n < N; n++) update[n] = m.update[n];
    const float *key = token.key, *next_key = next.by_key, *next_query = next.by_query, *decays = token.decays;
    const float decay = token.decay;
    for (int64_t i = 0; i < rows; i++) {
        f32 row[N];
        get<N, partial>(from.at + i * from.stride, lanes, row);
        if constexpr (updates) {
#pragma unroll
            for (int n = 0; n < N; n++) row[n] = fma(all(key[i]), update[n], (by_channel ? decays[i] : decay) * row[n]);
            put<N, partial>(to.at + i * to.stride, lanes, row);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            if constexpr (sums & BY_KEY) by_key[n] = fma(all(next_key[i]), row[n], by_key[n]);
            if constexpr (sums & BY_QUERY) by_query[n] = fma(all(next_query[i]), row[n], by_query[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) m.by_key[n] = by_key[n], m.by_query[n] = by_query[n];
}

// `some` tokens over N vectors of columns of a head's state, from `column` on.
template <int N, bool partial, bool by_channel>
void advance(const Delta& d, const Some& some, float* state, const Room& room, int64_t column, int lanes) {
    const Columns block{room.block, N * W};
    const int64_t end = some.first + some.count, rows = d.key_dim;
    // Where the state is before a token: a block, but at the ends and where it is to be kept.
    auto place = [&](int64_t token) {
        float* home = token <= d.count || d.settles ? state : room.state;
        const bool at_home = token == some.first || token == end || token == d.count;
        return at_home ? Columns{home + column, d.value_dim} : block;
    };
    Made<N> m = {};
    auto sum_up = [&]<bool updates>(int64_t number, const Token& token, const Token& next) {
        const Columns from = place(number - updates), to = place(number);
        auto by = [&]<Sums sums>() {
            pass<N, partial, by_channel, updates, sums>(from, to, rows, lanes, token, next, m);
        };
        if constexpr (!by_channel)
            if (d.is_mamba)
                return number < d.count ? by.template operator()<NONE>() : by.template operator()<BY_QUERY>();
        number < d.count ? by.template operator()<BY_KEY>() : by.template operator()<ALL>();
    };
    sum_up.template operator()<false>(some.first, some.tokens[0], some.tokens[0]);
    for (int t = 0; t < some.count; t++) {
        const Token& token = some.tokens[t];
        const int64_t number = some.first + t;
#pragma unroll
        for (int n = 0; n < N; n++) {
            float* value = token.value + column + n * W;
            const f32 own = load<f32>(value);
            m.update[n] = token.step * (d.is_mamba ? own : own - token.decay * m.by_key[n]);
            const f32 out = fma(all(token.both), m.update[n], token.decay * m.by_query[n]);
            store(value, d.is_mamba ? fma(all(some.skip), own, out) : out);
        }
        if (t + 1 < some.count)
            sum_up.template operator()<true>(number + 1, token, some.tokens[t + 1]);
        else if (end < d.tokens() || d.keeps(number))
            pass<N, partial, by_channel, true, NONE>(place(number), place(end), rows, lanes, token, token, m);
    }
}

// `some` tokens over all columns of a head's state.
template <bool by_channel>
void advance_all(const Delta& d, const Some& some, float* state, const Room& room) {
    int64_t column = 0;
    auto by = [&]<int N>() {
        for (; column + N * W <= d.value_dim; column += N * W)
            advance<N, false, by_channel>(d, some, state, room, column, W);
    };
    if (some.count <= FEW) by.template operator()<WIDE>();
    by.template operator()<BLOCK>();
    by.template operator()<1>();
    if (column < d.value_dim) advance<1, true, by_channel>(d, some, state, room, column, int(d.value_dim - column));
}

// All tokens of one head.
template <class E>
void run_head(const Delta& d, int64_t head, const Room& room, Seen& seen) {
    float* state = d.state + head * d.key_dim * d.value_dim;
    for (int64_t first = 0; first < d.tokens(); first += TOKENS) {
        Some some{first, int(d.tokens() - first < TOKENS ? d.tokens() - first : TOKENS), d.is_mamba ? d.skip[head] : 0, {}};
        prepare<E>(d, head, room, seen, some);
        d.by_channel ? advance_all<true>(d, some, state, room) : advance_all<false>(d, some, state, room);
        for (int t = 0; t < some.count; t++)
            if (first + t >= d.count) finish<E>(d, head, first + t - d.count, some.tokens[t].value);
    }
}

// Heads read each other's channels, so held rows are moved when all heads are done.
template <class E>
void run(const Delta& d, int64_t how_many) {
    const int64_t counts[3] = {d.heads, d.gated ? d.new_rows * d.key_heads : 0, SLICES};
    threads::in_phases<Seen>(how_many, counts, 3, [&](int phase, int64_t item, Seen& seen, int thread) {
        if (phase == 0) run_head<E>(d, item, room_of(d, thread), seen);
        else if (phase == 1) norm_group<E>(d, item);
        else hold<E>(d, d.kept() * item / SLICES, d.kept() * (item + 1) / SLICES);
    });
}

}  // namespace delta
