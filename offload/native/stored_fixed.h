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

// The steps and least values of blocks that follow each other.
template <Kind KIND, int COUNT>
struct Scales {
    Steps<KIND, GROUPS> of[COUNT];

    INLINE Scales(const uint8_t* at, const Own& own)
        requires(COUNT == 1)
        : of{{at, own}} {}
    INLINE Scales(const uint8_t* at, const Own& own)
        requires(COUNT == 2)
        : of{{at, own}, {at + bytes_of_256(KIND), own}} {}
};

// results[r][0..OUTS) of ROWS rows from `row` on, for the outputs whose rows begin at `from`: numbers that are read once
// are multiplied with several.
template <Kind KIND, int ROWS, int OUTS>
INLINE void dots(const uint8_t* const (&from)[OUTS], const Own (&own)[OUTS], const Rows& rows, int row,
                 float (*results)[16]) {
    constexpr int AT_ONCE = BLOCKS<KIND>, NBYTES = bytes_of_256(KIND);
    using lanes = PartsOf<KIND>;
    using Least = float __attribute__((vector_size(by_16(KIND) ? 64 : 32)));
    lanes acc[OUTS][ROWS] = {};
    Least least[OUTS][ROWS] = {};
    const auto add = [&]<class Some, int COUNT>(int o, const uint8_t* at, int b, int count) __attribute__((always_inline)) {
        const Scales<KIND, COUNT> scales(at, own[o]);
        const lanes steps = steps_of<KIND, COUNT>(scales.of, count);
        const Some block(at, own[o], count);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const lanes sums = block.sums(rows, row + r, b, count), unit = units_of<KIND, COUNT>(rows, row + r, b);
            acc[o][r] = added<KIND, COUNT>(acc[o][r], sums, steps * unit);
            if constexpr (has_least(KIND))
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    Least of_parts;
                    __builtin_memcpy(&of_parts, scales.of[i].least, sizeof of_parts);
                    const Least of_row = load<Least>(rows.sums(row + r) + (b + i) * LANES);
                    least[o][r] = __builtin_elementwise_fma(of_parts, of_row, least[o][r]);
                }
        }
    };
    const int whole = rows.inputs / BLOCK, rest = rows.inputs % BLOCK / GROUP;
    int b = 0;
    for (; b + AT_ONCE <= whole; b += AT_ONCE)
#pragma unroll
        for (int o = 0; o < OUTS; o++) {
            const uint8_t* at = from[o] + b * NBYTES;
            for (int i = 0; i < AT_ONCE * NBYTES; i += LINE) __builtin_prefetch(at + AHEAD + i);
            add.template operator()<Block<KIND, AT_ONCE>, AT_ONCE>(o, at, b, GROUPS);
        }
    for (int o = 0; o < OUTS && b < whole; o++)
        add.template operator()<Block<KIND, 1>, 1>(o, from[o] + b * NBYTES, b, GROUPS);
    if constexpr (!of_256(KIND))
        for (int o = 0; rest && o < OUTS; o++) {  // with zeros behind it
            uint8_t block[NBYTES + LINE] = {};
            __builtin_memcpy(block, from[o] + whole * NBYTES, rest / groups_of_block(KIND) * form(KIND).nbytes);
            add.template operator()<Rest<KIND>, 1>(o, block, whole, rest);
        }
    for (int o = 0; o < OUTS; o++)
        for (int r = 0; r < ROWS; r++) {
            results[r][o] = folded<KIND>(acc[o][r]);
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
