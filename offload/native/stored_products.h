// Products of a few rows with a matrix in blocks (stored.h), in fp32: nothing is rounded to the dtype but the rows,
// which are given so, and the result.
//
// - Of GGUF's kinds codes are multiplied (stored_codes.h, stored_pairs.h). A group's part of a product is
//   step * sum(code * x) + least * sum(x). Rows in bf16 and codes are multiplied in pairs where the processor can; else
//   both are widened to fp32.
// - Our own blocks' numbers are rounded to the scale's dtype, so they are computed, and multiplied in fp32.
//
// The kind, the dtype and the machine decide, as they do whether a product is in fixed point, never the number of rows, and a row's sums run in one order: its bits do
// not depend on the rows beside it.
#pragma once
#include "stored_pairs.h"

namespace stored {

constexpr int TILE = 16;       // outputs
constexpr int SOME = 256;      // numbers that are computed before they are multiplied: a whole block, or several
constexpr int MOST_ROWS = 64;  // that are worked on together

// results[r][0] of ROWS rows from `row` on, by codes: Codes or Pairs.
template <Kind KIND, class Multiplied, int ROWS>
INLINE void dots_of_codes(const uint8_t* at, const Own& own, const Rows& rows, int row, float (*results)[TILE]) {
    f32 acc[ROWS] = {};
    eight least[ROWS] = {};
    const auto multiply = [&]<int COUNT>(int first) __attribute__((always_inline)) {
        const Steps<KIND, COUNT> steps(at, own);
        const typename Multiplied::OfBlock of_block(at, own);
        for (int i = 0; i < bytes_of_256(KIND); i += LINE) __builtin_prefetch(at + AHEAD + i);
        if constexpr (has_least(KIND))
            for (int r = 0; r < ROWS; r++) least[r] = steps.add_least(least[r], rows, row + r, first);
#pragma unroll
        for (int i = 0; i < COUNT * GROUP; i += Multiplied::INPUTS) {
            const Multiplied codes(at, i / Multiplied::INPUTS, own, steps, of_block);
#pragma unroll
            for (int r = 0; r < ROWS; r++) acc[r] = codes.add(acc[r], rows, row + r, first * GROUP + i);
        }
    };
    int first = 0;
    for (; first + GROUPS <= rows.groups(); first += GROUPS, at += bytes_of_256(KIND))
        multiply.template operator()<GROUPS>(first);
    if constexpr (!of_256(KIND)) {
        constexpr int some = groups_of_block(KIND) > 2 ? groups_of_block(KIND) : 2;
        for (; first + some <= rows.groups(); first += some, at += some / groups_of_block(KIND) * form(KIND).nbytes)
            multiply.template operator()<some>(first);
        if constexpr (groups_of_block(KIND) == 1)
            if (first < rows.groups()) multiply.template operator()<1>(first);
    }
    for (int r = 0; r < ROWS; r++) {
        results[r][0] = sum(acc[r]) * *rows.unit(row + r);
        if constexpr (has_least(KIND)) results[r][0] += sum(least[r]);
    }
}

// results[r][0..OUTS) of `number` rows, by numbers: some are computed for all rows.
template <Kind KIND, int OUTS>
void dots_of_numbers(const Matrix& m, const uint8_t* at, const Rows& rows, int number, float (*results)[TILE]) {
    const int64_t of_output = m.row_bytes(rows.inputs);
    const int stride = rows.stride();
    alignas(64) float numbers[OUTS][SOME];
    f32 totals[MOST_ROWS][OUTS];
    for (int r = 0; r < number; r++)
        for (int o = 0; o < OUTS; o++) totals[r][o] = f32{};
    for (int first = 0; first < rows.inputs; first += SOME) {
        const int count = rows.inputs - first < SOME ? rows.inputs - first : SOME;
        for (int i = 0; i < count; i += m.numbers, at += m.nbytes)
#pragma unroll
            for (int o = 0; o < OUTS; o++) {
                const uint8_t* block = at + o * of_output;
                for (int line = 0; line < m.nbytes; line += LINE) __builtin_prefetch(block + AHEAD + line);
                decode_block<Fp32, KIND>(m.numbers, block, Own{}, numbers[o] + i);
            }
        by_rows(number, [&]<int ROWS>(int row) {
            const float* x = rows.numbers(row) + first;
            f32 acc[ROWS][OUTS];
            __builtin_memcpy(acc, totals[row], sizeof acc);
            for (int i = 0; i < count; i += W)
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int o = 0; o < OUTS; o++)
                        acc[r][o] = fma(load<f32>(x + r * stride + i), load<f32>(numbers[o] + i), acc[r][o]);
            __builtin_memcpy(totals[row], acc, sizeof acc);
        });
    }
    by_rows(number, [&]<int ROWS>(int r) {
        f32 acc[ROWS * OUTS];
        __builtin_memcpy(acc, totals[r], sizeof acc);
        put_sums<ROWS, OUTS>(acc, results + r);
    });
}

// results[r][0..count) of `number` rows of E, at most MOST_ROWS, for the outputs from `first` on.
template <class E>
void tile(const Matrix& matrix, const Rows& rows, int number, int64_t first, int count, float (*results)[TILE]) {
    const int64_t of_output = matrix.row_bytes(rows.inputs);
    const auto at = static_cast<const uint8_t*>(matrix.rows) + first * of_output;
    const auto to = [&](int r, int o) { return reinterpret_cast<float(*)[TILE]>(&results[r][o]); };
    with_kind(matrix.kind, [&]<Kind KIND>() {
        const auto by_codes = [&]<class Multiplied>() {
            by_rows<Multiplied::MOST>(number, [&]<int ROWS>(int r) {
                for (int o = 0; o < count; o++) {
                    const uint8_t* row = at + o * of_output;
                    const Own own = shared_of<KIND>(matrix, row + of_output - matrix.tail);
                    dots_of_codes<KIND, Multiplied, ROWS>(row, own, rows, r, to(r, o));
                }
            });
        };
        if constexpr (quicker_in_fixed_point<E>(KIND)) {
            __builtin_trap();  // it is in fixed point
        } else if constexpr (paired<E>(KIND)) {
            by_codes.template operator()<Pairs<KIND>>();
        } else if constexpr (is_gguf(KIND)) {
            by_codes.template operator()<Codes<KIND>>();
        } else {
            const Matrix own = matrix;  // in registers
            int o = 0;
            for (; o + 2 <= count; o += 2) dots_of_numbers<KIND, 2>(own, at + o * of_output, rows, number, to(0, o));
            if (o < count) dots_of_numbers<KIND, 1>(own, at + o * of_output, rows, number, to(0, o));
        }
    });
}

}  // namespace stored
