// Codes of a block, multiplied with rows in fixed point (stored_fixed.h), where registers have 256 bits or fewer.
#pragma once
#include "stored_fixed_rows.h"

#if !defined(__AVX512BW__)

namespace stored {
namespace fixed {

using eight_sums = int32_t __attribute__((vector_size(32)));
using sixteen = int16_t __attribute__((vector_size(32)));

// Sums of the products of 16 numbers, in eight lanes.
INLINE eight_sums multiplied(sixteen a, sixteen b) {
#if defined(__AVX2__)
    return (eight_sums)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    using wide = int32_t __attribute__((vector_size(64)));
    const wide all = __builtin_convertvector(a, wide) * __builtin_convertvector(b, wide);
    return __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
#endif
}

// Lanes i and 4 + i: the sums of both halves' lanes of v[i].
INLINE eight_sums sums_of_halves(const eight_sums* v) {
    const auto two = [](eight_sums a, eight_sums b) {
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    };
    const eight_sums a = two(v[0], v[1]), b = two(v[2], v[3]);
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

// Lane i: the sum of the lanes of v[i].
INLINE eight_sums sums_of_lanes(const eight_sums (&v)[8]) {
    const eight_sums a = sums_of_halves(v), b = sums_of_halves(v + 4);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

template <Kind KIND>
constexpr int VECTORS = by_16(KIND) ? 2 : 1;  // of eight lanes

template <Kind KIND>
using PartsOf = float __attribute__((vector_size(32 * VECTORS<KIND>)));

// The steps of a block's parts, 0 past those of `count` groups.
template <Kind KIND, int>
INLINE PartsOf<KIND> steps_of(const Steps<KIND, GROUPS>* own, int count) {
    PartsOf<KIND> all = load<PartsOf<KIND>>(own->steps);
    for (int part = VECTORS<KIND> * count; part < 8 * VECTORS<KIND>; part++) all[part] = 0;
    return all;
}

template <Kind KIND, int>
INLINE PartsOf<KIND> units_of(const Rows& rows, int row, int b) {
    return load<PartsOf<KIND>>(rows.units(row) + b * LANES);
}

// A sum with the products of the parts of a block.
template <Kind KIND, int>
INLINE PartsOf<KIND> added(PartsOf<KIND> acc, PartsOf<KIND> sums, PartsOf<KIND> scales) {
    return __builtin_elementwise_fma(sums, scales, acc);
}

template <Kind KIND>
INLINE float folded(PartsOf<KIND> v, int) {
    return sum(v);
}

// A block's codes, of which `count` groups are there.
template <Kind KIND>
struct Plain {
    using lanes = PartsOf<KIND>;
    alignas(32) int16_t codes[BLOCK];

    INLINE Plain(const uint8_t* const* from, const Own& own, int count) {
        for (int g = 0; g < count; g++) {
            alignas(GROUP) int8_t bytes[GROUP];
            store_codes<KIND>(from[0], g, own, bytes);
            using some = int8_t __attribute__((vector_size(16)));
            for (int i = 0; i < GROUP; i += 16)
                store(codes + g * GROUP + i, __builtin_convertvector(load<some>(bytes + i), sixteen));
        }
    }

    template <bool>
    INLINE lanes sums(const Rows& rows, int row, int b, int count) const {
        const uint8_t* values = rows.values(row) + b * 2 * BLOCK;
        eight_sums v[VECTORS<KIND>][8] = {};
        for (int i = 0; i < 2 * count; i++) {
            const eight_sums own = multiplied(load<sixteen>(values + 32 * i), load<sixteen>(codes + 16 * i));
            if constexpr (by_16(KIND)) v[i / 8][i % 8] = own;
            else v[0][i / 2] += own;
        }
        lanes found;
        for (int i = 0; i < VECTORS<KIND>; i++)
            store(reinterpret_cast<float*>(&found) + 8 * i, __builtin_convertvector(sums_of_lanes(v[i]), eight));
        return found;
    }
};

#if defined(__AVX2__)

// The sums of words h and of words l, of which a value has 256 h + l.
INLINE eight_sums joined_sums(__m256i high, __m256i low) {
    const __m256i wide = _mm256_madd_epi16(high, _mm256_set1_epi16(256));
    return (eight_sums)wide + (eight_sums)_mm256_madd_epi16(low, _mm256_set1_epi16(1));
}

// The same as bytes without a sign, `offset` more, from 0 to 127: with bytes of rows two products add up to at most
// 32,512, which 16 bits hold.
template <Kind KIND>
struct InBytes {
    using lanes = PartsOf<KIND>;
    __m256i codes[GROUPS];

    INLINE InBytes(const uint8_t* const* from, const Own& own, int count) {
        for (int g = 0; g < count; g++) {
            alignas(GROUP) int8_t bytes[GROUP];
            if constexpr (has_grid(KIND)) store_codes<KIND>(from[0], g, own, bytes);
            const group found = has_grid(KIND) ? load<group>(bytes) : codes_of<KIND>(from[0], g, own);
            codes[g] = (__m256i)(found + uint8_t(offset(KIND)));
        }
    }

    template <bool>
    INLINE lanes sums(const Rows& rows, int row, int b, int count) const {
        const uint8_t* values = rows.values(row) + b * 2 * BLOCK;
        const int32_t* starts = rows.starts(row) + b * LANES;
        eight_sums v[GROUPS] = {};
        for (int g = 0; g < count; g++) {
            const auto product = [&](int plane) {
                return _mm256_maddubs_epi16(codes[g], load<__m256i>(values + (2 * g + plane) * GROUP));
            };
            v[g] = joined_sums(product(0), product(1));
        }
        if constexpr (!by_16(KIND)) {
            return __builtin_convertvector(load<eight_sums>(starts) + sums_of_lanes(v), eight);
        } else {
            lanes found;
            for (int i = 0; i < 2; i++) {
                const eight_sums own = sums_of_halves(v + 4 * i), start = load<eight_sums>(starts + 8 * i);
                const eight_sums ordered = __builtin_shufflevector(own, own, 0, 4, 1, 5, 2, 6, 3, 7);
                store(reinterpret_cast<float*>(&found) + 8 * i, __builtin_convertvector(start + ordered, eight));
            }
            return found;
        }
    }
};

// The same of a whole block, of codes in nibbles, from 0 to 24: four products add up to at most 12,288.
template <Kind KIND>
struct InNibbles {
    using lanes = eight;
    __m256i codes[4][2];  // of groups i and 4 + i the first 16 codes, and the second

    INLINE InNibbles(const uint8_t* const* from, const Own&, int) {
        constexpr bool of_two = of_256(KIND);  // bytes have codes of two groups
        constexpr int step = of_two ? GROUP : int(form(KIND).nbytes);
        const uint8_t* at = from[0] + form(KIND).codes.at;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const __m256i all = of_two ? sixteens(at + i / 2 * step + i % 2 * 16, 2 * step) : sixteens(at + i * step, 4 * step);
            __m256i& low = of_two ? codes[i / 2 * 2][i % 2] : codes[i][0];
            __m256i& high = of_two ? codes[i / 2 * 2 + 1][i % 2] : codes[i][1];
            low = number(all), high = number(_mm256_srli_epi16(all, 4));
        }
    }

    template <bool>
    INLINE lanes sums(const Rows& rows, int row, int b, int) const {
        const uint8_t* values = rows.values(row) + b * 2 * BLOCK;
        const int32_t* starts = rows.starts(row) + b * LANES;
        const auto of_plane = [&](int i, int plane) {
            const auto product = [&](int half) {
                return _mm256_maddubs_epi16(codes[i][half], load<__m256i>(values + (4 * i + 2 * half + plane) * 32));
            };
            return _mm256_add_epi16(product(0), product(1));
        };
        eight_sums v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = joined_sums(of_plane(i, 0), of_plane(i, 1));
        return __builtin_convertvector(load<eight_sums>(starts) + sums_of_halves(v), eight);
    }

  private:
    INLINE static __m256i sixteens(const uint8_t* from, int step) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(from)), load<__m128i>(from + step), 1);
    }

    INLINE static __m256i number(__m256i codes) {
        const __m256i own = _mm256_and_si256(codes, _mm256_set1_epi8(15));
        if constexpr (book(KIND) == Book::none) return own;
        const __m128i numbers = _mm_add_epi8(load<__m128i>(BOOKS[int(book(KIND))]), _mm_set1_epi8(offset(KIND)));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), own);
    }
};

#endif

template <Kind KIND, Laid LAID>
struct Laying {
    using Whole = Plain<KIND>;
    using Rest = Plain<KIND>;
};
#if defined(__AVX2__)
template <Kind KIND>
struct Laying<KIND, Laid::bytes> {
    using Whole = InBytes<KIND>;
    using Rest = InBytes<KIND>;
};
template <Kind KIND>
struct Laying<KIND, Laid::nibbles> {
    using Whole = InNibbles<KIND>;
    using Rest = InBytes<KIND>;
};
#endif

// The codes of a block: of 256 inputs, or of fewer.
template <Kind KIND, int>
using Block = typename Laying<KIND, laid(KIND)>::Whole;
template <Kind KIND, int>
using Rest = typename Laying<KIND, laid(KIND)>::Rest;

}  // namespace fixed
}  // namespace stored

#endif
