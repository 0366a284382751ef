// Weights in 4 or 6 bits, products of rows with them, and their making.
//
// The inputs form groups of 64. A group of a weight's row is low + step * code: a code has 4 or 6 bits, step and low are
// bf16. Outputs form tiles of 16, so that a vector's lanes are outputs and nothing is added across them. A matrix is
// read from front to end: [tiles, groups] of blocks. A block has step and low of each output, then the upper 4 bits of
// the codes as [8, 16 outputs, 4 inputs]: the low halves of the bytes hold inputs 0 to 32 of the group, the high halves
// the others. The lower 2 of 6 bits follow as [8, 16 outputs] integers of 16 bits, of the same inputs in the same order.
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
constexpr int TWOS = SCALES + TILE * GROUP / 2;  // where the lower 2 of 6 bits begin in it
constexpr int AHEAD = 3072;         // bytes that are asked for before they are read
constexpr float TINY = 0x1p-100f;

// Bytes of a block.
constexpr int64_t block(int64_t bits) { return SCALES + TILE * GROUP * bits / 8; }

using u8 = uint8_t __attribute__((vector_size(4 * W)));
using u16 = uint16_t __attribute__((vector_size(2 * W)));
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

// The sum of code * q over a group, exact. add: four inputs of its first half, and the four that are 32 further.
template <int BITS>
struct Total {
    Sum first, second;

    INLINE void add(u8 one, u8 other, const int8_t* q) { first.add(one, q), second.add(other, q + GROUP / 2); }
    INLINE i32 value() const { return first.value() + second.value(); }
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// Two sums of pairs are all that 16 bits hold: 2 * 2 * 63 * 127 is 32,004.
template <>
struct Total<6> {
    i32 total = {};

    INLINE void add(u8 one, u8 other, const int8_t* q) {
        const integers low = pairs((integers)one, (integers)four(q));
        total += (i32)fours(plus(low, pairs((integers)other, (integers)four(q + GROUP / 2))));
    }
    INLINE i32 value() const { return total; }
};
#endif

// The four of 4 bits in each integer of 16 -> one a byte.
INLINE u8 spread(u16 numbers) {
    u32 lanes = __builtin_convertvector(numbers, u32);
    lanes = (lanes | lanes << 8) & 0x00ff00ffu;
    return (u8)((lanes | lanes << 4) & 0x0f0f0f0fu);
}

// results[r][o] of ROWS rows, for W outputs of a tile, from `first_output` on, whose first block is at `at`.
template <int BITS, int ROWS>
INLINE void dots(const uint8_t* at, int first_output, const Rows& rows, int row, float (*results)[TILE]) {
    f32 acc[ROWS] = {};
    for (int g = 0; g < rows.groups(); g++, at += block(BITS)) {
        const uint8_t *codes = at + SCALES + first_output * 4, *twos = at + TWOS + first_output * 2;
        Total<BITS> totals[ROWS];
#pragma unroll
        for (int i = 0; i < GROUP / 2; i += 4) {
            const u8 both = load<u8>(codes + i * TILE);
            u8 one = both & 15, other = both >> 4;
            if constexpr (BITS == 6) {
                const u8 lower = spread(load<u16>(twos + i / 2 * TILE));
                one = one << 2 | (lower & 3), other = other << 2 | lower >> 2;
            }
            __builtin_prefetch(codes + AHEAD + i * TILE);
#pragma unroll
            for (int r = 0; r < ROWS; r++) totals[r].add(one, other, rows.numbers(row + r) + g * GROUP + i);
        }
        const u32 units = load<u32>(at + first_output * 4);
        const f32 step = Bf16::widen<0>(units), low = Bf16::widen<1>(units);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const f32 sums = __builtin_convertvector(totals[r].value(), f32);
            acc[r] = fma(step, sums * rows.scales(row + r)[g], acc[r]);
            acc[r] = fma(low, all(rows.sums(row + r)[g]), acc[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) store(results[r], acc[r]);
}

// results[r][0..16) of rows 0 to `number`, for the tile that begins with output `first` of a matrix in BITS bits.
template <int BITS>
void tile(const void* matrix, const Rows& rows, int number, int64_t first, float (*results)[TILE]) {
    auto at = static_cast<const uint8_t*>(matrix) + first / TILE * rows.groups() * block(BITS);
    by_rows(number, [&]<int ROWS>(int r) {
        for (int o = 0; o < TILE; o += W)
            dots<BITS, ROWS>(at, o, rows, r, reinterpret_cast<float(*)[TILE]>(&results[r][o]));
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

// COUNT numbers -> their scale and their codes, the largest of which is `most`, a byte each. Halves, since the range of
// the largest numbers is above them.
template <int COUNT>
INLINE Scale quantise(const f32 (&x)[COUNT / W], uint8_t* to, float most = 15) {
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

// Where the codes of one output are in a block.
struct Output {
    uint8_t* block;
    int number;

    uint8_t* scale() const { return block + number * 4; }
    uint8_t* fours(int i) const { return block + SCALES + i * TILE + number * 4; }  // of inputs i to i + 4, and 32 further
    uint8_t* twos(int i) const { return block + TWOS + i / 2 * TILE + number * 2; }

    void put(const uint8_t* numbers, int64_t bits) const {
        for (int i = 0; i < GROUP / 2; i += 4) {
            uint32_t upper = 0, lower = 0;
            for (int n = 0; n < 4; n++) {
                const uint32_t one = numbers[i + n], other = numbers[GROUP / 2 + i + n];
                upper |= (one >> (bits - 4) | other >> (bits - 4) << 4) << 8 * n;
                lower |= ((one & 3) | (other & 3) << 2) << 4 * n;
            }
            __builtin_memcpy(fours(i), &upper, 4);
            if (bits == 6) __builtin_memcpy(twos(i), &lower, 2);
        }
    }

    void get(uint8_t* numbers, int64_t bits) const {
        constexpr int half = GROUP / 2;
        uint8_t upper[half], lower[half];
        for (int i = 0; i < half; i += 4) __builtin_memcpy(upper + i, fours(i), 4);
        if (bits == 4) {
            for (int i = 0; i < half; i++) numbers[i] = upper[i] & 15, numbers[half + i] = upper[i] >> 4;
            return;
        }
        for (int i = 0; i < half; i += 4) {
            uint32_t four = 0;  // 4 bits each, then a byte each
            __builtin_memcpy(&four, twos(i), 2);
            four = (four | four << 8) & 0x00ff00ffu, four = (four | four << 4) & 0x0f0f0f0fu;
            __builtin_memcpy(lower + i, &four, 4);
        }
        for (int i = 0; i < half; i++) {
            numbers[i] = uint8_t((upper[i] & 15) << 2 | (lower[i] & 3));
            numbers[half + i] = uint8_t(upper[i] >> 4 << 2 | lower[i] >> 2);
        }
    }
};

// A group of one output.
template <class E>
INLINE void encode_group(const typename E::element* weight, const Output& to, int64_t bits) {
    f32 x[VECTORS];
    for (int i = 0; i < VECTORS; i++) x[i] = E::read(weight + i * W);
    alignas(64) uint8_t numbers[GROUP];
    quantise<GROUP>(x, numbers, float((1 << bits) - 1)).put(to.scale());
    to.put(numbers, bits);
}

// weight [outputs, inputs] -> blocks, zeros past the outputs.
template <class E>
void encode(const typename E::element* weight, int64_t outputs, int64_t inputs, int64_t bits, uint8_t* matrix,
            int64_t how_many) {
    const int64_t groups = inputs / GROUP, size = block(bits);
    threads::each(how_many, (outputs + TILE - 1) / TILE, [&](int64_t tile) {
        const int64_t first = tile * TILE;
        uint8_t* at = matrix + tile * groups * size;
        const int count = int(outputs - first < TILE ? outputs - first : TILE);
        if (count < TILE) __builtin_memset(at, 0, groups * size);
        for (int o = 0; o < count; o++)
            for (int64_t g = 0; g < groups; g++)
                encode_group<E>(weight + (first + o) * inputs + g * GROUP, {at + g * size, o}, bits);
    });
}

}  // namespace codes
