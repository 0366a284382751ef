// Products of a few rows with a matrix in blocks (stored.h), in fp32: nothing is rounded to the dtype but the rows, which
// are given so, and the result.
//
// - GGUF's numbers are step * code + least, where a code, less a centre, is an integer of at most 8 bits. A group's part
//   of a product is step * sum(code * x) + least * sum(x). Rows in bf16 are multiplied with codes in bf16, which has them
//   exactly, two at a time, where the processor can (AVX512_BF16); else both are widened to fp32.
// - Our own blocks' numbers are rounded to the scale's dtype, so they are computed, and multiplied in fp32.
//
// The kind, the dtype and the machine decide, never the number of rows, and a row's sums run in one order: its bits do not
// depend on the rows beside it.
#pragma once
#include "stored.h"
#include "vectors.h"

namespace stored {

constexpr int TILE = 16;       // outputs
constexpr int GROUPS = 8;      // whose steps are computed together
constexpr int PAIR = 2 * GROUP;
constexpr int SOME = 256;      // numbers that are computed before they are multiplied: a whole block, or several
constexpr int MOST_ROWS = 64;  // that are worked on together
using eight = float __attribute__((vector_size(4 * GROUPS)));

constexpr bool has_codes(Kind kind) { return kind <= Kind::q6_k; }

// Whether rows of E are multiplied in bf16.
template <class E>
constexpr bool paired(Kind kind) {
    return in_pairs<E> && has_codes(kind);
}

// Rows as they are multiplied, one after the other: [inputs] in fp32, or, in pairs, of each 64 inputs the even ones in
// bf16, then the odd ones, and zeros past the end. Then the sums of groups, and zeros.
struct Rows {
    float* at;
    int inputs;

    int padded() const { return (inputs + PAIR - 1) / PAIR * PAIR; }
    int stride() const { return padded() + padded() / 4; }
    int groups() const { return inputs / GROUP; }
    Rows from(int64_t row) const { return {numbers(row), inputs}; }
    float* numbers(int64_t row) const { return at + row * stride(); }
    uint16_t* halves(int64_t row) const { return reinterpret_cast<uint16_t*>(numbers(row)); }
    float* sums(int64_t row) const { return numbers(row) + padded(); }
};

// Of 64 numbers in bf16 the even ones, then the odd ones.
INLINE void put_pairs(const uint16_t* from, uint16_t* to) {
    for (int i = 0; i < PAIR / 2; i += W) {
        const u32 both = load<u32>(from + 2 * i);
        store(to + i, __builtin_convertvector(both & 0xffff, u16));
        store(to + PAIR / 2 + i, __builtin_convertvector(both >> 16, u16));
    }
}

// One row. read(i): elements i to i + W, fp32.
template <class F>
void take(const Rows& rows, int64_t row, bool paired, F&& read) {
    float* sums = rows.sums(row);
    __builtin_memset(sums, 0, (rows.groups() + GROUPS) * sizeof *sums);
    for (int from = 0; from < rows.inputs; from += PAIR) {
        alignas(64) uint16_t halves[PAIR] = {};
        for (int first = from; first < from + PAIR && first < rows.inputs; first += GROUP) {
            f32 total = {};
            for (int i = first; i < first + GROUP; i += W) {
                const f32 x = read(i);
                if (paired) Bf16::write(halves + i - from, x);
                else store(rows.numbers(row) + i, x);
                total += x;
            }
            sums[first / GROUP] = sum(total);
        }
        if (paired) put_pairs(halves, rows.halves(row) + from);
    }
}

INLINE float sum_of(eight v) {
    const auto four = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

constexpr bool of_256(Kind kind) { return kind >= Kind::q4_k; }
constexpr int bytes_of_32(Kind kind) {
    using enum Kind;
    return kind == q4_0 ? 18 : kind == q4_1 ? 20 : kind == q5_0 ? 22 : kind == q5_1 ? 24 : 34;
}
constexpr int bytes_of_256(Kind kind) {
    using enum Kind;
    return kind == q4_k ? 144 : kind == q5_k ? 176 : kind == q6_k ? 210 : GROUPS * bytes_of_32(kind);
}
constexpr int bits(Kind kind) {
    using enum Kind;
    return kind == q8_0 ? 8 : kind == q6_k ? 6 : kind == q5_0 || kind == q5_1 || kind == q5_k ? 5 : 4;
}
constexpr int centre(Kind kind) { return kind == Kind::q8_0 ? 0 : 1 << (bits(kind) - 1); }  // taken from codes
constexpr bool has_least(Kind kind) {
    using enum Kind;
    return kind == q4_1 || kind == q5_1 || kind == q4_k || kind == q5_k;
}

// What the codes of COUNT groups are multiplied by, in a block of 256 or in blocks of 32, and what is added.
template <Kind KIND, int COUNT>
struct Steps {
    alignas(64) float steps[2 * GROUPS];  // of groups; of 16 numbers in Q6_K
    eight least;

    INLINE explicit Steps(const uint8_t* at) {
        if constexpr (KIND == Kind::q6_k) {
            auto own = reinterpret_cast<const int8_t*>(at + 192);
            for (int i = 0; i < 2 * GROUPS; i += W) store(steps + i, integers(own + i) * half(at + 208));
        } else if constexpr (of_256(KIND)) {
            const Scales scales(at);
            const eight own = load<eight>(scales.steps);
            store(steps, own), least = own * float(centre(KIND)) - load<eight>(scales.least);
        } else {
            uint32_t __attribute__((vector_size(32))) heads = {};
#pragma unroll
            for (int g = 0; g < COUNT; g++) {
                uint32_t head;
                __builtin_memcpy(&head, at + g * bytes_of_32(KIND), 4);
                heads[g] = head;
            }
            const eight own = floats(heads);
            store(steps, own);
            if constexpr (has_least(KIND)) least = own * float(centre(KIND)) + floats(heads >> 16);
        }
    }

  private:
    template <class Integers>
    INLINE static eight floats(Integers halves) {
        using integers = uint16_t __attribute__((vector_size(16)));
        using numbers = _Float16 __attribute__((vector_size(16)));
        return __builtin_convertvector((numbers)__builtin_convertvector(halves, integers), eight);
    }
};

// A group's codes in fp32, less the centre.
template <Kind KIND>
struct Codes {
    static constexpr int INPUTS = GROUP, MOST = 4, VECTORS = GROUP / W;  // MOST: rows whose numbers fit in the first cache
    f32 values[VECTORS], step, next;  // next: of the second 16 numbers in Q6_K

    template <int COUNT>
    INLINE Codes(const uint8_t* at, int g, const Steps<KIND, COUNT>& steps) {
        using enum Kind;
        alignas(GROUP) int8_t numbers[GROUP];
        store(numbers, of_group(at, g));
        for (int i = 0; i < VECTORS; i++) values[i] = integers(numbers + i * W);
        if constexpr (KIND == q6_k) step = all(steps.steps[2 * g]), next = all(steps.steps[2 * g + 1]);
        else step = all(steps.steps[g]);
    }

    INLINE f32 add(f32 acc, const Rows& rows, int row, int first) const {
        const float* x = rows.numbers(row) + first;
        const auto part = [&](int from, int to) __attribute__((always_inline)) {
            f32 total = load<f32>(x + from * W) * values[from];
            for (int i = from + 1; i < to; i++) total = fma(load<f32>(x + i * W), values[i], total);
            return total;
        };
        if constexpr (KIND != Kind::q6_k) return fma(part(0, VECTORS), step, acc);
        return fma(part(VECTORS / 2, VECTORS), next, fma(part(0, VECTORS / 2), step, acc));
    }

  private:
    INLINE static group of_group(const uint8_t* at, int g) {
        using enum Kind;
        if constexpr (KIND == q6_k) return codes_of_q6_k(at, g);
        if constexpr (KIND == q8_0) return load<group>(at + g * bytes_of_32(KIND) + 2);
        if constexpr (KIND == q5_k) return codes_of_q5_k(at, g) - uint8_t(centre(KIND));
        if constexpr (!of_256(KIND)) return codes_of_32<KIND>(at + g * bytes_of_32(KIND)) - uint8_t(centre(KIND));
        const group both = load<group>(at + 16 + g / 2 * GROUP);
        return (g % 2 ? both >> 4 : both & 15) - uint8_t(centre(KIND));
    }
};

#if defined(__AVX512BF16__)

// The same of a pair of groups, in bf16 and in the order of rows.
template <Kind KIND>
struct Pairs {
    static constexpr int INPUTS = PAIR, MOST = 8;
    __m512bh even, odd;
    f32 step;

    template <int COUNT>
    INLINE Pairs(const uint8_t* at, int pair, const Steps<KIND, COUNT>& steps) {
        u32 lane;  // a lane is of four inputs
        for (int i = 0; i < W; i++) lane[i] = KIND == Kind::q6_k ? pair * 4 + i / 4 : pair * 2 + i / 8;
        step = (f32)_mm512_permutexvar_ps((__m512i)lane, (__m512)load<f32>(steps.steps));
        const __m512i code = bytes(at, pair, COUNT > 1);
        if constexpr (KIND == Kind::q8_0) {
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
            const f32 first = counted(from) - float(centre(KIND));
            return narrowed<Bf16, true>(first, bits(KIND) == 4 ? first : first + float(W));
        };
        if constexpr (KIND == Kind::q6_k) return (__m512bh)_mm512_permutex2var_epi16(table(0), code, table(2 * W));
        return (__m512bh)_mm512_permutexvar_epi16(code, table(0));
    }

    // A code a byte; what is above a code of 4 or 6 bits may be anything.
    INLINE static __m512i bytes(const uint8_t* at, int pair, bool both) {
        using enum Kind;
        const auto twice = [](const uint8_t* from) { return _mm512_broadcast_i64x4(load<__m256i>(from)); };
        if constexpr (KIND == q6_k) {  // two bits above four
            __m512i lower = load<__m512i>(at + pair / 2 * PAIR), upper = twice(at + 128 + pair / 2 * GROUP);
            if (pair % 2) lower = _mm512_srli_epi16(lower, 4), upper = _mm512_srlv_epi16(upper, by_half(0, 2));
            else upper = _mm512_sllv_epi16(upper, by_half(4, 2));
            return _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), lower, upper, 0xca);
        } else if constexpr (of_256(KIND)) {
            const __m512i four = _mm512_srlv_epi16(twice(at + (KIND == q4_k ? 16 : 48) + pair * GROUP), by_half(0, 4));
            if constexpr (KIND == q4_k) return four;
            return with_fifth(four, _mm512_test_epi8_mask(twice(at + 16), by_half(0x0101 << 2 * pair, 0x0202 << 2 * pair)));
        } else {
            constexpr int size = bytes_of_32(KIND), from = (has_least(KIND) ? 4 : 2) + (bits(KIND) == 5 ? 4 : 0);
            const uint8_t *first = at + 2 * pair * size + from, *second = first + (both ? size : 0);
            if constexpr (KIND == q8_0) return joined(load<__m256i>(first), load<__m256i>(second));
            const auto halves = [](const uint8_t* of) { return _mm256_broadcastsi128_si256(load<__m128i>(of)); };
            const __m512i shift = _mm512_maskz_set1_epi32(0xf0f0, 0x00040004);
            const __m512i four = _mm512_srlv_epi16(joined(halves(first), halves(second)), shift);
            if constexpr (bits(KIND) == 4) return four;
            uint32_t fifths[2];
            __builtin_memcpy(fifths, first - 4, 4), __builtin_memcpy(fifths + 1, second - 4, 4);
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

// results[r][0] of ROWS rows from `row` on, by codes: Codes or Pairs.
template <Kind KIND, class Multiplied, int ROWS>
INLINE void dots_of_codes(const uint8_t* at, const Rows& rows, int row, float (*results)[TILE]) {
    f32 acc[ROWS] = {};
    eight least[ROWS] = {};
    const auto multiply = [&]<int COUNT>(int first) __attribute__((always_inline)) {
        const Steps<KIND, COUNT> steps(at);
        for (int i = 0; i < bytes_of_256(KIND); i += LINE) __builtin_prefetch(at + AHEAD + i);
        if constexpr (has_least(KIND))
            for (int r = 0; r < ROWS; r++)
                least[r] = __builtin_elementwise_fma(steps.least, load<eight>(rows.sums(row + r) + first), least[r]);
#pragma unroll
        for (int i = 0; i < COUNT * GROUP; i += Multiplied::INPUTS) {
            const Multiplied codes(at, i / Multiplied::INPUTS, steps);
#pragma unroll
            for (int r = 0; r < ROWS; r++) acc[r] = codes.add(acc[r], rows, row + r, first * GROUP + i);
        }
    };
    int first = 0;
    for (; first + GROUPS <= rows.groups(); first += GROUPS, at += bytes_of_256(KIND))
        multiply.template operator()<GROUPS>(first);
    if constexpr (!of_256(KIND)) {
        for (; first + 2 <= rows.groups(); first += 2, at += 2 * bytes_of_32(KIND)) multiply.template operator()<2>(first);
        if (first < rows.groups()) multiply.template operator()<1>(first);
    }
    for (int r = 0; r < ROWS; r++) {
        results[r][0] = sum(acc[r]);
        if constexpr (has_least(KIND)) results[r][0] += sum_of(least[r]);
    }
}

// results[r][0..OUTS) of `number` rows, by numbers: some are computed for all rows.
template <Kind KIND, int OUTS>
void dots_of_numbers(const Matrix& m, const uint8_t* at, const Rows& rows, int number, float (*results)[TILE]) {
    const int64_t of_output = rows.inputs / m.numbers * m.nbytes;
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
                decode_block<Fp32, KIND>(m.numbers, block, numbers[o] + i);
            }
        by_rows(number, [&]<int ROWS>(int r) {
            const float* x = rows.numbers(r) + first;
            f32 acc[ROWS][OUTS];
            __builtin_memcpy(acc, totals[r], sizeof acc);
            for (int i = 0; i < count; i += W)
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int o = 0; o < OUTS; o++)
                        acc[r][o] = fma(load<f32>(x + r * stride + i), load<f32>(numbers[o] + i), acc[r][o]);
            __builtin_memcpy(totals[r], acc, sizeof acc);
        });
    }
    by_rows(number, [&]<int ROWS>(int r) {
        f32 acc[ROWS * OUTS];
        __builtin_memcpy(acc, totals[r], sizeof acc);
        put_sums<ROWS, OUTS>(acc, results + r);
    });
}

template <bool FIRST, class One, class Other>
struct Either {
    using type = One;
};
template <class One, class Other>
struct Either<false, One, Other> {
    using type = Other;
};

// results[r][0..count) of `number` rows of E, at most MOST_ROWS, for the outputs from `first` on.
template <class E>
void tile(const Matrix& matrix, const Rows& rows, int number, int64_t first, int count, float (*results)[TILE]) {
    const int64_t of_output = rows.inputs / matrix.numbers * matrix.nbytes;
    const auto at = static_cast<const uint8_t*>(matrix.rows) + first * of_output;
    const auto to = [&](int r, int o) { return reinterpret_cast<float(*)[TILE]>(&results[r][o]); };
    with_kind(matrix.kind, [&]<Kind KIND>() {
        if constexpr (has_codes(KIND)) {
            using Multiplied = Either<paired<E>(KIND), Pairs<KIND>, Codes<KIND>>::type;
            by_rows<Multiplied::MOST>(number, [&]<int ROWS>(int r) {
                for (int o = 0; o < count; o++)
                    dots_of_codes<KIND, Multiplied, ROWS>(at + o * of_output, rows, r, to(r, o));
            });
        } else {
            const Matrix own = matrix;  // in registers
            int o = 0;
            for (; o + 2 <= count; o += 2) dots_of_numbers<KIND, 2>(own, at + o * of_output, rows, number, to(0, o));
            if (o < count) dots_of_numbers<KIND, 1>(own, at + o * of_output, rows, number, to(0, o));
        }
    });
}

}  // namespace stored
