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

// A block's codes, in the order of rows, of which `count` groups are there; the steps of its parts, 0 past those; and
// what is added to them.
template <Kind KIND>
struct Block {
    static constexpr int OUTS = 1;
    using lanes = f32;
    __m512i codes[4];
    Steps<KIND, GROUPS> own[OUTS];
    lanes steps;

    INLINE Block(const uint8_t* const* from, const Own* shared, int count) : own{{from[0], shared[0]}} {
        const Words<KIND, 1> words(from[0], shared[0]);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) codes[pair] = offset_codes<KIND>(from[0], pair, shared[0], words);
        if (count > 6) transpose_fours(codes);
        u32 part;
        for (int lane = 0; lane < W; lane++) part[lane] = LANES_OF<KIND>.part[lane];  // known, unlike what is loaded
        __m512 of_parts;
        if constexpr (by_16(KIND)) of_parts = (__m512)load<lanes>(own[0].steps);
        else of_parts = _mm512_castps256_ps512((__m256)load<eight>(own[0].steps));
        steps = (lanes)_mm512_permutexvar_ps((__m512i)part, of_parts);
        steps = part < uint32_t(by_16(KIND) ? 2 * count : count) ? steps : lanes{};
    }

    // The sums of a row's parts, in fp32.
    INLINE lanes sums(const uint8_t* values, const int32_t* starts, int count) const {
        const __m512i start = load<__m512i>(starts);
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
        return (lanes)_mm512_cvtepi32_ps(all);
    }

    // The sum of lanes, in the order of parts.
    INLINE static float folded(lanes v, int) {
        const f32 ordered = (f32)_mm512_permutexvar_ps(load<__m512i>(LANES_OF<KIND>.of_part), (__m512)v);
        if constexpr (by_16(KIND)) return sum(ordered);
        return sum(__builtin_shufflevector(ordered, ordered, 0, 1, 2, 3, 4, 5, 6, 7));
    }

  private:
    INLINE void add(__m512i& high, __m512i& low, int i, const uint8_t* values) const {
        const uint8_t* at = values + i * 2 * PAIR;
        add_products(high, low, codes[i], load<__m512i>(at), load<__m512i>(at + PAIR));
    }
};

// The same of two outputs whose codes are in nibbles: a register has 16 codes each of every other group.
template <Kind KIND>
    requires(in_nibbles(KIND))
struct Block<KIND> {
    static constexpr int OUTS = 2;
    using lanes = f32;
    __m512i codes[OUTS][4];  // of the even groups the first 16 and the second, then of the odd ones
    Steps<KIND, GROUPS> own[OUTS];
    lanes steps;

    INLINE Block(const uint8_t* const* from, const Own* shared, int)
        : own{{from[0], shared[0]}, {from[1], shared[1]}} {
        for (int o = 0; o < OUTS; o++) take(from[o] + form(KIND).codes.at, codes[o]);
        const auto pairs = [](const float* of_parts) { return _mm512_castpd256_pd512((__m256d)load<eight>(of_parts)); };
        const __m512i turns = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
        steps = (lanes)_mm512_permutex2var_pd(pairs(own[0].steps), turns, pairs(own[1].steps));
    }

    INLINE lanes sums(const uint8_t* values, const int32_t* starts, int count) const {
        const int pairs = (count + 1) / 2, kept = pairs * PAIR / 4;
        const auto read = [&](int i) { return _mm512_maskz_loadu_epi32(lanes_of(pairs), values + i * kept); };
        __m512i v[2 * OUTS];  // of an output the even groups and the odd ones
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            __m512i high[OUTS] = {}, low[OUTS] = {};
#pragma unroll
            for (int i = 2 * odd; i < 2 * odd + 2; i++) {
                const __m512i first = read(2 * i), second = read(2 * i + 1);
#pragma unroll
                for (int o = 0; o < OUTS; o++) add_products(high[o], low[o], codes[o][i], first, second);
            }
#pragma unroll
            for (int o = 0; o < OUTS; o++) v[2 * o + odd] = joined_sums(high[o], low[o]);
        }
        const auto halved = [](__m512i a, __m512i b) { return plus(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
        const __m512i first = halved(v[0], v[1]), second = halved(v[2], v[3]);
        const __m512i all = plus(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
        return (lanes)_mm512_cvtepi32_ps(plus(load<__m512i>(starts), all));
    }

    // The sum of an output's lanes, in the order of parts.
    INLINE static float folded(lanes v, int o) {
        const __m512i from = _mm512_add_epi32(load<__m512i>(LANES_OF<KIND>.of_part), _mm512_set1_epi32(2 * o));
        const f32 ordered = (f32)_mm512_permutexvar_ps(from, (__m512)v);
        return sum(__builtin_shufflevector(ordered, ordered, 0, 1, 2, 3, 4, 5, 6, 7));
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
    static constexpr int OUTS = 1, VECTORS = by_16(KIND) ? 2 : 1;  // of eight lanes
    using lanes = float __attribute__((vector_size(32 * VECTORS)));
    alignas(32) int16_t codes[BLOCK];
    Steps<KIND, GROUPS> own[OUTS];
    lanes steps;

    INLINE Block(const uint8_t* const* from, const Own* shared, int count) : own{{from[0], shared[0]}} {
        steps = load<lanes>(own[0].steps);
        for (int part = VECTORS * count; part < 8 * VECTORS; part++) steps[part] = 0;
        for (int g = 0; g < count; g++) {
            alignas(GROUP) int8_t bytes[GROUP];
            store_codes<KIND>(from[0], g, shared[0], bytes);
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

    INLINE static float folded(lanes v, int) { return sum(v); }
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
    lanes acc[OUTS / Of::OUTS][ROWS] = {};
    Least least[OUTS][ROWS] = {};
    const auto add = [&](int o, const uint8_t* const* at, int b, int count) __attribute__((always_inline)) {
        const Of block(at, own + o, count);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const lanes unit = load<lanes>(rows.units(row + r) + b * LANES);
            const uint8_t* values = rows.values(row + r) + b * 2 * BLOCK;
            const lanes sums = block.sums(values, rows.starts(row + r) + b * LANES, count);
            acc[o / Of::OUTS][r] = __builtin_elementwise_fma(sums, block.steps * unit, acc[o / Of::OUTS][r]);
            if constexpr (has_least(KIND)) {
                const Least of_row = load<Least>(rows.sums(row + r) + b * LANES);
#pragma unroll
                for (int i = 0; i < Of::OUTS; i++) {
                    Least of_parts;
                    __builtin_memcpy(&of_parts, block.own[i].least, sizeof of_parts);
                    least[o + i][r] = __builtin_elementwise_fma(of_parts, of_row, least[o + i][r]);
                }
            }
        }
    };
    const int whole = rows.inputs / BLOCK, rest = rows.inputs % BLOCK / GROUP;
    for (int b = 0; b < whole; b++)
#pragma unroll
        for (int o = 0; o < OUTS; o += Of::OUTS) {
            const uint8_t* at[Of::OUTS];
#pragma unroll
            for (int i = 0; i < Of::OUTS; i++) {
                at[i] = from[o + i] + b * bytes_of_256(KIND);
                for (int line = 0; line < bytes_of_256(KIND); line += LINE) __builtin_prefetch(at[i] + AHEAD + line);
            }
            add(o, at, b, GROUPS);
        }
    if constexpr (!of_256(KIND))
        for (int o = 0; rest && o < OUTS; o += Of::OUTS) {  // with zeros behind it
            uint8_t blocks[Of::OUTS][bytes_of_256(KIND) + LINE] = {};
            const uint8_t* at[Of::OUTS];
            for (int i = 0; i < Of::OUTS; i++) {
                const uint8_t* last = from[o + i] + whole * bytes_of_256(KIND);
                __builtin_memcpy(blocks[i], last, rest / groups_of_block(KIND) * form(KIND).nbytes);
                at[i] = blocks[i];
            }
            add(o, at, whole, rest);
        }
    for (int o = 0; o < OUTS; o++)
        for (int r = 0; r < ROWS; r++) {
            results[r][o] = Of::folded(acc[o / Of::OUTS][r], o % Of::OUTS);
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
                constexpr int OUTS = 2;
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
