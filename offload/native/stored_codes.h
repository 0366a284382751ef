// GGUF's numbers as step * code + least: the steps and least values of groups of 32, and codes as they are multiplied.
// A code, less a centre, is an integer of at most 8 bits, so fp32 and bf16 have it exactly; MXFP4's are numbers doubled,
// from -12 to 12, and steps are the scales halved.
#pragma once
#include "stored_rows.h"

namespace stored {

consteval bool of_256(Kind kind) { return form(kind).numbers == 256; }
consteval int bytes_of_256(Kind kind) { return int(form(kind).nbytes * (256 / form(kind).numbers)); }
consteval bool has_least(Kind kind) { return has_steps(kind, "least") || form(kind).leasts; }

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

    template <int COUNT>
    INLINE Codes(const uint8_t* at, int part, const Own& own, const Steps<KIND, COUNT>& all_steps) {
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

#if defined(__AVX512BF16__)

// The codes of a pair of groups in bf16, less the centre, in the order of rows.
template <Kind KIND>
struct Pairs {
    static constexpr int INPUTS = PAIR, MOST = 8;
    static constexpr bool BY_GROUP = !has_steps(KIND, "k") && !has_steps(KIND, "bytes") && groups_of_block(KIND) > 1;
    static constexpr bool WITH_SIGN = BY_GROUP || has_code(KIND, "signed");  // codes are integers, else looked up
    __m512bh even, odd;
    f32 step;

    template <int COUNT>
    INLINE Pairs(const uint8_t* at, int pair, const Own& own, const Steps<KIND, COUNT>& steps) {
        u32 lane;  // a lane is of four inputs
        for (int i = 0; i < W; i++) lane[i] = by_16(KIND) ? pair * 4 + i / 4 : pair * 2 + i / 8;
        step = (f32)_mm512_permutexvar_ps((__m512i)lane, (__m512)load<f32>(steps.steps));
        const __m512i code = bytes(at, pair, own, COUNT > 1);
        if constexpr (WITH_SIGN) {
            const auto number = [&](int i) {  // in byte i of each four; bf16 in an upper half
                return (u32)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(code, 24 - 8 * i), 24));
            };
            even = (__m512bh)(number(0) >> 16 | number(2)), odd = (__m512bh)(number(1) >> 16 | number(3));
        } else {
            even = value(code), odd = value(_mm512_srli_epi16(code, 8));
        }
    }

    INLINE f32 add(f32 acc, const Rows& rows, int row, int first) const {
        const uint16_t* x = rows.halves(row) + first;
        const __m512 part = _mm512_dpbf16_ps(__m512{}, load<__m512bh>(x), even);
        return fma((f32)_mm512_dpbf16_ps(part, load<__m512bh>(x + PAIR / 2), odd), step, acc);
    }

  private:
    // Of codes in words, by their lowest bits alone.
    INLINE static __m512bh value(__m512i code) {
        const auto table = [](int from) {
            const f32 first = counted<book(KIND)>(from) - float(centre(KIND));
            return narrowed<Bf16, true>(first, bits(KIND) == 4 ? first : first + float(W));
        };
        if constexpr (bits(KIND) == 6) return (__m512bh)_mm512_permutex2var_epi16(table(0), code, table(2 * W));
        return (__m512bh)_mm512_permutexvar_epi16(code, table(0));
    }

    // A code a byte; what is above a code of 4 or 6 bits may be anything.
    INLINE static __m512i bytes(const uint8_t* at, int pair, const Own& shared, bool both) {
        constexpr Form own = form(KIND);
        if constexpr (BY_GROUP)
            return joined((__m256i)codes_of<KIND>(at, 2 * pair, shared), (__m256i)codes_of<KIND>(at, 2 * pair + 1, shared));
        const auto twice = [](const uint8_t* from) { return _mm512_broadcast_i64x4(load<__m256i>(from)); };
        if constexpr (own.high.bits == 2) {  // above four
            __m512i lower = load<__m512i>(at + pair / 2 * PAIR), upper = twice(at + own.high.at + pair / 2 * GROUP);
            if (pair % 2) lower = _mm512_srli_epi16(lower, 4), upper = _mm512_srlv_epi16(upper, by_half(0, 2));
            else upper = _mm512_sllv_epi16(upper, by_half(4, 2));
            return _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), lower, upper, 0xca);
        } else if constexpr (of_256(KIND)) {
            const __m512i four = _mm512_srlv_epi16(twice(at + own.codes.at + pair * GROUP), by_half(0, 4));
            if constexpr (!own.high.bits) return four;
            const __m512i bit = by_half(0x0101 << 2 * pair, 0x0202 << 2 * pair);
            return with_fifth(four, _mm512_test_epi8_mask(twice(at + own.high.at), bit));
        } else {
            constexpr int size = int(own.nbytes);
            const uint8_t *first = at + 2 * pair * size + own.codes.at, *second = first + (both ? size : 0);
            if constexpr (own.codes.bits == 8) return joined(load<__m256i>(first), load<__m256i>(second));
            const auto halves = [](const uint8_t* of) { return _mm256_broadcastsi128_si256(load<__m128i>(of)); };
            const __m512i shift = _mm512_maskz_set1_epi32(0xf0f0, 0x00040004);
            const __m512i four = _mm512_srlv_epi16(joined(halves(first), halves(second)), shift);
            if constexpr (!own.high.bits) return four;
            uint32_t fifths[2];
            constexpr int64_t back = own.codes.at - own.high.at;
            __builtin_memcpy(fifths, first - back, 4), __builtin_memcpy(fifths + 1, second - back, 4);
            return with_fifth(four, uint64_t(fifths[1]) << 32 | fifths[0]);
        }
    }

    INLINE static __m512i with_fifth(__m512i four, __mmask64 fifth) {
        const __m512i code = _mm512_and_si512(four, _mm512_set1_epi8(15));
        return _mm512_mask_add_epi8(code, fifth, code, _mm512_set1_epi8(16));
    }
    INLINE static __m512i joined(__m256i first, __m256i second) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    }
    INLINE static __m512i by_half(int first, int second) {
        return joined(_mm256_set1_epi16(short(first)), _mm256_set1_epi16(short(second)));
    }
};

#else

template <Kind>
struct Pairs;

#endif

}  // namespace stored
