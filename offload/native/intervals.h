// The rule by which numbers of bf16 split into codes in 4 bits and what they have beside these: both together give them
// back, bit for bit.
//
// A code says in which interval its number lies. Of the numbers in it, `least` and `most` bound the magnitudes, taken
// as integers. Where these are fewer than 256, the low byte of a number tells which of them it is, and its sign is that
// of the interval. The other intervals are near zero, or of a group whose range is so small that it has no step. Their
// numbers have 4 bits more, the lowest three of which say how far, in steps of 256, the magnitude is below the largest
// one with that low byte and no larger than `most`: 0 to 5 steps, or that it is the low byte alone, or that the upper
// byte is an escape. The fourth is the sign.
//
// So a group of numbers has low bytes; 4 bits each for those near zero, in their order, the first in the lower half of a
// byte, a group's from a byte's beginning; escapes, a byte each, in their order.
#pragma once
#include <stdint.h>

#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace intervals {

constexpr int MARGIN = 2;  // of the bounds, more than fp32 rounds by
constexpr int STEPS = 6, ALONE = 6, ESCAPE = 7, SIGN = 8;

// Of N numbers. Their magnitudes and what bounds these have 16 bits, too: bf16 as integers.
template <int N>
using u8s = uint8_t __attribute__((vector_size(N)));
template <int N>
using u16s = uint16_t __attribute__((vector_size(2 * N)));
template <int N>
using i16s = int16_t __attribute__((vector_size(2 * N)));
template <int N>
using u32s = uint32_t __attribute__((vector_size(4 * N)));
template <int N>
using i32s = int32_t __attribute__((vector_size(4 * N)));
template <int N>
using f32s = float __attribute__((vector_size(4 * N)));
template <int N>
using u64s = uint64_t __attribute__((vector_size(N)));

// each.operator()<N>(i) for the N numbers from i on, of `count`, a multiple of 8. N is up to MOST, 16 or 32. Inlined:
// else what `each` refers to would be in memory.
template <int MOST = 16, class F>
INLINE void by_lanes(int count, F&& each) {
    int i = 0;
    if constexpr (MOST == 32)
        for (; i + 32 <= count; i += 32) [[clang::always_inline]] each.template operator()<32>(i);
    for (; i + 16 <= count; i += 16) [[clang::always_inline]] each.template operator()<16>(i);
    if (i < count) [[clang::always_inline]] each.template operator()<8>(i);
}

// f(i), f(i + 1), ...
template <class V, class F>
INLINE V lanes(F&& f, int i) {
    V v;
#pragma unroll
    for (int lane = 0; lane < int(sizeof v / sizeof v[0]); lane++) v[lane] = f(i + lane);
    return v;
}

// A bit for each lane that is not 0, the lowest for the first.
template <int N, class V>
INLINE uint32_t bits(V mask) {
    using bools = bool __attribute__((ext_vector_type(N)));
    const auto some = __builtin_convertvector(mask, bools);
    if constexpr (N == 16) return __builtin_bit_cast(uint16_t, some);
    else return __builtin_bit_cast(uint8_t, some);
}

// The upper halves of fp32: one shuffle of two vectors.
template <int... lane>
struct Lanes {
    INLINE static auto upper(f32s<sizeof...(lane)> x) {
        const auto halves = (u16s<2 * sizeof...(lane)>)x;
        return __builtin_shufflevector(halves, halves, (2 * lane + 1)...);
    }
};

template <class T, T... lane>
using LanesOf = Lanes<lane...>;

template <int N>
INLINE u16s<N> upper(f32s<N> x) {
    return __make_integer_seq<LanesOf, int, N>::upper(x);
}

template <int N>
INLINE u16s<N> chosen(i16s<N> mask, u16s<N> yes, u16s<N> no) {
    return mask ? yes : no;
}

// Of a run of numbers, a multiple of 8, in one group. One that is not near zero is among the 256 from `first` on; for
// one near zero those are the highest.
template <int ROOM>
struct Intervals {
    alignas(64) uint16_t first[ROOM];
    alignas(64) uint16_t middle[ROOM];  // in bf16, without a sign where zero is near
    alignas(64) uint8_t is_near[ROOM];  // 0 or 1

    // step(i), low(i), code(i): of number i.
    template <class Step, class Low, class Code>
    INLINE Intervals(int count, Step&& step, Low&& low, Code&& code) {
        by_lanes<W == 16 ? 32 : 16>(count, [&]<int N>(int i) {
            const f32s<N> steps = lanes<f32s<N>>(step, i), half = 0.5f * steps;
            const auto codes = __builtin_convertvector(lanes<u8s<N>>(code, i), i32s<N>);
            const f32s<N> product = steps * __builtin_convertvector(codes, f32s<N>);  // exact
            const f32s<N> number = product + lanes<f32s<N>>(low, i);
            const f32s<N> size = (f32s<N>)((u32s<N>)number & 0x7fffffffu);
            const u16s<N> outer = upper<N>(size + half), inner = upper<N>(half - size) ^ 0x8000;  // -0 for 0
            const i16s<N> wide = __builtin_elementwise_sub_sat((i16s<N>)outer, (i16s<N>)inner) >= 256 - 2 * MARGIN;
            const i16s<N> near = wide | __builtin_convertvector(steps == 0, i16s<N>);
            store(first + i, chosen<N>(near, outer + MARGIN - 255, inner - MARGIN));
            store(middle + i, upper<N>(number) & ~((u16s<N>)near & 0x8000));
            store(is_near + i, __builtin_convertvector((u16s<N>)near & 1, u8s<N>));
        });
    }
};

// put(of(i), i), two at a time: the CPU then has both in work at once.
template <class Of, class Put>
INLINE void by_two(int count, Of&& of, Put&& put) {
    for (int i = 0; i < count; i += 2) {
        const auto one = of(i), other = of(i + 1);
        put(one, i), put(other, i + 1);
    }
}

// What the groups before a place have of both, and then those of one: in bytes.
struct Head {
    int32_t fours, escapes;
};

// Where the next 4 bits and the next escape of a group are. At `end` all groups' 4 bits end: nothing is read behind it.
struct Place {
    uint8_t* fours;
    uint8_t* escapes;
    const uint8_t* end;
    uint32_t at = 0;  // 4 bits from `fours` on
};

// 16 times 4 bits, from number `at` on: reads 9 bytes.
INLINE uint64_t sixteen(const uint8_t* fours, uint32_t at) {
    const uint8_t* from = fours + at / 2;
    const uint32_t odd = at % 2 * 4;
    return load<uint64_t>(from) >> odd | load<uint64_t>(from + 1) << (8 - odd);  // what both have is the same
}

// table[index] for each lane, 0 for an index from 128 on.
INLINE u8s<16> looked_up(u8s<16> table, u8s<16> index) {
#if defined(__AVX2__)
    return (u8s<16>)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#elif defined(__ARM_NEON)
    return (u8s<16>)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
    return lanes<u8s<16>>([&](int i) { return index[i] < 16 ? table[index[i]] : 0; }, 0);
#endif
}

// Of each lane how many up to it are near: `near` has 0 or 1.
INLINE u8s<16> ranks(u8s<16> near) {
    const auto halves = (u8s<16>)((u64s<16>)near * 0x0101010101010101u);
    return halves + __builtin_shufflevector(halves, u8s<16>{}, 16, 16, 16, 16, 16, 16, 16, 16, 7, 7, 7, 7, 7, 7, 7, 7);
}

// Those that are near take 4 bits each in their order, the others 0.
INLINE u8s<16> spread(uint64_t fours, u8s<16> near, u8s<16> rank) {
    const auto two = __builtin_bit_cast(u8s<8>, fours);
    const auto one = __builtin_shufflevector(two & 15, two >> 4, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return looked_up(one, (rank - 1) | (near - 1));
}

template <int N>
INLINE u16s<N> widened(u8s<16> x) {
    if constexpr (N == 16) return __builtin_convertvector(x, u16s<16>);
    else return __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), u16s<8>);
}

template <int N>
INLINE u8s<16> filled(u8s<N> x) {
    if constexpr (N == 16) return x;
    else return __builtin_shufflevector(x, u8s<8>{}, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// The one of the 256 from `first` on that has this low byte.
template <class V>
INLINE V among(V first, V low) {
    return first + ((low - first) & 255);
}

// The 4 bits of numbers near zero. The steps of one above the 256 wrap: they are 128 or more. Numbers that come back
// without have none.
template <int N>
INLINE u16s<N> fours_of(u16s<N> number, u16s<N> first) {
    const u16s<N> magnitude = number & 0x7fff, steps = (among(first, magnitude) - magnitude) >> 8;
    const u16s<N> other = chosen<N>(magnitude < 256, u16s<N>{} + ALONE, u16s<N>{} + ESCAPE);
    return chosen<N>(steps < STEPS, steps, other) | (number >> 12 & SIGN);
}

// Adds the numbers near zero and the escapes among `numbers`. False where one would not come back.
template <int ROOM>
INLINE bool count(const uint16_t* numbers, int how_many, const Intervals<ROOM>& all, Head& found) {
    uint32_t lost = 0;
    by_lanes(how_many, [&]<int N>(int i) {
        const auto number = load<u16s<N>>(numbers + i), first = load<u16s<N>>(all.first + i);
        const u16s<N> magnitude = number & 0x7fff, middle = load<u16s<N>>(all.middle + i);
        const auto within = (among(first, magnitude) == magnitude) & (((number ^ middle) & 0x8000) == 0);
        const auto finite = (middle & 0x7fff) < 0x7f80;  // on other machines NaN may have other bits
        const uint32_t is_near = bits<N>(load<u8s<N>>(all.is_near + i));
        lost |= ((is_near | bits<N>(within)) & bits<N>(finite)) ^ ((1u << N) - 1);
        found.fours += __builtin_popcount(is_near);
        found.escapes += __builtin_popcount(bits<N>((fours_of<N>(number, first) & 7) == ESCAPE));
    });
    return !lost;
}

template <int ROOM>
INLINE void split(const uint16_t* numbers, int how_many, const Intervals<ROOM>& all, uint8_t* low, Place& place) {
    uint8_t* to = place.fours + place.at / 2;
    uint8_t near[ROOM + 2];  // 4 bits a byte, and first those that their byte has already
    uint32_t found = place.at % 2;
    near[0] = found ? *to : 0;
    place.at -= found;
    by_lanes(how_many, [&]<int N>(int i) {
        const auto number = load<u16s<N>>(numbers + i), four = fours_of<N>(number, load<u16s<N>>(all.first + i));
        store(low + i, __builtin_convertvector(number, u8s<N>));
        uint8_t fours[N];
        store(fours, __builtin_convertvector(four, u8s<N>));
        for (int lane = 0; lane < N; lane++) near[found] = fours[lane], found += all.is_near[i + lane];
        for (uint32_t escapes = bits<N>((four & 7) == ESCAPE); escapes; escapes &= escapes - 1)
            *place.escapes++ = uint8_t(numbers[i + __builtin_ctz(escapes)] >> 8);
    });
    near[found] = 0;
    for (uint32_t i = 0; i < found; i += 2) *to++ = uint8_t(near[i] | near[i + 1] << 4);
    place.at += found;
}

template <int ROOM>
INLINE void restore(const uint8_t* low, int how_many, const Intervals<ROOM>& all, Place& place, uint16_t* numbers) {
    uint8_t last[ROOM / 2 + 9];  // what follows the last 4 bits is read, and used for nothing
    const uint8_t* fours = place.fours + place.at / 2;
    if (place.end - fours < how_many / 2 + 9) {
        __builtin_memcpy(last, fours, place.end - fours);
        fours = last;
    }
    uint32_t at = place.at % 2;
    place.at -= at;
    by_lanes(how_many, [&]<int N>(int i) {
        const auto own = __builtin_convertvector(load<u8s<N>>(low + i), u16s<N>);
        const auto near = filled<N>(load<u8s<N>>(all.is_near + i)), rank = ranks(near);
        const u16s<N> four = widened<N>(spread(sixteen(fours, at), near, rank)), kind = four & 7;
        const u16s<N> counted = among(load<u16s<N>>(all.first + i), own) - (kind << 8);
        const u16s<N> sign = (load<u16s<N>>(all.middle + i) | four << 12) & 0x8000;
        store(numbers + i, chosen<N>(kind == ALONE, own, counted) | sign);
        at += rank[15];
        for (uint32_t escapes = bits<N>(kind == ESCAPE); escapes; escapes &= escapes - 1) {
            const int lane = i + __builtin_ctz(escapes);  // there are few
            numbers[lane] = uint16_t(*place.escapes++ << 8 | low[lane]);
        }
    });
    place.at += at;
}

}  // namespace intervals
