// Codes of a block, multiplied with rows in fixed point (stored_fixed.h), where registers have 512 bits.
#pragma once
#include "stored_fixed_rows.h"

#if defined(__AVX512BW__)

namespace stored {
namespace fixed {

// The codes of a pair of groups as bytes without a sign, `offset` more.
template <Kind KIND>
INLINE __m512i offset_codes(const uint8_t* at, int pair, const Own& own, const Words<KIND, 1>& words) {
    if constexpr (has_grid(KIND)) {
        const __m512i even = words.numbers_of(pair, 0), odd = words.numbers_of(pair, 1);
        const __m512i all = _mm512_or_si512(even, _mm512_slli_epi16(odd, 8));
        if constexpr (Words<KIND, 1>::SHIFTED) return all;
        else return _mm512_mask_sub_epi8(all, signs_of<KIND>(at, pair), _mm512_set1_epi8(char(2 * offset(KIND))), all);
    } else if constexpr (has_code(KIND, "signed") || has_code(KIND, "sign")) {
        const group first = codes_of<KIND>(at, 2 * pair, own), second = codes_of<KIND>(at, 2 * pair + 1, own);
        return _mm512_xor_si512(joined((__m256i)first, (__m256i)second), _mm512_set1_epi8(char(128)));
    } else {
        const __m512i code = Bytes<KIND>::of(at, pair, true);
        if constexpr (bits(KIND) != 4 && bits(KIND) != 6) return code;
        const __m512i own_bits = _mm512_and_si512(code, _mm512_set1_epi8(char((1 << bits(KIND)) - 1)));
        if constexpr (book(KIND) == Book::none) return own_bits;
        const __m128i numbers = _mm_xor_si128(load<__m128i>(BOOKS[int(book(KIND))]), _mm_set1_epi8(char(128)));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), own_bits);
    }
}

#if defined(__AVX512VNNI__)
INLINE void add_products(__m512i& high, __m512i& low, __m512i codes, __m512i first, __m512i second) {
    high = _mm512_dpbusd_epi32(high, codes, first), low = _mm512_dpbusd_epi32(low, codes, second);
}
INLINE __m512i joined_sums(__m512i high, __m512i low) { return plus(_mm512_slli_epi32(high, 8), low); }
#else
INLINE void add_products(__m512i& high, __m512i& low, __m512i codes, __m512i first, __m512i second) {
    high = plus(high, _mm512_madd_epi16(low_bytes(codes), first));
    low = plus(low, _mm512_madd_epi16(_mm512_srli_epi16(codes, 8), second));
}
INLINE __m512i joined_sums(__m512i high, __m512i low) { return plus(high, low); }
#endif

template <Kind>
using PartsOf = f32;

// Numbers of the parts of two blocks, each in the lanes of both, in turns of two lanes.
INLINE f32 in_turns(f32 first, f32 second) { return (f32)_mm512_mask_mov_ps((__m512)first, 0xcccc, (__m512)second); }

// The steps of parts of COUNT blocks, 0 past those of `count` groups.
template <Kind KIND, int COUNT>
INLINE f32 steps_of(const Steps<KIND, GROUPS>* own, int count) {
    u32 part;
    for (int lane = 0; lane < W; lane++) part[lane] = LANES_OF<KIND>.part[lane];  // known, unlike what is loaded
    const auto of_parts = [&](int i) {
        const __m512 all = by_16(KIND) ? (__m512)load<f32>(own[i].steps) : _mm512_castps256_ps512((__m256)load<eight>(own[i].steps));
        return (f32)_mm512_permutexvar_ps((__m512i)part, all);
    };
    if constexpr (COUNT == 2) {
        const auto pairs = [&](int i) { return _mm512_castpd256_pd512((__m256d)load<eight>(own[i].steps)); };
        return (f32)_mm512_permutex2var_pd(pairs(0), _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), pairs(1));
    }
    return part < uint32_t(by_16(KIND) ? 2 * count : count) ? of_parts(0) : f32{};
}

template <Kind KIND, int COUNT>
INLINE f32 units_of(const Rows& rows, int row, int b) {
    const float* at = rows.units(row) + b * LANES;
    return COUNT == 2 ? in_turns(load<f32>(at), load<f32>(at + LANES)) : load<f32>(at);
}

// A sum with the products of the parts of COUNT blocks, one after the other. In turns every lane has the sum of its part.
template <Kind KIND, int COUNT>
INLINE f32 added(f32 acc, f32 sums, f32 scales) {
    acc = fma(sums, scales, acc);
    if constexpr (BLOCKS<KIND> == 1) return acc;
    acc = __builtin_shufflevector(acc, acc, 0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
    if constexpr (COUNT == 1) return acc;
    acc = fma(sums, scales, acc);
    return __builtin_shufflevector(acc, acc, 2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15);
}

// The sum of the lanes of a turn, in the order of parts.
template <Kind KIND>
INLINE float folded(f32 v, int turn) {
    const __m512i from = _mm512_add_epi32(load<__m512i>(LANES_OF<KIND>.of), _mm512_set1_epi32(2 * turn));
    const f32 ordered = (f32)_mm512_permutexvar_ps(from, (__m512)v);
    if constexpr (by_16(KIND)) return sum(ordered);
    return sum(__builtin_shufflevector(ordered, ordered, 0, 1, 2, 3, 4, 5, 6, 7));
}

// A block's codes, in the order of rows, of which `count` groups are there.
template <Kind KIND, int COUNT>
struct Block {
    __m512i codes[4];

    INLINE Block(const uint8_t* const* at, const Own& own, int count) {
        const Words<KIND, 1> words(at[0], own);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) codes[pair] = offset_codes<KIND>(at[0], pair, own, words);
        if (count > 6) transpose_fours(codes);
    }

    // The sums of a row's parts, in fp32.
    template <bool>
    INLINE f32 sums(const Rows& rows, int row, int b, int count) const {
        const uint8_t* values = rows.values(row) + b * 2 * BLOCK;
        const __m512i start = load<__m512i>(rows.starts(row) + b * LANES);
        __m512i all;
        if (count > 6) {
            __m512i high = {}, low = start;
#pragma unroll
            for (int i = 0; i < 4; i++) add(high, low, i, values);
            all = joined_sums(high, low);
        } else {
            __m512i v[4] = {};  // of four inputs a lane
            for (int pair = 0; 2 * pair < count; pair++) {
                __m512i high = {}, low = {};
                add(high, low, pair, values);
                v[pair] = joined_sums(high, low);
            }
            transpose_fours(v);
            all = plus(start, plus(plus(v[0], v[1]), plus(v[2], v[3])));
        }
        if constexpr (!by_16(KIND)) all = plus(all, _mm512_shuffle_i32x4(all, all, 0xb1));
        return (f32)_mm512_cvtepi32_ps(all);
    }

  private:
    INLINE void add(__m512i& high, __m512i& low, int i, const uint8_t* values) const {
        const uint8_t* at = values + i * 2 * PAIR;
        add_products(high, low, codes[i], load<__m512i>(at), load<__m512i>(at + PAIR));
    }
};

// The same of COUNT blocks whose codes are in nibbles: a register has 16 codes each of every other group.
template <Kind KIND, int COUNT>
    requires(laid(KIND) == Laid::nibbles)
struct Block<KIND, COUNT> {
    __m512i codes[COUNT][4];  // of the even groups the first 16 and the second, then of the odd ones

    INLINE Block(const uint8_t* const* at, const Own&, int) {
        for (int i = 0; i < COUNT; i++) take(at[i] + form(KIND).codes.at, codes[i]);
    }

    // OUTPUTS: the blocks are of two outputs, else the second one follows the first.
    template <bool OUTPUTS>
    INLINE f32 sums(const Rows& rows, int row, int b, int count) const {
        const int pairs = (count + 1) / 2, kept = pairs * PAIR / 4;
        __m512i v[4] = {};  // of a block the even groups and the odd ones
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            __m512i high[COUNT] = {}, low[COUNT] = {};
#pragma unroll
            for (int k = 2 * odd; k < 2 * odd + 2; k++)
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    const uint8_t* values = rows.values(row) + (OUTPUTS ? b : b + i) * 2 * BLOCK + 2 * k * kept;
                    const auto read = [&](int at) { return _mm512_maskz_loadu_epi32(lanes_of(pairs), values + at); };
                    add_products(high[i], low[i], codes[i][k], read(0), read(kept));
                }
#pragma unroll
            for (int i = 0; i < COUNT; i++) v[2 * i + odd] = joined_sums(high[i], low[i]);
        }
        const auto halved = [](__m512i a, __m512i c) { return plus(_mm512_unpacklo_epi32(a, c), _mm512_unpackhi_epi32(a, c)); };
        const __m512i first = halved(v[0], v[1]), second = halved(v[2], v[3]);
        const __m512i all = plus(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
        const int32_t* starts = rows.starts(row) + b * LANES;
        f32 start = load<f32>(starts);
        if constexpr (COUNT == 2 && !OUTPUTS) start = in_turns(start, load<f32>(starts + LANES));
        return (f32)_mm512_cvtepi32_ps(plus((__m512i)start, all));
    }

  private:
    // Bytes have codes of one group, the first 16 below the second, or of two, the even one below the odd one.
    INLINE static void take(const uint8_t* from, __m512i (&codes)[4]) {
        constexpr bool of_two = of_256(KIND) && book(KIND) == Book::none;
        constexpr int step = of_two ? GROUP : of_256(KIND) ? GROUP / 2 : int(form(KIND).nbytes);
        const auto put = [&](__m512i bytes, __m512i& low, __m512i& high) {
            low = number(bytes), high = number(_mm512_srli_epi16(bytes, 4));
        };
        if constexpr (of_two) put(sixteens(from, step), codes[0], codes[2]), put(sixteens(from + 16, step), codes[1], codes[3]);
        else put(sixteens(from, 2 * step), codes[0], codes[1]), put(sixteens(from + step, 2 * step), codes[2], codes[3]);
    }

    // Four times 16 bytes.
    INLINE static __m512i sixteens(const uint8_t* from, int step) {
        const auto at = [&](int i) { return load<__m128i>(from + i * step); };
        const auto two = [&](int i) { return _mm256_inserti128_si256(_mm256_castsi128_si256(at(i)), at(i + 1), 1); };
        return joined(two(0), two(2));
    }

    // The numbers of codes in the lower halves of bytes, `offset` more.
    INLINE static __m512i number(__m512i codes) {
        const __m512i own = _mm512_and_si512(codes, _mm512_set1_epi8(15));
        if constexpr (book(KIND) == Book::none) return own;
        const __m128i numbers = _mm_xor_si128(load<__m128i>(BOOKS[int(book(KIND))]), _mm_set1_epi8(char(128)));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), own);
    }
};

template <Kind KIND, int COUNT>
using Rest = Block<KIND, COUNT>;  // of fewer than 256 inputs

}  // namespace fixed
}  // namespace stored

#endif
