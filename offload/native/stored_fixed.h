// Products of a few rows with a matrix of GGUF's kinds (stored.h) in fixed point: the same bits by every instruction set
// and on a GPU, since sums are of integers and what follows is a fixed sequence of operations.
//
// Rows are integers and units (stored_fixed_rows.h), and codes are less their centre. A part is of 16 inputs where the
// kind's steps are, else of 32. Of part p the sum of value * code is exact; as fp32 it is multiplied by step * unit and
// added, fused, to lane p of as many as 256 inputs have parts, in the order of the parts. Least values likewise, times the
// sum of values, which is fp32, times unit. Lanes are added as `sum` adds them, and the least values' total to the other
// one.
#pragma once
#include "stored_fixed_rows.h"

namespace stored {
namespace fixed {

constexpr int MOST_AT_ONCE = W == 16 ? 8 : 4;  // rows

#if defined(__AVX512BW__)

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

// A block's codes, in the order of rows, of which `count` groups are there.
template <Kind KIND>
struct Block {
    using lanes = f32;
    __m512i codes[4];

    INLINE Block(const uint8_t* at, const Own& own, int count) {
        const Words<KIND, 1> words(at, own);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) codes[pair] = offset_codes<KIND>(at, pair, own, words);
        if (count > 6) transpose_fours(codes);
    }

    // The sums of a row's parts, in fp32.
    INLINE lanes sums(const uint8_t* values, const int32_t* starts, int count) const {
        const __m512i start = load<__m512i>(starts);
        __m512i all;
        if (count > 6) {
            __m512i high = {}, low = start;
#pragma unroll
            for (int i = 0; i < 4; i++) add_products(high, low, codes[i], values + i * 2 * PAIR);
            all = joined_sums(high, low);
        } else {
            __m512i v[4] = {};  // of four inputs a lane
            for (int pair = 0; 2 * pair < count; pair++) {
                __m512i high = {}, low = {};
                add_products(high, low, codes[pair], values + pair * 2 * PAIR);
                v[pair] = joined_sums(high, low);
            }
            transpose_fours(v);
            all = plus(start, plus(plus(v[0], v[1]), plus(v[2], v[3])));
        }
        if constexpr (!by_16(KIND)) all = plus(all, _mm512_shuffle_i32x4(all, all, 0xb1));
        return (lanes)_mm512_cvtepi32_ps(all);
    }

    // The parts' steps, of which those past `count` groups are 0.
    INLINE static lanes steps(const float* of_parts, int count) {
        u32 part;
        for (int lane = 0; lane < W; lane++) part[lane] = part_of(lane, by_16(KIND));
        const lanes all = (lanes)_mm512_permutexvar_ps((__m512i)part, (__m512)load<lanes>(of_parts));
        return part < uint32_t(by_16(KIND) ? 2 * count : count) ? all : lanes{};
    }

    // The sum of lanes, in the order of parts.
    INLINE static float folded(lanes v) {
        u32 lane;
        for (int p = 0; p < W; p++) lane[p] = by_16(KIND) ? p % 4 * 4 + p / 4 : p % 2 * 8 + p / 2 % 4;
        const f32 ordered = (f32)_mm512_permutexvar_ps((__m512i)lane, (__m512)v);
        if constexpr (by_16(KIND)) return sum(ordered);
        return sum(__builtin_shufflevector(ordered, ordered, 0, 1, 2, 3, 4, 5, 6, 7));
    }

  private:
    INLINE static void add_products(__m512i& high, __m512i& low, __m512i codes, const uint8_t* values) {
        const __m512i first = load<__m512i>(values), second = load<__m512i>(values + PAIR);
#if defined(__AVX512VNNI__)
        high = _mm512_dpbusd_epi32(high, codes, first), low = _mm512_dpbusd_epi32(low, codes, second);
#else
        high = plus(high, _mm512_madd_epi16(low_bytes(codes), first));
        low = plus(low, _mm512_madd_epi16(_mm512_srli_epi16(codes, 8), second));
#endif
    }

    INLINE static __m512i joined_sums(__m512i high, __m512i low) {
#if defined(__AVX512VNNI__)
        high = _mm512_slli_epi32(high, 8);
#endif
        return plus(high, low);
    }
};

#else

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

// Lane i: the sum of the lanes of v[i]. Until the last step nothing leaves its half of a register.
INLINE eight_sums sums_of_lanes(const eight_sums (&v)[8]) {
    const auto two = [](eight_sums a, eight_sums b) {
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    };
    const auto four = [&](int i) {
        const eight_sums a = two(v[i], v[i + 1]), b = two(v[i + 2], v[i + 3]);
        return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    };
    const eight_sums a = four(0), b = four(4);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

template <Kind KIND>
struct Block {
    static constexpr int VECTORS = by_16(KIND) ? 2 : 1;  // of eight lanes
    using lanes = float __attribute__((vector_size(32 * VECTORS)));
    alignas(32) int16_t codes[BLOCK];

    INLINE Block(const uint8_t* at, const Own& own, int count) {
        for (int g = 0; g < count; g++) {
            alignas(GROUP) int8_t bytes[GROUP];
            store_codes<KIND>(at, g, own, bytes);
            using some = int8_t __attribute__((vector_size(16)));
            for (int i = 0; i < GROUP; i += 16)
                store(codes + g * GROUP + i, __builtin_convertvector(load<some>(bytes + i), sixteen));
        }
    }

    INLINE lanes sums(const uint8_t* values, const int32_t*, int count) const {
        eight_sums v[VECTORS][8] = {};
        for (int i = 0; i < 2 * count; i++) {
            const eight_sums own = multiplied(load<sixteen>(values + 32 * i), load<sixteen>(codes + 16 * i));
            if constexpr (by_16(KIND)) v[i / 8][i % 8] = own;
            else v[0][i / 2] += own;
        }
        lanes found;
        for (int i = 0; i < VECTORS; i++)
            store(reinterpret_cast<float*>(&found) + 8 * i, __builtin_convertvector(sums_of_lanes(v[i]), eight));
        return found;
    }

    INLINE static lanes steps(const float* of_parts, int count) {
        lanes all = load<lanes>(of_parts);
        for (int part = VECTORS * count; part < 8 * VECTORS; part++) all[part] = 0;
        return all;
    }

    INLINE static float folded(lanes v) { return sum(v); }
};

#endif

// results[r][0..OUTS) of ROWS rows from `row` on, for the outputs whose rows begin at `from`: numbers that are read once
// are multiplied with several.
template <Kind KIND, int ROWS, int OUTS>
INLINE void dots(const uint8_t* const (&from)[OUTS], const Own (&own)[OUTS], const Rows& rows, int row,
                 float (*results)[16]) {
    using Of = Block<KIND>;
    using lanes = typename Of::lanes;
    using Least = float __attribute__((vector_size(by_16(KIND) ? 64 : 32)));
    lanes acc[OUTS][ROWS] = {};
    Least least[OUTS][ROWS] = {};
    const auto add = [&](int o, const uint8_t* at, int b, int count) __attribute__((always_inline)) {
        const Steps<KIND, GROUPS> all(at, own[o]);
        const lanes steps = Of::steps(all.steps, count);
        const Of codes(at, own[o], count);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const lanes unit = load<lanes>(rows.units(row + r) + b * LANES);
            const uint8_t* values = rows.values(row + r) + b * 2 * BLOCK;
            const lanes sums = codes.sums(values, rows.starts(row + r) + b * LANES, count);
            acc[o][r] = __builtin_elementwise_fma(sums, steps * unit, acc[o][r]);
            if constexpr (has_least(KIND)) {
                Least of_parts;
                __builtin_memcpy(&of_parts, all.least, sizeof of_parts);
                const Least of_row = load<Least>(rows.sums(row + r) + b * LANES);
                least[o][r] = __builtin_elementwise_fma(of_parts, of_row, least[o][r]);
            }
        }
    };
    const int whole = rows.inputs / BLOCK, rest = rows.inputs % BLOCK / GROUP;
    for (int b = 0; b < whole; b++)
#pragma unroll
        for (int o = 0; o < OUTS; o++) {
            const uint8_t* at = from[o] + b * bytes_of_256(KIND);
            for (int i = 0; i < bytes_of_256(KIND); i += LINE) __builtin_prefetch(at + AHEAD + i);
            add(o, at, b, GROUPS);
        }
    if constexpr (!of_256(KIND))
        for (int o = 0; rest && o < OUTS; o++) {  // with zeros behind it
            uint8_t block[bytes_of_256(KIND) + LINE] = {};
            __builtin_memcpy(block, from[o] + whole * bytes_of_256(KIND), rest / groups_of_block(KIND) * form(KIND).nbytes);
            add(o, block, whole, rest);
        }
    for (int o = 0; o < OUTS; o++)
        for (int r = 0; r < ROWS; r++) {
            results[r][o] = Of::folded(acc[o][r]);
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
