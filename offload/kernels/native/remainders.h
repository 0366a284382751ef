// What bf16 weights have beside their codes in 4 bits (codes.h): both together give them back, bit for bit.
//
// A code says in which interval its weight lies. Of the numbers in it, `least` and `most` bound the magnitudes, taken
// as integers. Where these are fewer than 256, the low byte of a weight tells which of them it is, and its sign is that
// of the interval. The other intervals are near zero, or of a group whose range is so small that it has no step. Their
// weights have 4 bits more, the lowest three of which say how far, in steps of 256, the magnitude is below the largest
// one with that low byte and no larger than `most`: 0 to 5 steps, or that it is the low byte alone, or that the upper
// byte is an escape. The fourth is the sign.
//
// A matrix has groups, the blocks of its codes: 16 outputs times 64 inputs. Its parts are the low bytes, in the order of
// [groups, 16 outputs, 64 inputs]; for each group, where its 4 bits begin, in bytes, and where its escapes do; 4 bits
// each, the first in the lower half of a byte, a group's from a byte's beginning; escapes, a byte each.
#pragma once
#include <stdint.h>

#include "codes.h"

// weight: to split, or to fill. heads: int32 [groups, 2].
struct Remainder {
    uint16_t* weight;
    const uint8_t* blocks;
    uint8_t* low;
    int32_t* heads;
    uint8_t* fours;
    uint8_t* escapes;
    int64_t outputs, inputs;
};

namespace remainders {

using codes::GROUP;
using codes::TILE;

constexpr int MARGIN = 2;  // of the bounds, more than fp32 rounds by
constexpr int STEPS = 6, ALONE = 6, ESCAPE = 7, SIGN = 8;

// Of the codes of one output in a group.
struct Intervals {
    int32_t least[GROUP], most[GROUP];
    uint16_t sign[GROUP];
    uint8_t is_near[GROUP];
    bool finite = true;  // on other machines NaN may have other bits

    Intervals(const uint8_t* block, int output) {
        uint32_t unit;
        __builtin_memcpy(&unit, block + output * 4, 4);
        const float step = __builtin_bit_cast(float, unit << 16), low = __builtin_bit_cast(float, unit & 0xffff0000u);
        uint8_t both[GROUP / 2], numbers[GROUP];
        for (int i = 0; i < GROUP / 2; i += 4)
            __builtin_memcpy(both + i, block + codes::SCALES + i * TILE + output * 4, 4);
        for (int i = 0; i < GROUP / 2; i++) numbers[i] = both[i] & 15, numbers[GROUP / 2 + i] = both[i] >> 4;
        const float half = 0.5f * step;
        for (int i = 0; i < GROUP; i++) {
            const float middle = step * float(numbers[i]) + low;  // the product is exact
            const uint32_t bits = __builtin_bit_cast(uint32_t, middle);
            const float size = __builtin_bit_cast(float, bits & 0x7fffffffu), inner = size - half;
            least[i] = (__builtin_bit_cast(int32_t, inner) >> 16) - MARGIN;
            most[i] = (__builtin_bit_cast(int32_t, size + half) >> 16) + MARGIN;
            is_near[i] = !(inner > 0) | (most[i] - least[i] >= 256) | (step == 0);
            sign[i] = bits >> 16 & 0x8000;
            finite &= (bits & 0x7fffffffu) < 0x7f800000u;
        }
    }
};

INLINE int highest(int most, int low) { return most - ((most - low) & 255); }

// The 4 bits of a weight near zero.
INLINE int four_of(uint16_t weight, int most) {
    const int magnitude = weight & 0x7fff, steps = (highest(most, magnitude & 255) - magnitude) / 256;
    const bool counted = magnitude <= most && steps < STEPS;
    return (counted ? steps : magnitude < 256 ? ALONE : ESCAPE) | (weight & 0x8000 ? SIGN : 0);
}

// A group's weights, output by output: each(output, the output's weights, in bytes of `low`).
template <class F>
INLINE void by_output(const Remainder& r, int64_t group, F&& each) {
    const int64_t per_tile = r.inputs / GROUP, tile = group / per_tile, first = group % per_tile * GROUP;
    for (int o = 0; o < TILE; o++)
        each(o, r.weight + (tile * TILE + o) * r.inputs + first, r.low + (group * TILE + o) * GROUP);
}

// How many bytes of 4 bits, and escapes, a group has, in its head. False where a weight would not come back.
inline bool count(const Remainder& r, int64_t group) {
    bool comes_back = true;
    int fours = 0, escapes = 0;
    by_output(r, group, [&](int o, const uint16_t* weight, uint8_t*) {
        const Intervals all(r.blocks + group * codes::BLOCK, o);
        comes_back &= all.finite;
        for (int i = 0; i < GROUP; i++) {
            const int magnitude = weight[i] & 0x7fff;
            const bool within = all.least[i] + ((magnitude - all.least[i]) & 255) == magnitude;
            comes_back &= all.is_near[i] | (within & ((weight[i] & 0x8000) == all.sign[i]));
            fours += all.is_near[i];
            escapes += all.is_near[i] && (four_of(weight[i], all.most[i]) & 7) == ESCAPE;
        }
    });
    r.heads[2 * group] = (fours + 1) / 2, r.heads[2 * group + 1] = escapes;
    return comes_back;
}

inline void split(const Remainder& r, int64_t group) {
    uint8_t* fours = r.fours + r.heads[2 * group];
    uint8_t* escapes = r.escapes + r.heads[2 * group + 1];
    int at = 0;
    by_output(r, group, [&](int o, const uint16_t* weight, uint8_t* low) {
        const Intervals all(r.blocks + group * codes::BLOCK, o);
        for (int i = 0; i < GROUP; i++) low[i] = uint8_t(weight[i]);
        for (int i = 0; i < GROUP; i++) {
            if (!all.is_near[i]) continue;
            const int four = four_of(weight[i], all.most[i]);
            if (at % 2 == 0) fours[at / 2] = uint8_t(four);
            else fours[at / 2] |= uint8_t(four << 4);
            at++;
            if ((four & 7) == ESCAPE) *escapes++ = uint8_t(weight[i] >> 8);
        }
    });
}

inline void restore(const Remainder& r, int64_t group) {
    const uint8_t* fours = r.fours + r.heads[2 * group];
    const uint8_t* escapes = r.escapes + r.heads[2 * group + 1];
    int at = 0;
    by_output(r, group, [&](int o, uint16_t* weight, const uint8_t* low) {
        const Intervals all(r.blocks + group * codes::BLOCK, o);
        uint16_t found[GROUP];
        for (int i = 0; i < GROUP; i++)
            found[i] = uint16_t((all.least[i] + ((low[i] - all.least[i]) & 255)) | all.sign[i]);
        for (int i = 0; i < GROUP; i++) {
            if (!all.is_near[i]) continue;
            const int four = fours[at / 2] >> at % 2 * 4 & 15, kind = four & 7;
            at++;
            if (kind == ESCAPE) found[i] = uint16_t(*escapes++ << 8 | low[i]);
            else found[i] = uint16_t((kind == ALONE ? low[i] : highest(all.most[i], low[i]) - 256 * kind) |
                                     (four & SIGN ? 0x8000 : 0));
        }
        __builtin_memcpy(weight, found, sizeof found);
    });
}

template <class F>
void by_group(const Remainder& r, int64_t how_many, F&& each) {
    threads::Counter counter;
    auto body = [&] {
        const int64_t at_a_time = 16, groups = r.outputs / TILE * (r.inputs / GROUP);
        for (int64_t first; (first = counter.draw() * at_a_time) < groups;)
            for (int64_t g = first; g < groups && g < first + at_a_time; g++) each(g);
    };
    threads::run(how_many, body);
}

// False where a weight would not come back.
inline bool count_all(const Remainder& r, int64_t how_many) {
    bool all_come_back = true;
    by_group(r, how_many, [&](int64_t group) {
        if (!count(r, group)) __atomic_store_n(&all_come_back, false, __ATOMIC_RELAXED);
    });
    return all_come_back;
}

}  // namespace remainders
