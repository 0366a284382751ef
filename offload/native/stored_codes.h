// GGUF's numbers as step * code + least: the steps and least values of groups of 32, and codes as they are multiplied.
// A code, less a centre, is an integer of at most 8 bits, so fp32 and bf16 have it exactly; MXFP4's are numbers doubled,
// from -12 to 12, and steps are the scales halved.
#pragma once
#include "stored_rows.h"

namespace stored {

consteval bool of_256(Kind kind) { return form(kind).numbers == 256; }
consteval int bytes_of_256(Kind kind) { return int(form(kind).nbytes * (256 / form(kind).numbers)); }
consteval bool has_least(Kind kind) { return has_steps(kind, "least") || form(kind).leasts; }

// Whether a CPU alone multiplies rows of E with a kind in fixed point (stored_fixed.h): where that is quicker.
template <class E>
consteval bool quicker_in_fixed_point(Kind kind) {
    if (!is_gguf(kind) || __is_same(E, Fp32) || in_pairs<E>) return false;
    if (W != 8) return W == 16 && !has_code(kind, "iq1");
    const bool of_4 = form(kind).codes.bits == 4 && !by_16(kind) && book(kind) != Book::iq4;
    return !form(kind).high.bits && (of_4 || form(kind).codes.bits == 2);
}

// What the codes of COUNT groups are multiplied by, in whole blocks, and what is added.
template <Kind KIND, int COUNT>
struct Steps {
    static constexpr bool HALVES = has_least(KIND) && by_16(KIND);  // least values of 16 numbers
    alignas(64) float steps[2 * GROUPS + W];                        // of groups, or of 16 numbers
    eight least[HALVES ? 2 : 1];

    INLINE Steps(const uint8_t* at, const Own& own) {
        if constexpr (has_steps(KIND, "k")) {
            const Scales scales(at);
            const eight of_groups = load<eight>(scales.steps);
            store(steps, of_groups), least[0] = of_groups * float(centre(KIND)) - load<eight>(scales.least);
        } else if constexpr (groups_of_block(KIND) == 1) {
            if constexpr (W == 16 && COUNT == GROUPS && has_scale(KIND, "F16") && !has_least(KIND)) {
                store(steps, floats(words_of(at, 0), words_of(at, 4)));
                return;
            }
            uint32_t __attribute__((vector_size(32))) heads = {};
#pragma unroll
            for (int g = 0; g < COUNT; g++) heads[g] = read<uint32_t>(at + g * form(KIND).nbytes);
            const eight of_groups = has_scale(KIND, "E8M0") ? (eight)half_e8m0(heads) : floats(heads);
            store(steps, of_groups);
            if constexpr (has_least(KIND)) least[0] = of_groups * float(centre(KIND)) + floats(heads >> 16);
        } else {
            alignas(64) float taken[2 * GROUPS];
            steps_of_blocks<KIND, COUNT / groups_of_block(KIND)>(at, own, steps, taken);
            if constexpr (HALVES) least[0] = -load<eight>(taken), least[1] = -load<eight>(taken + GROUPS);
        }
    }

    // The least values' part of a row's sum, from group `first` of the row on.
    INLINE eight add_least(eight acc, const Rows& rows, int row, int first) const {
        if constexpr (!HALVES) return __builtin_elementwise_fma(least[0], load<eight>(rows.sums(row) + first), acc);
        const float* sums = rows.sums_of_16(row) + 2 * first;
        acc = __builtin_elementwise_fma(least[0], load<eight>(sums), acc);
        return __builtin_elementwise_fma(least[HALVES], load<eight>(sums + GROUPS), acc);
    }

  private:
    // Four blocks' scales from block g on, put together without a vector's shuffles, which codes need.
    INLINE static uint64_t words_of(const uint8_t* at, int g) {
        const auto word = [&](int i) { return uint64_t(read<uint16_t>(at + (g + i) * form(KIND).nbytes)) << 16 * i; };
        return word(0) | word(1) | (word(2) | word(3));
    }

    INLINE static eight floats(uint64_t first, uint64_t second) {
        using numbers = _Float16 __attribute__((vector_size(16)));
        using words = uint64_t __attribute__((vector_size(16)));
        return __builtin_convertvector((numbers)words{first, second}, eight);
    }

    template <class Integers>
    INLINE static eight floats(Integers halves) {
        using integers = uint16_t __attribute__((vector_size(16)));
        using numbers = _Float16 __attribute__((vector_size(16)));
        return __builtin_convertvector((numbers)__builtin_convertvector(halves, integers), eight);
    }
};

// The codes of a group, or of a pair of groups where they are widened by byte, in fp32, less the centre, in the order of
// rows.
template <Kind KIND>
struct Codes {
    static constexpr bool BY_BYTE = by_byte(KIND), BY_HALF = BY_BYTE && in_halves(KIND);
    static constexpr int INPUTS = BY_BYTE ? PAIR : GROUP, VECTORS = INPUTS / W;
    static constexpr int MOST = 4;  // rows, whose numbers fit in the first cache
    static constexpr int RUNS = by_16(KIND) || BY_BYTE != BY_HALF ? 2 : 1;  // of vectors whose lanes have the same steps
    f32 values[VECTORS], steps[RUNS];

    struct OfBlock {  // nothing is made of a block at once
        INLINE OfBlock(const uint8_t*, const Own&) {}
    };

    template <int COUNT>
    INLINE Codes(const uint8_t* at, int part, const Own& own, const Steps<KIND, COUNT>& all_steps, OfBlock) {
        if constexpr (BY_BYTE) {
            group codes[2];
            pair_of_codes(at, 2 * part, COUNT > 1 ? 2 * part + 1 : 2 * part, own, codes);
#pragma unroll
            for (int i = 0; i < VECTORS; i++) values[i] = upper_bytes(codes[i / 4], i % 4);
        } else {
            alignas(GROUP) int8_t numbers[GROUP];
            store_codes<KIND>(at, part, own, numbers);
            for (int i = 0; i < VECTORS; i++) values[i] = integers(numbers + i * W);
        }
#pragma unroll
        for (int run = 0; run < RUNS; run++)
            for (int lane = 0; lane < W; lane++) steps[run][lane] = all_steps.steps[step_of(part, run, lane)];
    }

    INLINE f32 add(f32 acc, const Rows& rows, int row, int first) const {
        const float* x = rows.numbers(row) + first;
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            const int from = VECTORS / RUNS * run;
            f32 total = load<f32>(x + from * W) * values[from];
            for (int i = from + 1; i < from + VECTORS / RUNS; i++) total = fma(load<f32>(x + i * W), values[i], total);
            acc = fma(total, steps[run], acc);
        }
        return acc;
    }

  private:
    // The place of a lane's step among those of groups, or of 16 numbers.
    static constexpr int step_of(int part, int run, int lane) {
        const int half = lane / 4, sixteen = BY_HALF ? 2 * half + run : BY_BYTE ? 2 * run + half : run;
        return by_16(KIND) ? INPUTS / 16 * part + sixteen : (INPUTS / 16 * part + sixteen) / 2;
    }

    // Two registers of codes, in the order of rows. A group without a next one stands for both: the row is zeros there.
    INLINE static void pair_of_codes(const uint8_t* at, int first, int second, const Own& own, group (&codes)[2]) {
        const auto place_of = [&](int g) {
            return block_of<KIND>(at, g) + form(KIND).codes.at + g % groups_of_block(KIND) * GROUP / 2;
        };
        if constexpr (BY_HALF) codes_by_half<KIND>(place_of(first), place_of(second), codes);
        else codes[0] = codes_of<KIND>(at, first, own), codes[1] = codes_of<KIND>(at, second, own);
    }

    // 2^24 times bytes 4 k to 4 k + 4 of either half of a register, integers with a sign.
    INLINE static f32 upper_bytes(group codes, int k) {
#if defined(__AVX2__) && !defined(__AVX512F__)
        const auto lane = [&](int i) { return (4 * k + i) << 24 | 0x808080; };  // the other bytes are 0
        const __m256i way = _mm256_setr_epi32(lane(0), lane(1), lane(2), lane(3), lane(0), lane(1), lane(2), lane(3));
        return (f32)_mm256_cvtepi32_ps(_mm256_shuffle_epi8((__m256i)codes, way));
#else
        return (void)codes, (void)k, f32{};
#endif
    }
};

}  // namespace stored
