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

namespace intervals {

constexpr int MARGIN = 2;  // of the bounds, more than fp32 rounds by
constexpr int STEPS = 6, ALONE = 6, ESCAPE = 7, SIGN = 8;

// Of a run of numbers, a multiple of 8, in one group.
template <int ROOM>
struct Intervals {
    int32_t least[ROOM], most[ROOM];
    uint16_t sign[ROOM];
    uint8_t is_near[ROOM];
    bool finite;  // on other machines NaN may have other bits

    // step(i), low(i), code(i): of number i.
    template <class Step, class Low, class Code>
    INLINE Intervals(int count, Step&& step, Low&& low, Code&& code) {
        uint32_t infinite = 0;
        for (int i = 0; i < count; i++) {
            const float middle = step(i) * float(code(i)) + low(i), half = 0.5f * step(i);  // the product is exact
            const uint32_t bits = __builtin_bit_cast(uint32_t, middle), magnitude = bits & 0x7fffffffu;
            const float size = __builtin_bit_cast(float, magnitude), inner = size - half;
            least[i] = (__builtin_bit_cast(int32_t, inner) >> 16) - MARGIN;
            most[i] = (__builtin_bit_cast(int32_t, size + half) >> 16) + MARGIN;
            is_near[i] = !(inner > 0) | (most[i] - least[i] >= 256) | (step(i) == 0);
            sign[i] = bits >> 16 & 0x8000;
            infinite |= magnitude >= 0x7f800000u;
        }
        finite = !infinite;
    }
};

// What the groups before a place have of both, and then those of one: in bytes.
struct Head {
    int32_t fours, escapes;
};

// Where the next 4 bits and the next escape of a group are.
struct Place {
    uint8_t* fours;
    uint8_t* escapes;
    int at = 0;  // 4 bits from `fours` on
};

// each(i) of the numbers near zero, in their order.
template <int ROOM, class F>
INLINE void near_zero(int count, const Intervals<ROOM>& all, F&& each) {
    for (int i = 0; i < count; i += 8) {
        uint64_t eight;
        __builtin_memcpy(&eight, all.is_near + i, 8);
        for (; eight; eight &= eight - 1) each(i + __builtin_ctzll(eight) / 8);
    }
}

INLINE int highest(int most, int low) { return most - ((most - low) & 255); }

// The 4 bits of a number near zero.
INLINE int four_of(uint16_t number, int most) {
    const int magnitude = number & 0x7fff, steps = (highest(most, magnitude & 255) - magnitude) / 256;
    const bool counted = magnitude <= most && steps < STEPS;
    return (counted ? steps : magnitude < 256 ? ALONE : ESCAPE) | (number & 0x8000 ? SIGN : 0);
}

// Adds the numbers near zero and the escapes among `numbers`. False where one would not come back.
template <int ROOM>
INLINE bool count(const uint16_t* numbers, int how_many, const Intervals<ROOM>& all, Head& found) {
    uint32_t lost = !all.finite;
    for (int i = 0; i < how_many; i++) {
        const int magnitude = numbers[i] & 0x7fff;
        const bool within = all.least[i] + ((magnitude - all.least[i]) & 255) == magnitude;
        lost |= !(all.is_near[i] | (within & ((numbers[i] & 0x8000) == all.sign[i])));
    }
    near_zero(how_many, all, [&](int i) {
        found.fours++;
        found.escapes += (four_of(numbers[i], all.most[i]) & 7) == ESCAPE;
    });
    return !lost;
}

template <int ROOM>
INLINE void split(const uint16_t* numbers, int how_many, const Intervals<ROOM>& all, uint8_t* low, Place& place) {
    for (int i = 0; i < how_many; i++) low[i] = uint8_t(numbers[i]);
    near_zero(how_many, all, [&](int i) {
        const int four = four_of(numbers[i], all.most[i]), at = place.at++;
        if (at % 2 == 0) place.fours[at / 2] = uint8_t(four);
        else place.fours[at / 2] |= uint8_t(four << 4);
        if ((four & 7) == ESCAPE) *place.escapes++ = uint8_t(numbers[i] >> 8);
    });
}

template <int ROOM>
INLINE void restore(const uint8_t* low, int how_many, const Intervals<ROOM>& all, Place& place, uint16_t* numbers) {
    uint16_t found[ROOM];
    for (int i = 0; i < how_many; i++)
        found[i] = uint16_t((all.least[i] + ((low[i] - all.least[i]) & 255)) | all.sign[i]);
    near_zero(how_many, all, [&](int i) {
        const int four = place.fours[place.at / 2] >> place.at % 2 * 4 & 15, kind = four & 7;
        place.at++;
        if (kind == ESCAPE) found[i] = uint16_t(*place.escapes++ << 8 | low[i]);
        else found[i] = uint16_t((kind == ALONE ? low[i] : highest(all.most[i], low[i]) - 256 * kind) |
                                 (four & SIGN ? 0x8000 : 0));
    });
    __builtin_memcpy(numbers, found, how_many * sizeof *found);
}

}  // namespace intervals
