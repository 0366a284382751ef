// Products of a few rows with a weight, with what stands before and after them in a layer.
//
// A row's bits do not depend on the rows beside it: every sum runs over the inputs in the same order, W lanes of it at
// a time, and the lanes are added in the same order at the end.
#pragma once
#include "threads.h"
#include "vectors.h"

enum class Ending : int64_t { write, add, gate };

// out = ending(norm(x) · weight^T + bias), for x [rows, inputs] and weight [outputs, inputs], rounded to the dtype after
// the norm, after the product and after each step of the ending. Where the norm is null, x is taken as it is.
// write: out [rows, outputs]. add: is added to out. gate: weight is [2 * outputs, inputs], and
// out = silu(first half) * second half.
struct Product {
    const void* x;
    const void* norm;
    const void* weight;
    const void* bias;
    void* out;
    float* widened;  // scratch: rows * padded(inputs)
    int64_t x_stride, out_stride;  // elements
    int64_t inputs, outputs;
    Ending ending;
    double epsilon;
};

namespace products {

constexpr int OUTPUTS = 16;  // that a thread draws at a time
constexpr int MOST_ROWS = 64;   // that are worked on together

// One row, in the order of units.
template <class E>
void widen_row(const Product& p, int64_t row) {
    using element = typename E::element;
    auto x = static_cast<const element*>(p.x) + row * p.x_stride;
    auto norm = static_cast<const element*>(p.norm);
    float* to = p.widened + row * padded<E>(int(p.inputs));
    f32 squares[E::per_unit] = {};
    const int inputs = int(p.inputs), whole = inputs / wide<E> * wide<E>;
    auto widen = [&](const element* from, int at, f32* parts) {
        u32 units = at < whole ? load<u32>(from + at) : load_some(from + at, (inputs - at) / E::per_unit);
        for (int e = 0; e < E::per_unit; e++) parts[e] = ::widen<E>(units, e);
    };
    for (int at = 0; at < inputs; at += wide<E>) {
        f32 parts[E::per_unit];
        widen(x, at, parts);
        for (int e = 0; e < E::per_unit; e++) {
            squares[e] = fma(parts[e], parts[e], squares[e]);
            store(to + at + e * W, parts[e]);
        }
    }
    if (!norm) return;
    float total = sum(squares[0]);
    if constexpr (E::per_unit == 2) total += sum(squares[1]);
    float scale = 1.0f / __builtin_sqrtf(total / float(inputs) + float(p.epsilon));
    for (int at = 0; at < inputs; at += wide<E>) {
        f32 parts[E::per_unit];
        widen(norm, at, parts);
        for (int e = 0; e < E::per_unit; e++) {
            f32 normed = load<f32>(to + at + e * W) * scale * parts[e];
            for (int i = 0; i < W; i++) normed[i] = rounded<E>(normed[i]);
            store(to + at + e * W, normed);
        }
    }
}

// acc[r][o] += x[r] * units[o], for one vector of units.
template <class E, int ROWS, int OUTS>
INLINE void step(const u32 (&units)[OUTS], const float* x, int stride, f32 (&acc)[ROWS][OUTS]) {
#pragma unroll
    for (int e = 0; e < E::per_unit; e++) {
        f32 w[OUTS];
#pragma unroll
        for (int o = 0; o < OUTS; o++) w[o] = widen<E>(units[o], e);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            f32 in = load<f32>(x + r * stride + e * W);
#pragma unroll
            for (int o = 0; o < OUTS; o++) acc[r][o] = fma(in, w[o], acc[r][o]);
        }
    }
}

// sums[r][o] of ROWS rows and OUTS outputs.
template <class E, int ROWS, int OUTS>
inline void dots(const typename E::element* weight, int inputs, const float* x, float (*sums)[OUTPUTS]) {
    const int stride = padded<E>(inputs), whole = inputs / wide<E> * wide<E>;
    f32 acc[ROWS][OUTS] = {};
    u32 units[OUTS];
    for (int at = 0; at < whole; at += wide<E>) {
#pragma unroll
        for (int o = 0; o < OUTS; o++) units[o] = load<u32>(weight + int64_t(o) * inputs + at);
        step<E>(units, x + at, stride, acc);
    }
    if (whole < inputs) {
#pragma unroll
        for (int o = 0; o < OUTS; o++)
            units[o] = load_some(weight + int64_t(o) * inputs + whole, (inputs - whole) / E::per_unit);
        step<E>(units, x + whole, stride, acc);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int o = 0; o < OUTS; o++) sums[r][o] = sum(acc[r][o]);
}

template <class E, int OUTS>
inline void rows_of_dots(const typename E::element* weight, int inputs, const float* x, int rows, float (*sums)[OUTPUTS]) {
    constexpr int most = W == 16 ? 8 : 4;
    const int stride = padded<E>(inputs);
    int r = 0;
    for (; r + most <= rows; r += most) dots<E, most, OUTS>(weight, inputs, x + r * stride, sums + r);
    if constexpr (most == 8)
        if (r + 4 <= rows) dots<E, 4, OUTS>(weight, inputs, x + r * stride, sums + r), r += 4;
    if (r + 2 <= rows) dots<E, 2, OUTS>(weight, inputs, x + r * stride, sums + r), r += 2;
    if (r < rows) dots<E, 1, OUTS>(weight, inputs, x + r * stride, sums + r);
}

// sums[r][0..count) for outputs `first` and on.
template <class E>
void block(const Product& p, const float* x, int64_t first, int count, int rows, float (*sums)[OUTPUTS]) {
    using element = typename E::element;
    const int inputs = int(p.inputs);
    auto weight = static_cast<const element*>(p.weight) + first * inputs;
    int o = 0;
    auto offset = [&](int at) { return reinterpret_cast<float(*)[OUTPUTS]>(&sums[0][at]); };
    if (rows == 1)
        for (; o + 4 <= count; o += 4) rows_of_dots<E, 4>(weight + int64_t(o) * inputs, inputs, x, rows, offset(o));
    for (; o + 2 <= count; o += 2) rows_of_dots<E, 2>(weight + int64_t(o) * inputs, inputs, x, rows, offset(o));
    for (; o < count; o++) rows_of_dots<E, 1>(weight + int64_t(o) * inputs, inputs, x, rows, offset(o));
    if (auto bias = static_cast<const element*>(p.bias))
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < count; i++) sums[r][i] += E::widen_one(bias[first + i]);
}

// x / (1 + e^-x). The exponent is bounded so that 2^ stays finite.
template <class E>
inline float silu(float x) {
    f32 power = all(x * -1.44269504f);
    power = power > 126.0f ? all(126.0f) : power;
    return rounded<E>(x / (1.0f + exp2(power)[0]));
}

template <class E>
void draw(const Product& p, int64_t rows, int64_t number) {
    using element = typename E::element;
    const int64_t first = number * OUTPUTS;
    const int count = int(p.outputs - first < OUTPUTS ? p.outputs - first : OUTPUTS);
    float sums[MOST_ROWS][OUTPUTS], ups[MOST_ROWS][OUTPUTS];
    for (int64_t from = 0; from < rows; from += MOST_ROWS) {
        const int some = int(rows - from < MOST_ROWS ? rows - from : MOST_ROWS);
        const float* x = p.widened + from * padded<E>(int(p.inputs));
        block<E>(p, x, first, count, some, sums);
        if (p.ending == Ending::gate) block<E>(p, x, p.outputs + first, count, some, ups);
        for (int r = 0; r < some; r++) {
            element* out = static_cast<element*>(p.out) + (from + r) * p.out_stride + first;
            for (int i = 0; i < count; i++) {
                float y = rounded<E>(sums[r][i]);
                if (p.ending == Ending::add) y += E::widen_one(out[i]);
                if (p.ending == Ending::gate) y = silu<E>(y) * rounded<E>(ups[r][i]);
                out[i] = E::round_one(y);
            }
        }
    }
}

// `count` products one after the other, at most 16, each of `rows` rows.
template <class E>
void run(const Product* steps, int64_t count, int64_t rows, int64_t how_many) {
    constexpr int most = 16;
    threads::Counter widening[most], drawing[most];
    auto body = [&] {
        for (int64_t i = 0; i < count; i++) {
            const Product& p = steps[i];
            if (i) threads::barrier();
            for (int64_t row; (row = widening[i].draw()) < rows;) widen_row<E>(p, row);
            threads::barrier();
            for (int64_t number; (number = drawing[i].draw()) * OUTPUTS < p.outputs;) draw<E>(p, rows, number);
        }
    };
    threads::run(how_many, body);
}

}  // namespace products
