// What stands before and after the gated delta rule, or Mamba-2, in a layer: its rows, the convolution of queries, keys
// and values, the steps and decays; the gated norm, and what is held of the rows.
#pragma once
#include "functions.h"
#include "vectors.h"

// Tokens are numbered from the state's place on: `count` held ones, then the new rows. The rows of the width - 1 tokens
// before them are held, too.
struct Delta {
    float* state;                      // [heads, key_dim, value_dim]
    void* held;                        // rows of queries, keys, values, steps (of a delta rule) and times
    const void* rows;                  // [T] of the same, with gates after the values
    void* out;                         // [T, heads * value_dim]
    const float *taps, *taps_bias;     // [width, channels]; [channels], or null
    const float *decay, *time_bias;    // [heads]; [times()]
    const float* skip;                 // of Mamba-2: [heads]
    const void* norm;                  // [value_dim], of Mamba-2 [heads * value_dim] or null; fp32 if norm_fp32
    float* gated;                      // of Mamba-2 with a norm: [T, heads * value_dim], in between
    float* scratch;                    // `delta::room` floats for each thread
    int64_t held_stride, rows_stride;  // elements
    int64_t count, new_rows, settles;
    int64_t key_heads, heads, key_dim, value_dim, width, norm_fp32;
    int64_t tiled;  // -1, or value head h is served by key head (h + tiled) % key_heads
    int64_t is_mamba;    // an update is no correction: it does not depend on the state
    int64_t by_channel;  // each channel of a head's key has a decay, as in Kimi Delta Attention; key_heads is heads
    int64_t bounded;     // logs of decays are `least` times a sigmoid
    int64_t gates_by_sigmoid;
    double steps, least, epsilon, norm_epsilon;

    int64_t key_head(int64_t head) const {
        return tiled < 0 ? head / (heads / key_heads) : (head + tiled) % key_heads;
    }
    int64_t tokens() const { return count + new_rows; }
    int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
    int64_t times() const { return by_channel ? heads * key_dim : heads; }
    int64_t kept() const { return channels() + (is_mamba ? 0 : heads) + times(); }
    bool keeps(int64_t token) const { return token < count || settles; }  // the state after it

    // The row of a token; those before the state's place have negative numbers.
    template <class E>
    const typename E::element* row(int64_t token) const {
        using element = typename E::element;
        if (token < count) return static_cast<const element*>(held) + (token + width - 1) * held_stride;
        return static_cast<const element*>(rows) + (token - count) * rows_stride;
    }

    // Elements of a token's row that are not held: the gates, after the channels.
    int64_t unheld(int64_t token) const { return token < count ? 0 : heads * value_dim; }
};

namespace delta {

constexpr int TOKENS = 16;     // that are prepared together
constexpr int MOST_WIDTH = 8;  // of the convolution

inline int in_vectors(int64_t count) { return padded<Fp32>(int(count)); }

// A thread's memory: queries, keys and values of TOKENS tokens; by channel their decays and the keys times these; see
// delta.h for the others.
struct Room {
    float *queries, *keys, *values, *decays, *decayed_keys, *block, *state;
};

// What a head makes of a token. value: which its output replaces. both: key . query. by_key, by_query: the factors of
// rows in its sums over the state: key and query; by channel these times `decays`, and `decay` is 1.
struct Token {
    const float *key, *by_key, *by_query, *decays;
    float* value;
    float decay, step, both;
};

// Consecutive tokens of a head. skip: the factor of a value that is added to its output.
struct Some {
    int64_t first;
    int count;
    float skip;
    Token tokens[TOKENS];
};

// Which queries and keys a thread has in its memory: value heads of one key head follow each other.
struct Seen {
    int64_t key_head = -1, first = -1;
    float both[TOKENS];
};

INLINE float dot(const float* one, const float* other, int size) {
    f32 acc = {};
    for (int i = 0; i < size; i += W) acc = fma(load<f32>(one + i), load<f32>(other + i), acc);
    return sum(acc);
}

INLINE void scale(float* x, int size, float factor) {
    for (int i = 0; i < size; i += W) store(x + i, load<f32>(x + i) * factor);
}

// out [tokens, in_vectors(dim)]: the activated convolution of `dim` channels. WIDTH: of it, or 0 for any.
template <class E, int WIDTH>
void convolve(const Delta& d, const Some& some, int64_t channel, int64_t dim, float* out) {
    constexpr int most = WIDTH ? WIDTH : MOST_WIDTH;
    const int width = WIDTH ? WIDTH : int(d.width);
    for (int64_t at = 0; at < dim; at += W) {
        auto read = [&](int64_t token) { return read_some<E>(d.row<E>(token) + channel + at, dim - at); };
        f32 taps[most], window[most], bias = {};
        if (d.taps_bias) bias = read_some<Fp32>(d.taps_bias + channel + at, dim - at);
        for (int i = 0; i < width; i++) {
            taps[i] = read_some<Fp32>(d.taps + i * d.channels() + channel + at, dim - at);
            window[i] = i + 1 < width ? read(some.first + i - width + 1) : f32{};
        }
        for (int t = 0; t < some.count; t++) {
            window[width - 1] = read(some.first + t);
            f32 sum = fma(taps[0], window[0], bias);
            for (int i = 1; i < width; i++) sum = fma(taps[i], window[i], sum), window[i - 1] = window[i];
            store(out + t * in_vectors(dim) + at, silu(sum));
        }
    }
}

// A head's decays after some time, which is given before its softplus.
INLINE f32 decays_after(const Delta& d, int64_t head, f32 time) {
    const float rate = d.decay[head];
    return exp(d.bounded ? float(d.least) / (1.0f + exp(rate * time)) : rate * softplus(time));
}

// The steps of a head's tokens, and their decays if these are not by channel. Lanes are tokens.
template <class E>
void weigh(const Delta& d, int64_t head, Some& some) {
    alignas(64) float steps[TOKENS] = {}, decays[TOKENS] = {};
    for (int t = 0; t < some.count; t++) {
        const auto own = d.row<E>(some.first + t) + d.channels() + d.unheld(some.first + t) + head;
        steps[t] = E::widen_one(own[0]), decays[t] = E::widen_one(own[d.is_mamba || d.by_channel ? 0 : d.heads]);
    }
    for (int t = 0; t < TOKENS; t += W) {
        const f32 time = load<f32>(decays + t) + d.time_bias[head];
        store(steps + t, d.is_mamba ? softplus(time) : sigmoid(load<f32>(steps + t)) * float(d.steps));
        store(decays + t, d.by_channel ? all(1.0f) : decays_after(d, head, time));
    }
    for (int t = 0; t < some.count; t++) some.tokens[t].step = steps[t], some.tokens[t].decay = decays[t];
}

// The decays of channels by a head's tokens, and its keys and queries times them. Lanes are channels.
template <class E>
void weigh_channels(const Delta& d, int64_t head, const Room& room, Some& some) {
    const int64_t size = in_vectors(d.key_dim);
    for (int64_t at = 0; at < d.key_dim; at += W) {
        const int64_t channel = head * d.key_dim + at, left = d.key_dim - at;
        const f32 bias = read_some<Fp32>(d.time_bias + channel, left);
        for (int t = 0; t < some.count; t++) {
            const int64_t token = some.first + t, own = t * size + at;
            const f32 time = read_some<E>(d.row<E>(token) + d.channels() + d.unheld(token) + d.heads + channel, left);
            const f32 decays = decays_after(d, head, time + bias);
            store(room.decays + own, decays);
            store(room.decayed_keys + own, decays * load<f32>(room.keys + own));
            store(room.queries + own, decays * load<f32>(room.queries + own));
        }
    }
    for (int t = 0; t < some.count; t++) {
        some.tokens[t].decays = room.decays + t * size;
        some.tokens[t].by_key = room.decayed_keys + t * size;
    }
}

// What a head makes of `some` tokens.
template <class E>
void prepare(const Delta& d, int64_t head, const Room& room, Seen& seen, Some& some) {
    const int64_t key_head = d.key_head(head), key_size = d.key_heads * d.key_dim;
    const int size = in_vectors(d.key_dim);
    auto fill = [&](int64_t channel, int64_t dim, float* out) {
        if (d.width == 4) convolve<E, 4>(d, some, channel, dim, out);
        else convolve<E, 0>(d, some, channel, dim, out);
    };
    if (seen.key_head != key_head || seen.first != some.first) {
        seen.key_head = key_head, seen.first = some.first;
        fill(key_head * d.key_dim, d.key_dim, room.queries);
        fill(key_size + key_head * d.key_dim, d.key_dim, room.keys);
        for (int t = 0; t < some.count; t++) {
            float *query = room.queries + t * size, *key = room.keys + t * size;
            if (!d.is_mamba) {
                scale(query, size, 1 / __builtin_sqrtf((dot(query, query, size) + float(d.epsilon)) * float(d.key_dim)));
                scale(key, size, 1 / __builtin_sqrtf(dot(key, key, size) + float(d.epsilon)));
            }
            seen.both[t] = dot(query, key, size);
        }
    }
    fill(2 * key_size + head * d.value_dim, d.value_dim, room.values);
    weigh<E>(d, head, some);
    for (int t = 0; t < some.count; t++) {
        Token& token = some.tokens[t];
        token.key = token.by_key = room.keys + t * size, token.by_query = room.queries + t * size;
        token.value = room.values + t * in_vectors(d.value_dim), token.both = seen.both[t];
    }
    if (d.by_channel) weigh_channels<E>(d, head, room, some);
}

// The factors of a norm from number `at` on.
template <class E>
INLINE f32 norm_weight(const Delta& d, int64_t at, int64_t count) {
    if (d.norm_fp32) return read_some<Fp32>(static_cast<const float*>(d.norm) + at, count);
    return read_some<E>(static_cast<const typename E::element*>(d.norm) + at, count);
}

// A head's output for new row t: normed, times its activated gate. Of Mamba-2 times its gate, and not normed yet.
template <class E>
void finish(const Delta& d, int64_t head, int64_t t, const float* out) {
    using element = typename E::element;
    const int64_t dim = d.value_dim, first = head * dim;
    const float mean = dot(out, out, in_vectors(dim)) / float(dim);
    const float scale = 1 / __builtin_sqrtf(mean + float(d.norm_epsilon));
    const element* gate = d.row<E>(d.count + t) + d.channels() + first;
    const int64_t at = t * d.heads * dim + first;
    for (int64_t i = 0; i < dim; i += W) {
        const f32 own = read_some<E>(gate + i, dim - i), activated = d.gates_by_sigmoid ? sigmoid(own) : silu(own);
        if (d.gated) write_some<Fp32>(d.gated + at + i, load<f32>(out + i) * activated, dim - i);
        else {
            const f32 normed = d.is_mamba ? load<f32>(out + i) : load<f32>(out + i) * scale * norm_weight<E>(d, i, dim - i);
            write_some<E>(static_cast<element*>(d.out) + at + i, normed * activated, dim - i);
        }
    }
}

// Of Mamba-2: the output of a key head's value heads for a new row, normed.
template <class E>
void norm_group(const Delta& d, int64_t item) {
    const int64_t size = d.heads / d.key_heads * d.value_dim, first = item % d.key_heads * size;
    const float* from = d.gated + item * size;
    f32 squares = {};
    for (int64_t i = 0; i < size; i += W) {
        const f32 some = read_some<Fp32>(from + i, size - i);
        squares = fma(some, some, squares);
    }
    const float scale = 1 / __builtin_sqrtf(sum(squares) / float(size) + float(d.norm_epsilon));
    for (int64_t i = 0; i < size; i += W) {
        const f32 normed = read_some<Fp32>(from + i, size - i) * scale * norm_weight<E>(d, first + i, size - i);
        write_some<E>(static_cast<typename E::element*>(d.out) + item * size + i, normed, size - i);
    }
}

// Elements `from` to `to` of the rows to hold: the last ones before the new rows, and these; or the last ones of all.
template <class E>
void hold(const Delta& d, int64_t from, int64_t to) {
    using element = typename E::element;
    const int64_t before = d.width - 1, rows = before + (d.settles ? 0 : d.new_rows);
    const int64_t first = (d.settles ? d.tokens() : d.count) - before;
    const int64_t middle = from > d.channels() ? from : to < d.channels() ? to : d.channels();
    for (int64_t i = 0; i < rows; i++) {
        element* own = static_cast<element*>(d.held) + i * d.held_stride;
        auto move = [&](int64_t at, int64_t end, int64_t skipped) {
            __builtin_memmove(own + at, d.row<E>(first + i) + at + skipped, (end - at) * sizeof(element));
        };
        move(from, middle, 0);
        move(middle, to, d.unheld(first + i));
    }
}

}  // namespace delta
