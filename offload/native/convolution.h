// Short convolutions over new rows of one layer (kernels/convolution.py): gated, C * convolution(B * x), or dilated,
// silu(convolution(x)).
//
// An item of work is a block of rows by a block of channels. Lanes are channels, sums over taps run in their order, and
// a token is computed alike wherever it stands: bits depend neither on which tokens run together nor on which of them
// were held.
#pragma once
#include "functions.h"
#include "threads.h"
#include "vectors.h"

// Tokens are numbered from the place of what is held on: `count` held ones, then the new rows. The inputs of the width - 1
// tokens before them are held, too: B * x, or x.
struct Convolution {
    void* held;                        // rows of inputs
    const void* rows;                  // [T] of B, C and x, or of x
    void* out;                         // [T, channels]
    const float* taps;                 // [taps, channels]
    const float* bias;                 // [channels] or null
    int64_t held_stride, rows_stride;  // elements
    int64_t count, new_rows, settles;
    int64_t channels, width;  // from the first tap to the last
    int64_t dilation;         // tokens between taps; 0: a gated convolution, with `width` taps

    int64_t tokens() const { return count + new_rows; }

    // The row of a held token; those before the first have negative numbers.
    template <class E>
    typename E::element* held_row(int64_t token) const {
        return static_cast<typename E::element*>(held) + (token + width - 1) * held_stride;
    }
    template <class E>
    const typename E::element* new_row(int64_t token) const {
        return static_cast<const typename E::element*>(rows) + (token - count) * rows_stride;
    }
};

namespace convolution {

constexpr int MOST_TAPS = 8;
constexpr int64_t ROWS = 64, CHANNELS = 256;  // of an item

struct Nothing {};  // that a thread has of its own

// The inputs of W channels of a token, of which so many are there.
template <class E>
INLINE f32 input(const Convolution& c, int64_t token, int64_t channel, int64_t left) {
    if (token < c.count) return read_some<E>(c.held_row<E>(token) + channel, left);
    const auto* row = c.new_row<E>(token) + channel;
    if (c.dilation) return read_some<E>(row, left);
    return E::rounded(read_some<E>(row, left) * read_some<E>(row + 2 * c.channels, left));
}

// W channels of new rows `first` to `end`, gated. WIDTH: of the convolution, or 0 for any.
template <class E, int WIDTH>
INLINE void convolve(const Convolution& c, int64_t first, int64_t end, int64_t channel) {
    constexpr int most = WIDTH ? WIDTH : MOST_TAPS;
    const int width = WIDTH ? WIDTH : int(c.width);
    const int64_t left = c.channels - channel;
    f32 taps[most], window[most];
    for (int i = 0; i < width; i++) {
        taps[i] = read_some<Fp32>(c.taps + i * c.channels + channel, left);
        window[i] = i + 1 < width ? input<E>(c, c.count + first + i - width + 1, channel, left) : f32{};
    }
    const f32 bias = c.bias ? read_some<Fp32>(c.bias + channel, left) : f32{};
    for (int64_t t = first; t < end; t++) {
        const int64_t token = c.count + t;
        window[width - 1] = input<E>(c, token, channel, left);
        f32 sum = taps[0] * window[0];
        for (int i = 1; i < width; i++) sum = fma(taps[i], window[i], sum), window[i - 1] = window[i];
        if (c.bias) sum += bias;
        const f32 gate = read_some<E>(c.new_row<E>(token) + c.channels + channel, left);
        write_some<E>(static_cast<typename E::element*>(c.out) + t * c.channels + channel, gate * E::rounded(sum), left);
    }
}

// W channels of new rows `first` to `end`, dilated.
template <class E>
INLINE void convolve_dilated(const Convolution& c, int64_t first, int64_t end, int64_t channel) {
    const int count = int((c.width - 1) / c.dilation) + 1;
    const int64_t left = c.channels - channel;
    f32 taps[MOST_TAPS];
    for (int i = 0; i < count; i++) taps[i] = read_some<Fp32>(c.taps + i * c.channels + channel, left);
    for (int64_t t = first; t < end; t++) {
        const int64_t oldest = c.count + t - c.width + 1;
        f32 sum = {};
        for (int i = 0; i < count; i++) sum = fma(taps[i], input<E>(c, oldest + i * c.dilation, channel, left), sum);
        auto* out = static_cast<typename E::element*>(c.out) + t * c.channels + channel;
        write_some<E>(out, silu(E::rounded(sum)), left);
    }
}

// Elements `from` to `to` of the rows to hold: the last ones before the new rows, and these; or the last ones of all.
template <class E>
void hold(const Convolution& c, int64_t from, int64_t to) {
    const int64_t before = c.width - 1, rows = before + (c.settles ? 0 : c.new_rows);
    const int64_t first = (c.settles ? c.tokens() : c.count) - before;
    for (int64_t i = 0; i < rows; i++) {
        auto* own = c.held_row<E>(i - before);
        if (first + i < c.count) {
            __builtin_memmove(own + from, c.held_row<E>(first + i) + from, (to - from) * sizeof(*own));
            continue;
        }
        for (int64_t channel = from; channel < to; channel += W)
            write_some<E>(own + channel, input<E>(c, first + i, channel, to - channel), to - channel);
    }
}

// Blocks of rows read what was held, so held rows are moved when all are done.
template <class E>
void run(const Convolution& c, int64_t how_many) {
    const int64_t across = (c.channels + CHANNELS - 1) / CHANNELS;
    const int64_t counts[2] = {(c.new_rows + ROWS - 1) / ROWS * across, across};
    threads::in_phases<Nothing>(how_many, counts, 2, [&](int phase, int64_t item, Nothing&, int) {
        const int64_t from = item % across * CHANNELS, to = c.channels < from + CHANNELS ? c.channels : from + CHANNELS;
        if (phase == 1) return hold<E>(c, from, to);
        const int64_t first = item / across * ROWS, end = c.new_rows < first + ROWS ? c.new_rows : first + ROWS;
        for (int64_t channel = from; channel < to; channel += W) {
            if (c.dilation) convolve_dilated<E>(c, first, end, channel);
            else if (c.width == 3) convolve<E, 3>(c, first, end, channel);
            else convolve<E, 0>(c, first, end, channel);
        }
    });
}

}  // namespace convolution
