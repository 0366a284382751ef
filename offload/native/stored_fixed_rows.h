// Rows in fixed point, as they are multiplied with a matrix in blocks (stored_fixed.h).
//
// A row has groups of 32: unit is the least power of two with max |x| / unit <= MOST_VALUE, at least 2^-64, or no number
// where one of the group is not finite; a value is x / unit, rounded to nearest, ties to even.
#pragma once
#include "stored_pairs.h"

namespace stored {
namespace fixed {

constexpr int BLOCK = 256, MOST_VALUE = 127 * 257, LEAST_UNIT = 127 - 64;  // as the exponent of a float
constexpr int LANES = 16;                                                  // of units and sums of a block, with room

// Rows, one after the other: values, two bytes each, with zeros to whole pairs of groups; then for each 256 inputs LANES
// units, in the order in which parts are multiplied; then LANES sums of values, times unit, of parts in their order; then
// LANES starts, the int32 that sums of value * code of 16 inputs begin with. They take no more room than `stored::Rows`.
//
// Values are int16 in their order (words), or two bytes h and l, of which a value is 256 h + l, in registers: one of h,
// then the one of l. If bytes cannot be multiplied, registers of 64 have their even values, then their odd ones.
//
// bytes: where W == 8 a register has a group. Where W == 16 it has 64 inputs in their order, and of whole 256 inputs
// register i has in lane 4 k + j inputs 64 j + 16 k + 4 i to 4 more: a lane is of the same part in all of them.
//
// nibbles: where W == 16 register i has in lane 4 k + j inputs 64 k + 16 i + 4 j to 4 more, and of fewer than 256 inputs as
// many of its first lanes as there are. Where W == 8 it has 16 inputs of group i / 2, then those of group 4 + i / 2, and
// fewer than 256 inputs lie as bytes.
struct Rows {
    float* at;
    int inputs;

    int blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
    int padded() const { return (inputs + PAIR - 1) / PAIR * PAIR; }
    int stride() const { return padded() / 2 + (3 * blocks() + (blocks() > 1)) * LANES; }  // not of 4096 bytes each
    Rows from(int64_t row) const { return {at + row * stride(), inputs}; }
    uint8_t* values(int64_t row) const { return reinterpret_cast<uint8_t*>(at + row * stride()); }
    float* units(int64_t row) const { return at + row * stride() + padded() / 2; }
    float* sums(int64_t row) const { return units(row) + LANES * blocks(); }
    int32_t* starts(int64_t row) const { return reinterpret_cast<int32_t*>(sums(row) + LANES * blocks()); }
};

// How the values of a row lie that are multiplied with codes: see Rows.
enum class Laid { words, bytes, nibbles };

consteval Laid laid(Kind kind) {
    const bool nibbles = form(kind).codes.bits == 4 && !form(kind).high.bits && !by_16(kind);
#if defined(__AVX512BW__)
    return nibbles ? Laid::nibbles : Laid::bytes;
#elif defined(__AVX2__)
    if (has_code(kind, "signed") || book(kind) == Book::iq4) return Laid::words;  // codes of 8 bits
    return nibbles ? Laid::nibbles : Laid::bytes;
#else
    return Laid::words;
#endif
}

// Blocks whose codes are multiplied together.
template <Kind KIND>
constexpr int BLOCKS = W == 16 && laid(KIND) == Laid::nibbles ? 2 : 1;

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
INLINE float take_group(F&& read, int16_t* values, int* sums) {
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

// Codes are multiplied with this added, without a sign, unless values are words.
consteval int offset(Kind kind) {
    if (has_grid(kind)) return 64;
    if (W == 8 && book(kind) == Book::e2m1) return 12;
    if (W == 8 && has_code(kind, "sign")) return 1;
    return book(kind) != Book::none || has_code(kind, "signed") || has_code(kind, "sign") ? 128 : centre(kind);
}

// A vector of a block's integer sums: the part of each lane, the 16 inputs that a start is of, unless it is of all 32 of
// the part, and a lane of each part. Where W == 16 nibbles' has parts of two blocks, in turns of two lanes.
struct Lanes {
    Laid laid;
    int offset;
    bool of_part;
    alignas(64) uint32_t part[LANES] = {}, sixteen[LANES] = {}, of[LANES] = {};
};

template <Kind KIND>
constexpr Lanes LANES_OF = [] {
    constexpr bool of_16 = by_16(KIND), turns = W == 16 && laid(KIND) == Laid::nibbles;
    Lanes all{laid(KIND), offset(KIND), turns || (W < 16 && !of_16)};
    for (uint32_t lane = LANES; lane-- > 0;) {
        all.sixteen[lane] = W < 16 ? lane : lane % 4 * 4 + lane / 4;
        all.part[lane] = turns ? lane / 4 * 2 + lane % 2 : of_16 ? all.sixteen[lane] : W < 16 ? lane % GROUPS : all.sixteen[lane] / 2;
        all.of[all.part[lane]] = lane;
    }
    return all;
}();

#if defined(__AVX512BW__)

INLINE __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
INLINE __m512i low_bytes(__m512i words) { return _mm512_and_si512(words, _mm512_set1_epi16(255)); }

// Of each four lanes of four vectors, the first ones of all, the second ones and so on.
INLINE void transpose_fours(__m512i (&v)[4]) {
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(a, c), v[1] = _mm512_unpackhi_epi64(a, c);
    v[2] = _mm512_unpacklo_epi64(b, d), v[3] = _mm512_unpackhi_epi64(b, d);
}

// The same of each 128 bits.
INLINE void transpose_sixteens(__m512i (&v)[4]) {
    const auto even = [](__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0x88); };
    const auto odd = [](__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0xdd); };
    const __m512i a = even(v[0], v[1]), b = even(v[2], v[3]), c = odd(v[0], v[1]), d = odd(v[2], v[3]);
    v[0] = even(a, b), v[1] = even(c, d), v[2] = odd(a, b), v[3] = odd(c, d);
}

// The lanes of a register that has 16 inputs of each of `count` pairs of groups.
INLINE __mmask16 lanes_of(int count) { return __mmask16((1 << 4 * count) - 1); }

// A block's values, of which so many groups are there.
INLINE void put(const int16_t* values, int groups, Laid laid, uint8_t* to) {
    const int count = (groups + 1) / 2;
    const bool nibbles = laid == Laid::nibbles;
    using words = int16_t __attribute__((vector_size(2 * GROUP)));
    using half = int8_t __attribute__((vector_size(GROUP)));
    __m512i high[4], low[4];
    for (int pair = 0; pair < 4; pair++) {
        const auto narrow = [&](int added, int shift) {
            const auto part = [&](int i) {
                const words moved = (load<words>(values + pair * PAIR + i) + int16_t(added)) >> int16_t(shift);
                return (__m256i)__builtin_convertvector(moved, half);
            };
            return joined(part(0), part(GROUP));
        };
        high[pair] = narrow(128, 8), low[pair] = narrow(0, 0);
    }
    if (nibbles) transpose_sixteens(high), transpose_sixteens(low);
    else if (count == 4) transpose_fours(high), transpose_fours(low);
    const int kept = nibbles ? count * PAIR / 4 : PAIR;  // of a register
    for (int i = 0; i < (nibbles ? 4 : count); i++, to += 2 * kept) {
#if !defined(__AVX512VNNI__)
        const auto odd_of = [](__m512i bytes) { return _mm512_srai_epi16(bytes, 8); };
        const __m512i even_high = _mm512_slli_epi16(high[i], 8), odd_high = _mm512_slli_epi16(odd_of(high[i]), 8);
        high[i] = _mm512_add_epi16(even_high, odd_of(_mm512_slli_epi16(low[i], 8)));
        low[i] = _mm512_add_epi16(odd_high, odd_of(low[i]));
#endif
        const __mmask16 lanes = lanes_of(kept / 16);
        _mm512_mask_storeu_epi32(to, lanes, high[i]), _mm512_mask_storeu_epi32(to + kept, lanes, low[i]);
    }
}

#else

INLINE void put(const int16_t* values, int groups, Laid laid, uint8_t* to) {
    if (laid == Laid::words) {
        __builtin_memcpy(to, values, (groups + 1) / 2 * 2 * PAIR);
        return;
    }
    using words = int16_t __attribute__((vector_size(GROUP)));
    using some = int8_t __attribute__((vector_size(GROUP / 2)));
    const bool nibbles = laid == Laid::nibbles && groups == GROUPS;
    for (int i = 0; i < 2 * groups; i++) {  // 16 of group i / 2
        const words own = load<words>(values + i * 16);
        uint8_t* at = nibbles ? to + i % 8 * 2 * GROUP + i / 8 * 16 : to + i / 2 * 2 * GROUP + i % 2 * 16;
        store(at, __builtin_convertvector((own + int16_t(128)) >> int16_t(8), some));
        store(at + GROUP, __builtin_convertvector(own, some));
    }
}

#endif

// One row, as it is multiplied with a matrix of `kind`. read(i): elements i to i + W, fp32.
template <class F>
void take(const Rows& rows, int64_t row, Kind kind, F&& read) {
    const bool of_16 = form(kind).group == 16;
    const Lanes* lanes = nullptr;
    with_kind(kind, [&]<Kind KIND>() { lanes = &LANES_OF<KIND>; });
    for (int b = 0; b < rows.blocks(); b++) {
        const int rest = rows.inputs - b * BLOCK, groups = (rest < BLOCK ? rest : BLOCK) / GROUP;
        alignas(64) int16_t values[BLOCK] = {};
        float units[GROUPS] = {}, sums[LANES] = {};
        int halves[LANES] = {};
        for (int g = 0; g < groups; g++) {
            const auto of_group = [&](int i) { return read(b * BLOCK + g * GROUP + i); };
            units[g] = take_group(of_group, values + g * GROUP, halves + 2 * g);
            if (of_16) sums[2 * g] = float(halves[2 * g]) * units[g], sums[2 * g + 1] = float(halves[2 * g + 1]) * units[g];
            else sums[g] = float(halves[2 * g] + halves[2 * g + 1]) * units[g];
        }
        put(values, groups, lanes->laid, rows.values(row) + b * 2 * BLOCK);
        for (int lane = 0, at = b * LANES; lane < LANES; lane++, at++) {
            const int part = int(lanes->part[lane]), half = int(lanes->sixteen[lane]);
            rows.units(row)[at] = units[of_16 ? part / 2 : part], rows.sums(row)[at] = sums[lane];
            const int sum = lanes->of_part ? halves[2 * part] + halves[2 * part + 1] : halves[half];
            rows.starts(row)[at] = -lanes->offset * sum;
        }
    }
}

}  // namespace fixed
}  // namespace stored
