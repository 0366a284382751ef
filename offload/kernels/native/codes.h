// Weights in 4 bits, products of rows with them, and their making.
//
// The inputs form groups of 64. A group of a weight's row is low + step * code: a code has 4 bits, step and low are
// bf16. Outputs form tiles of 16, so that a vector's lanes are outputs and nothing is added across them. A matrix is
// read from front to end: [tiles, groups] of blocks. A block has step and low of each output, then the codes as
// [8, 16 outputs, 4 inputs]: the low halves of the bytes hold inputs 0 to 32 of the group, the high halves the others.
//
// Rows are taken to 8 bits by the same groups: x = scale * q, scale is the group's largest magnitude / 127. A group's
// part of a product is then step * (scale * sum(code * q)) + low * (scale * sum(q)), where the sums are exact integers.
// A row that is not finite gives NaN, and groups below 2^-100 count as zeros.
#pragma once
#include "threads.h"
#include "vectors.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace codes {

constexpr int GROUP = 64;
constexpr int TILE = 16;            // outputs
constexpr int VECTORS = GROUP / W;  // of fp32 in a group
constexpr int SCALES = TILE * 4;    // bytes of step and low in a block
constexpr int BLOCK = SCALES + TILE * GROUP / 2;
constexpr int AHEAD = 3072;         // bytes that are asked for before they are read
constexpr float TINY = 0x1p-100f;

using u8 = uint8_t __attribute__((vector_size(4 * W)));
using bytes = uint8_t __attribute__((vector_size(W)));

// Rows in 8 bits, one after the other: [inputs] numbers, then scale and scale * sum(q) of each group.
struct Rows {
    char* at;
    int inputs;

    int groups() const { return inputs / GROUP; }
    int64_t size() const { return inputs + int64_t(groups()) * 8; }
    Rows from(int64_t row) const { return {at + row * size(), inputs}; }
    int8_t* numbers(int64_t row) const { return reinterpret_cast<int8_t*>(at + row * size()); }
    float* scales(int64_t row) const { return reinterpret_cast<float*>(at + row * size() + inputs); }
    float* sums(int64_t row) const { return scales(row) + groups(); }
};

// One row. read(i): elements i to i + W, fp32.
template <class F>
void take(const Rows& rows, int64_t row, F&& read) {
    float *scales = rows.scales(row), *sums = rows.sums(row);
    for (int g = 0; g < rows.groups(); g++) {
        f32 x[VECTORS];
        u32 most = {};  // magnitudes as integers: NaN is above all
        for (int i = 0; i < VECTORS; i++) {
            x[i] = read(g * GROUP + i * W);
            const u32 magnitude = (u32)x[i] & 0x7fffffffu;
            most = magnitude > most ? magnitude : most;
        }
        const float top = __builtin_bit_cast(float, __builtin_reduce_max(most));
        const float inverse = top > TINY ? 127.0f / top : 0.0f;
        i32 total = {};
        for (int i = 0; i < VECTORS; i++) {
            f32 scaled = x[i] * inverse;
            scaled = scaled == scaled ? scaled : f32{};
            const i32 number = __builtin_convertvector(__builtin_elementwise_roundeven(scaled), i32);
            total += number;
            store(rows.numbers(row) + g * GROUP + i * W, __builtin_convertvector(number, bytes));
        }
        scales[g] = top / 127.0f;
        sums[g] = scales[g] * float(__builtin_reduce_add(total));
    }
}

// Four inputs of a row, for each lane.
INLINE i32 four(const void* numbers) {
    int32_t all_four;
    __builtin_memcpy(&all_four, numbers, 4);
    return all_four - i32{};
}

// The sum of code * q over up to 32 inputs, exact. add: four inputs of W outputs.
#if defined(__AVX512VNNI__)

struct Sum {
    i32 total = {};

    INLINE void add(u8 codes, const int8_t* q) {
        total = (i32)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)four(q));
    }
    // The same with codes that have a sign, and numbers that have none.
    INLINE void add_signed(u8 codes, const uint8_t* w) {
        total = (i32)_mm512_dpbusd_epi32((__m512i)total, (__m512i)four(w), (__m512i)codes);
    }
    INLINE i32 value() const { return total; }
};

#elif defined(__AVX2__)

#if defined(__AVX512F__)
using integers = __m512i;
INLINE integers pairs(integers codes, integers numbers) { return _mm512_maddubs_epi16(codes, numbers); }
INLINE integers fours(integers sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
INLINE integers plus(integers a, integers b) { return _mm512_add_epi16(a, b); }
#else
using integers = __m256i;
INLINE integers pairs(integers codes, integers numbers) { return _mm256_maddubs_epi16(codes, numbers); }
INLINE integers fours(integers sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
INLINE integers plus(integers a, integers b) { return _mm256_add_epi16(a, b); }
#endif

// Sums of pairs are of 16 bits, and do not saturate: 8 * 2 * 15 * 127 is 30,480, and 8 * 2 * 8 * 255 is 32,640.
struct Sum {
    integers sums{};

    INLINE void add(u8 codes, const int8_t* q) { sums = plus(sums, pairs((integers)codes, (integers)four(q))); }
    INLINE void add_signed(u8 codes, const uint8_t* w) { sums = plus(sums, pairs((integers)four(w), (integers)codes)); }
    INLINE i32 value() const { return (i32)fours(sums); }
};

#else

struct Sum {
    i32 total = {};

    INLINE void add(u8 codes, const int8_t* q) {
        const u32 lanes = (u32)codes;
        for (int i = 0; i < 4; i++) total += (i32)(lanes >> 8 * i & 255) * int(q[i]);
    }
    INLINE void add_signed(u8 codes, const uint8_t* w) {
        const u32 lanes = (u32)codes;
        for (int i = 0; i < 4; i++) total += ((i32)(lanes << (24 - 8 * i)) >> 24) * int(w[i]);
    }
    INLINE i32 value() const { return total; }
};

#endif

// results[r][o] of ROWS rows and W outputs of a tile, in whose first block their scales are at `at`.
template <int ROWS>
INLINE void dots(const uint8_t* at, const Rows& rows, int row, float (*results)[TILE]) {
    f32 acc[ROWS] = {};
    for (int g = 0; g < rows.groups(); g++, at += BLOCK) {
        const uint8_t* codes = at + SCALES;
        Sum first[ROWS], second[ROWS];  // halves of the group
#pragma unroll
        for (int i = 0; i < GROUP / 2; i += 4) {
            const u8 both = load<u8>(codes + i * TILE), one = both & 15, other = both >> 4;
            __builtin_prefetch(codes + AHEAD + i * TILE);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int8_t* q = rows.numbers(row + r) + g * GROUP + i;
                first[r].add(one, q), second[r].add(other, q + GROUP / 2);
            }
        }
        const u32 units = load<u32>(at);
        const f32 step = Bf16::widen<0>(units), low = Bf16::widen<1>(units);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const f32 sums = __builtin_convertvector(first[r].value() + second[r].value(), f32);
            acc[r] = fma(step, sums * rows.scales(row + r)[g], acc[r]);
            acc[r] = fma(low, all(rows.sums(row + r)[g]), acc[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) store(results[r], acc[r]);
}

// results[r][0..16) of rows 0 to `number`, for the tile that begins with output `first`.
inline void tile(const void* matrix, const Rows& rows, int number, int64_t first, float (*results)[TILE]) {
    auto at = static_cast<const uint8_t*>(matrix) + first / TILE * rows.groups() * BLOCK;
    by_rows(number, [&]<int ROWS>(int r) {
        for (int o = 0; o < TILE; o += W)
            dots<ROWS>(at + o * 4, rows, r, reinterpret_cast<float(*)[TILE]>(&results[r][o]));
    });
}

// fp32 to bf16, none above x; not below the least finite one.
inline float below(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x + 0.0f);  // no negative zero
    const float down = __builtin_bit_cast(float, (bits + (x < 0 ? 0xffffu : 0)) & 0xffff0000u);
    return down < -0x1.fep127f ? -0x1.fep127f : down;
}

// The same for x >= 0, none below it.
inline float above(float x) {
    return __builtin_bit_cast(float, (__builtin_bit_cast(uint32_t, x) + 0xffffu) & 0xffff0000u);
}

// Numbers in a row that share a step and a least value: low + step * code.
struct Scale {
    float step, low;

    void put(uint8_t* at) const {
        const uint16_t both[] = {Bf16::round_one(step), Bf16::round_one(low)};
        __builtin_memcpy(at, both, 4);
    }
};

// COUNT numbers -> their scale and their codes, a byte each. Halves, since the range of the largest numbers is above
// them.
template <int COUNT>
INLINE Scale quantise(const f32 (&x)[COUNT / W], uint8_t* to) {
    constexpr float most = 15;
    f32 least = all(__builtin_huge_valf()), largest = all(-__builtin_huge_valf());
    for (int i = 0; i < COUNT / W; i++) {
        least = x[i] < least ? x[i] : least;
        largest = x[i] > largest ? x[i] : largest;
    }
    const float low = below(__builtin_reduce_min(least));
    float step = above((__builtin_reduce_max(largest) * 0.5f - low * 0.5f) / (most * 0.5f));
    if (step < TINY) step = 0;
    const float inverse = step > 0 ? 2.0f / step : 0;
    for (int i = 0; i < COUNT / W; i++) {
        f32 code = (x[i] * 0.5f - low * 0.5f) * inverse;
        code = code > 0.0f ? code : f32{};
        code = code < most ? code : all(most);
        const i32 whole = __builtin_convertvector(__builtin_elementwise_roundeven(code), i32);
        store(to + i * W, __builtin_convertvector(whole, bytes));
    }
    return {step, low};
}

// A group of one output, whose scales are at `at` in their block.
template <class E>
INLINE void encode_group(const typename E::element* weight, uint8_t* at) {
    f32 x[VECTORS];
    for (int i = 0; i < VECTORS; i++) x[i] = E::read(weight + i * W);
    alignas(64) uint8_t all_codes[GROUP];
    quantise<GROUP>(x, all_codes).put(at);
    for (int i = 0; i < GROUP / 2; i++) all_codes[i] |= all_codes[GROUP / 2 + i] << 4;
    for (int i = 0; i < GROUP / 2; i += 4) __builtin_memcpy(at + SCALES + i * TILE, all_codes + i, 4);
}

// weight [outputs, inputs] -> blocks, zeros past the outputs.
template <class E>
void encode(const typename E::element* weight, int64_t outputs, int64_t inputs, uint8_t* matrix, int64_t how_many) {
    const int64_t groups = inputs / GROUP;
    threads::Counter counter;
    auto body = [&] {
        for (int64_t first; (first = counter.draw() * TILE) < outputs;) {
            uint8_t* at = matrix + first / TILE * groups * BLOCK;
            const int count = int(outputs - first < TILE ? outputs - first : TILE);
            if (count < TILE) __builtin_memset(at, 0, groups * BLOCK);
            for (int o = 0; o < count; o++)
                for (int64_t g = 0; g < groups; g++)
                    encode_group<E>(weight + (first + o) * inputs + g * GROUP, at + g * BLOCK + o * 4);
        }
    };
    threads::run(how_many, body);
}

}  // namespace codes
