// Products of a few rows with a matrix of GGUF's kinds (stored.h) in fixed point: the same bits by every instruction set
// and on a GPU, since sums are of integers and what follows is a fixed sequence of operations.
//
// A row is in fixed point by groups of 32: unit is the least power of two with max |x| / unit <= MOST_VALUE, at least
// 2^-64, or no number where one of the group is not finite; a value is x / unit, rounded to nearest, ties to even. Codes
// are less their centre. A part is of 16 inputs where the kind's steps are, else of 32. Of part p the sum of value * code
// is exact; as fp32 it is multiplied by step * unit and added, fused, to lane p of as many as 256 inputs have parts, in
// the order of the parts. Least values likewise, times the sum of values, which is fp32, times unit. Lanes are added as
// `sum` adds them, and the least values' total to the other one.
#pragma once
#include "stored_pairs.h"

namespace stored {
namespace fixed {

constexpr int BLOCK = 256, MOST_VALUE = 127 * 257, LEAST_UNIT = 127 - 64;  // as the exponent of a float
constexpr int LANES = 16;                                                  // of units and sums of a block, with room
constexpr int MOST_AT_ONCE = W == 16 ? 8 : 4;                              // rows

// Rows, one after the other: values, int16 [inputs], with zeros to whole pairs of groups; then for each 256 inputs LANES
// units, in the order in which parts are multiplied; then LANES sums of values, times unit, of parts in their order. They
// take less room than `stored::Rows`. A row is no multiple of 4096 bytes, or a first cache would put all of them to the
// same place.
struct Rows {
    float* at;
    int inputs;

    int blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
    int padded() const { return (inputs + PAIR - 1) / PAIR * PAIR; }
    int stride() const { return padded() / 2 + 2 * LANES * blocks() + LANES; }
    Rows from(int64_t row) const { return {at + row * stride(), inputs}; }
    int16_t* values(int64_t row) const { return reinterpret_cast<int16_t*>(at + row * stride()); }
    float* units(int64_t row) const { return at + row * stride() + padded() / 2; }
    float* sums(int64_t row) const { return units(row) + LANES * blocks(); }
};

// Integer sums of parts, of which W == 16 has all of a block in a vector: of 16 inputs part 4 j + k in lane 4 k + j, and
// of 32 part 2 j + k / 2 in lanes 4 k + j. Elsewhere they are in their order.
constexpr int part_of(int lane, bool of_16) {
    if (W < 16) return lane;
    return of_16 ? lane % 4 * 4 + lane / 4 : lane % 4 * 2 + lane / 8;
}

// The unit of a group whose largest magnitude has the bits `most`, and what it is divided by: in the bits of floats.
INLINE uint32_t unit_of(uint32_t most) {
    constexpr uint32_t top = __builtin_bit_cast(uint32_t, float(MOST_VALUE));  // 1.99 * 2^14
    const uint32_t exponent = (most >> 23) + ((most & 0x7fffff) > (top & 0x7fffff));
    const uint32_t unit = exponent < LEAST_UNIT + 14 ? LEAST_UNIT : exponent - 14;
    return most < 0x7f800000 ? unit << 23 : 0x7fc00000;
}
INLINE uint32_t inverse_of(uint32_t unit) { return unit < 0x7f800000 ? (254 << 23) - unit : 0; }

// Of a group its values, and the sums of its halves. Returns the unit.
template <class F>
INLINE float take_group(F&& read, int16_t (&values)[GROUP], int (&sums)[2]) {
    using words = int16_t __attribute__((vector_size(2 * W)));
    f32 numbers[GROUP / W];
    u32 most = {};
    for (int i = 0; i < GROUP / W; i++) {
        numbers[i] = read(i * W);
        const u32 magnitude = (u32)numbers[i] & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    const uint32_t unit = unit_of(__builtin_reduce_max(most)), inverse = inverse_of(unit);
    sums[0] = sums[1] = 0;
    for (int i = 0; i < GROUP / W; i++) {
        const f32 scaled = inverse ? numbers[i] * __builtin_bit_cast(float, inverse) : f32{};
        const i32 rounded = __builtin_convertvector(__builtin_elementwise_roundeven(scaled), i32);
        sums[i * W / 16] += __builtin_reduce_add(rounded);
        store(values + i * W, __builtin_convertvector(rounded, words));
    }
    return __builtin_bit_cast(float, unit);
}

// One row, as it is multiplied with a matrix of `kind`. read(i): elements i to i + W, fp32.
template <class F>
void take(const Rows& rows, int64_t row, Kind kind, F&& read) {
    const bool of_16 = form(kind).group == 16;
    const int groups = rows.inputs / GROUP;
    int16_t* to = rows.values(row);
    float units[LANES] = {}, sums[LANES] = {};
    alignas(64) int16_t pair[2][GROUP] = {};
    for (int g = 0; g < groups; g++) {
        int halves[2];
        const float unit = take_group([&](int i) { return read(g * GROUP + i); }, pair[g % 2], halves);
        const int of_block = g % GROUPS;
        units[of_block] = unit;
        if (of_16) sums[2 * of_block] = float(halves[0]) * unit, sums[2 * of_block + 1] = float(halves[1]) * unit;
        else sums[of_block] = float(halves[0] + halves[1]) * unit;
        const bool last = g == groups - 1;
        if (g % 2 || last) {
            if (W == 16) put_pairs(reinterpret_cast<uint16_t*>(pair), reinterpret_cast<uint16_t*>(to));
            else __builtin_memcpy(to, pair, sizeof pair);
            to += PAIR;
            __builtin_memset(pair, 0, sizeof pair);
        }
        if (of_block != GROUPS - 1 && !last) continue;
        float *all_units = rows.units(row) + g / GROUPS * LANES, *all_sums = rows.sums(row) + g / GROUPS * LANES;
        for (int lane = 0; lane < LANES; lane++) {
            const int part = part_of(lane, of_16);
            all_units[lane] = units[(of_16 ? part / 2 : part) % GROUPS], all_sums[lane] = sums[lane];
        }
        __builtin_memset(units, 0, sizeof units), __builtin_memset(sums, 0, sizeof sums);
    }
}

#if defined(__AVX512BW__)

// A block's codes, of which `count` groups are there.
template <Kind KIND>
struct Block {
    using lanes = f32;
    __m512i codes[4][2];  // the even ones of 64, and the odd ones

    INLINE Block(const uint8_t* at, const Own& own, int) {
        const Words<KIND, Integers> words(at, own);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            const CodeWords<KIND, Integers> both(at, pair, own, true, words);
            codes[pair][0] = both.even, codes[pair][1] = both.odd;
        }
    }

    // The sums of a row's parts, in fp32.
    INLINE lanes sums(const int16_t* values, int count) const {
        __m512i v[4] = {};  // of four inputs a lane
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            if (2 * pair < count) {
                const __m512i even = load<__m512i>(values + pair * PAIR), odd = load<__m512i>(values + pair * PAIR + GROUP);
                v[pair] = add_products(_mm512_madd_epi16(even, codes[pair][0]), odd, codes[pair][1]);
            }
        }
        const __m512i one = plus(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
        const __m512i other = plus(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
        __m512i all = plus(_mm512_unpacklo_epi64(one, other), _mm512_unpackhi_epi64(one, other));
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
    INLINE static __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
    INLINE static __m512i add_products(__m512i total, __m512i a, __m512i b) {
#if defined(__AVX512VNNI__)
        return _mm512_dpwssd_epi32(total, a, b);
#else
        return plus(total, _mm512_madd_epi16(a, b));
#endif
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

// Lane i: the sum of the lanes of v[i].
INLINE eight_sums sums_of_lanes(eight_sums (&v)[8]) {
#pragma unroll
    for (int count = 4; count; count /= 2)
#pragma unroll
        for (int i = 0; i < count; i++) {
            const eight_sums a = v[i], b = v[i + count];
            v[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11) +
                   __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
        }
    return v[0];
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

    INLINE lanes sums(const int16_t* values, int count) const {
        eight_sums v[VECTORS][8] = {};
        for (int i = 0; i < 2 * count; i++) {
            const eight_sums own = multiplied(load<sixteen>(values + 16 * i), load<sixteen>(codes + 16 * i));
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

// results[r][0] of ROWS rows from `row` on.
template <Kind KIND, int ROWS>
INLINE void dots(const uint8_t* at, const Own& own, const Rows& rows, int row, float (*results)[16]) {
    using Of = Block<KIND>;
    using lanes = typename Of::lanes;
    using Least = float __attribute__((vector_size(by_16(KIND) ? 64 : 32)));
    lanes acc[ROWS] = {};
    Least least[ROWS] = {};
    const auto add = [&](const uint8_t* block, int b, int count) __attribute__((always_inline)) {
        const Steps<KIND, GROUPS> all(block, own);
        const lanes steps = Of::steps(all.steps, count);
        const Of codes(block, own, count);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const lanes unit = load<lanes>(rows.units(row + r) + b * LANES);
            const lanes sums = codes.sums(rows.values(row + r) + b * BLOCK, count);
            acc[r] = __builtin_elementwise_fma(sums, steps * unit, acc[r]);
            if constexpr (has_least(KIND)) {
                Least of_parts;
                __builtin_memcpy(&of_parts, all.least, sizeof of_parts);
                const Least values = load<Least>(rows.sums(row + r) + b * LANES);
                least[r] = __builtin_elementwise_fma(of_parts, values, least[r]);
            }
        }
    };
    const int whole = rows.inputs / BLOCK, rest = rows.inputs % BLOCK / GROUP;
    for (int b = 0; b < whole; b++, at += bytes_of_256(KIND)) {
        for (int i = 0; i < bytes_of_256(KIND); i += LINE) __builtin_prefetch(at + AHEAD + i);
        add(at, b, GROUPS);
    }
    if constexpr (!of_256(KIND))
        if (rest) {  // with zeros behind it
            uint8_t block[bytes_of_256(KIND) + LINE] = {};
            __builtin_memcpy(block, at, rest / groups_of_block(KIND) * form(KIND).nbytes);
            add(block, whole, rest);
        }
    for (int r = 0; r < ROWS; r++) {
        results[r][0] = Of::folded(acc[r]);
        if constexpr (has_least(KIND)) results[r][0] += sum(least[r]);
    }
}

// results[r][0..count) of `number` rows for the outputs from `first` on.
inline void tile(const Matrix& matrix, const Rows& rows, int number, int64_t first, int count, float (*results)[16]) {
    const int64_t of_output = matrix.row_bytes(rows.inputs);
    const auto at = static_cast<const uint8_t*>(matrix.rows) + first * of_output;
    with_kind(matrix.kind, [&]<Kind KIND>() {
        if constexpr (is_gguf(KIND))
            by_rows<MOST_AT_ONCE>(number, [&]<int ROWS>(int r) {
                for (int o = 0; o < count; o++) {
                    const uint8_t* row = at + o * of_output;
                    const Own own = shared_of<KIND>(matrix, row + of_output - matrix.tail);
                    dots<KIND, ROWS>(row, own, rows, r, reinterpret_cast<float(*)[16]>(&results[r][o]));
                }
            });
    });
}

}  // namespace fixed
}  // namespace stored
