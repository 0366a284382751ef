// Products of a few rows with a matrix of GGUF's kinds (stored.h) in fixed point: the same bits by every instruction set
// and on a GPU, since sums are of integers and what follows is a fixed sequence of operations.
//
// Rows are integers and units (stored_fixed_rows.h), and codes are less their centre. A part is of 16 inputs where the
// kind's steps are, else of 32. Of part p the sum of value * code is exact; as fp32 it is multiplied by step * unit and
// added, fused, to lane p of as many as 256 inputs have parts, in the order of the parts. Least values likewise, times the
// sum of values, which is fp32, times unit. Lanes are added as `sum` adds them, and the least values' total to the other
// one.
#pragma once
#include "stored_fixed_narrow.h"
#include "stored_fixed_wide.h"

namespace stored {
namespace fixed {

constexpr int MOST_AT_ONCE = W == 16 ? 8 : 4;  // rows

// The steps and least values of blocks.
template <Kind KIND, int COUNT>
struct Scales {
    Steps<KIND, GROUPS> of[COUNT];

    INLINE Scales(const uint8_t* const* at, const Own* own)
        requires(COUNT == 1)
        : of{{at[0], own[0]}} {}
    INLINE Scales(const uint8_t* const* at, const Own* own)
        requires(COUNT == 2)
        : of{{at[0], own[0]}, {at[1], own[1]}} {}
};

// results[r][0..OUTS) of ROWS rows from `row` on, for the outputs whose rows begin at `from`: numbers that are read once
// are multiplied with several. Blocks in turns are two of one output, which are read in one stream, or of two outputs,
// for which rows are read once.
template <Kind KIND, int ROWS, int OUTS>
INLINE void dots(const uint8_t* const (&from)[OUTS], const Own (&own)[OUTS], const Rows& rows, int row,
                 float (*results)[16]) {
    constexpr bool OUTPUTS = BLOCKS<KIND> == 2 && OUTS == 2;  // are in turns
    constexpr int AT_ONCE = OUTPUTS ? 1 : BLOCKS<KIND>, NBYTES = bytes_of_256(KIND), LOOPS = OUTPUTS ? 1 : OUTS;
    using lanes = PartsOf<KIND>;
    using Least = float __attribute__((vector_size(by_16(KIND) ? 64 : 32)));
    lanes acc[LOOPS][ROWS] = {};
    Least least[OUTS][ROWS] = {};
    const auto add = [&]<class Some, int COUNT>(int o, const uint8_t* const* at, int b, int count) __attribute__((always_inline)) {
        const Own of_blocks[2] = {own[o], own[OUTPUTS ? 1 : o]};
        const Scales<KIND, COUNT> scales(at, of_blocks);
        const lanes steps = steps_of<KIND, COUNT>(scales.of, count);
        const Some block(at, own[o], count);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const lanes sums = block.template sums<OUTPUTS>(rows, row + r, b, count);
            const lanes unit = units_of<KIND, OUTPUTS ? 1 : COUNT>(rows, row + r, b);
            if constexpr (OUTPUTS) acc[o][r] = __builtin_elementwise_fma(sums, steps * unit, acc[o][r]);
            else acc[o][r] = added<KIND, COUNT>(acc[o][r], sums, steps * unit);
            if constexpr (has_least(KIND))
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    Least of_parts;
                    __builtin_memcpy(&of_parts, scales.of[i].least, sizeof of_parts);
                    const Least of_row = load<Least>(rows.sums(row + r) + (OUTPUTS ? b : b + i) * LANES);
                    Least& sum = least[OUTPUTS ? i : o][r];
                    sum = __builtin_elementwise_fma(of_parts, of_row, sum);
                }
        }
    };
    const int whole = rows.inputs / BLOCK, rest = rows.inputs % BLOCK / GROUP;
    int b = 0;
    for (; b + AT_ONCE <= whole; b += AT_ONCE)
#pragma unroll
        for (int o = 0; o < LOOPS; o++) {
            const uint8_t* first = from[o] + b * NBYTES;
            const uint8_t* at[] = {first, OUTPUTS ? from[OUTS - 1] + b * NBYTES : first + NBYTES};
            for (int i = 0; i < AT_ONCE * NBYTES; i += LINE) __builtin_prefetch(first + AHEAD + i);
            for (int i = 0; OUTPUTS && i < NBYTES; i += LINE) __builtin_prefetch(at[1] + AHEAD + i);
            add.template operator()<Block<KIND, BLOCKS<KIND>>, BLOCKS<KIND>>(o, at, b, GROUPS);
        }
    if constexpr (AT_ONCE == 2)
        for (int o = 0; o < OUTS && b < whole; o++) {
            const uint8_t* at[] = {from[o] + b * NBYTES};
            add.template operator()<Block<KIND, 1>, 1>(o, at, b, GROUPS);
        }
    if constexpr (!of_256(KIND))
        for (int o = 0; rest && o < LOOPS; o++) {  // with zeros behind it
            uint8_t blocks[OUTS][NBYTES + LINE] = {};
            for (int i = 0; i < OUTS; i++) {
                const uint8_t* last = from[i] + whole * NBYTES;
                __builtin_memcpy(blocks[i], last, rest / groups_of_block(KIND) * form(KIND).nbytes);
            }
            const uint8_t* at[] = {blocks[o], blocks[OUTS - 1]};
            add.template operator()<Rest<KIND, OUTPUTS ? 2 : 1>, OUTPUTS ? 2 : 1>(o, at, whole, rest);
        }
    for (int o = 0; o < OUTS; o++)
        for (int r = 0; r < ROWS; r++) {
            results[r][o] = folded<KIND>(acc[OUTPUTS ? 0 : o][r], OUTPUTS ? o : 0);
            if constexpr (has_least(KIND)) results[r][o] += sum(least[o][r]);
        }
}

// results[r][0..count) of `number` rows for the outputs from `first` on.
inline void tile(const Matrix& matrix, const Rows& rows, int number, int64_t first, int count, float (*results)[16]) {
    const int64_t of_output = matrix.row_bytes(rows.inputs);
    const auto at = static_cast<const uint8_t*>(matrix.rows) + first * of_output;
    with_kind(matrix.kind, [&]<Kind KIND>() {
        if constexpr (is_gguf(KIND))
            by_rows<MOST_AT_ONCE>(number, [&]<int ROWS>(int r) {
                constexpr int OUTS = ROWS > 1 ? 2 : 1;
                for (int o = 0; o < count; o += OUTS) {
                    const uint8_t* from[OUTS];
                    Own own[OUTS];
                    for (int i = 0; i < OUTS; i++) {  // past the last one that one again
                        from[i] = at + (o + i < count ? o + i : o) * of_output;
                        own[i] = shared_of<KIND>(matrix, from[i] + of_output - matrix.tail);
                    }
                    dots<KIND, ROWS, OUTS>(from, own, rows, r, reinterpret_cast<float(*)[16]>(&results[r][o]));
                }
            });
    });
}

}  // namespace fixed
}  // namespace stored
