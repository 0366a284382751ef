// What bf16 weights have beside their codes in 4 or 6 bits (codes.h), by the rule of intervals.h.
//
// A matrix has groups, the blocks of its codes: 16 outputs times 64 inputs. Its parts are the low bytes, in the order of
// [groups, 16 outputs, 64 inputs]; for each group, where its 4 bits begin, in bytes, and where its escapes do; 4 bits
// each; escapes.
#pragma once
#include "codes.h"
#include "intervals.h"

// weight: to split, or to fill. heads: [groups]. escapes: where the 4 bits end.
struct Residual {
    uint16_t* weight;
    uint8_t* blocks;
    uint8_t* low;
    intervals::Head* heads;
    uint8_t* fours;
    uint8_t* escapes;
    int64_t outputs, inputs;
    int64_t bits;  // of the codes
};

namespace residuals {

using codes::GROUP;
using codes::TILE;
using Intervals = intervals::Intervals<GROUP>;

// Of the codes of one output in a group.
INLINE Intervals of_output(const codes::Output& output, int64_t bits) {
    uint32_t unit;
    __builtin_memcpy(&unit, output.scale(), 4);
    const float step = __builtin_bit_cast(float, unit << 16), low = __builtin_bit_cast(float, unit & 0xffff0000u);
    uint8_t numbers[GROUP];
    output.get(numbers, bits);
    return {GROUP, [&](int) { return step; }, [&](int) { return low; }, [&](int i) { return numbers[i]; }};
}

// A group's weights, output by output: each(intervals, the output's weights, in bytes of `low`).
template <class F>
INLINE void by_output(const Residual& r, int64_t group, F&& each) {
    const int64_t per_tile = r.inputs / GROUP, tile = group / per_tile, first = group % per_tile * GROUP;
    auto of = [&](int o) { return of_output({r.blocks + group * codes::block(r.bits), o}, r.bits); };
    intervals::by_two(TILE, of, [&](const Intervals& all, int o) {
        each(all, r.weight + (tile * TILE + o) * r.inputs + first, r.low + (group * TILE + o) * GROUP);
    });
}

// How many bytes of 4 bits, and escapes, a group has, in its head. False where a weight would not come back.
inline bool count(const Residual& r, int64_t group) {
    bool comes_back = true;
    intervals::Head found{};
    by_output(r, group, [&](const Intervals& all, const uint16_t* weight, uint8_t*) {
        comes_back &= intervals::count(weight, GROUP, all, found);
    });
    r.heads[group] = {(found.fours + 1) / 2, found.escapes};
    return comes_back;
}

INLINE intervals::Place place(const Residual& r, int64_t group) {
    return {r.fours + r.heads[group].fours, r.escapes + r.heads[group].escapes, r.escapes};
}

inline void split(const Residual& r, int64_t group) {
    auto at = place(r, group);
    by_output(r, group, [&](const Intervals& all, const uint16_t* weight, uint8_t* low) {
        intervals::split(weight, GROUP, all, low, at);
    });
}

inline void restore(const Residual& r, int64_t group) {
    auto at = place(r, group);
    by_output(r, group, [&](const Intervals& all, uint16_t* weight, const uint8_t* low) {
        intervals::restore(low, GROUP, all, at, weight);
    });
}

template <class F>
void by_group(const Residual& r, int64_t how_many, F&& each) {
    const int64_t at_a_time = 16, groups = r.outputs / TILE * (r.inputs / GROUP);
    threads::each(how_many, (groups + at_a_time - 1) / at_a_time, [&](int64_t i) {
        for (int64_t g = i * at_a_time; g < groups && g < (i + 1) * at_a_time; g++) each(g);
    });
}

// False where a weight would not come back.
inline bool count_all(const Residual& r, int64_t how_many) {
    bool all_come_back = true;
    by_group(r, how_many, [&](int64_t group) {
        if (!count(r, group)) __atomic_store_n(&all_come_back, false, __ATOMIC_RELAXED);
    });
    return all_come_back;
}

}  // namespace residuals
