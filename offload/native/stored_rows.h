// Rows as they are multiplied with a matrix in blocks (stored.h), with the sums of their groups.
#pragma once
#include "stored.h"
#include "vectors.h"

namespace stored {

constexpr int GROUPS = 8;  // whose steps and sums are read together
constexpr int PAIR = 2 * GROUP;

// Whether rows of E are multiplied in bf16.
template <class E>
constexpr bool paired(Kind kind) {
    return in_pairs<E> && is_gguf(kind);
}

// Rows, one after the other: [inputs] in fp32, or, where they are multiplied in pairs, of each 64 inputs the even ones
// in bf16, then the odd ones, and zeros past the end. Then the sums of groups, and zeros; and from 256 inputs on the
// sums of 16.
struct Rows {
    float* at;
    int inputs;

    int padded() const { return (inputs + PAIR - 1) / PAIR * PAIR; }
    int stride() const { return padded() + padded() / 4; }
    int groups() const { return inputs / GROUP; }
    Rows from(int64_t row) const { return {numbers(row), inputs}; }
    float* numbers(int64_t row) const { return at + row * stride(); }
    uint16_t* halves(int64_t row) const { return reinterpret_cast<uint16_t*>(numbers(row)); }
    float* sums(int64_t row) const { return numbers(row) + padded(); }
    float* sums_of_16(int64_t row) const { return sums(row) + groups() + GROUPS; }
};

// Of 64 numbers in bf16 the even ones, then the odd ones.
INLINE void put_pairs(const uint16_t* from, uint16_t* to) {
    for (int i = 0; i < PAIR / 2; i += W) {
        const u32 both = load<u32>(from + 2 * i);
        store(to + i, __builtin_convertvector(both & 0xffff, u16));
        store(to + PAIR / 2 + i, __builtin_convertvector(both >> 16, u16));
    }
}

// One row, in bf16 for pairs or in fp32. read(i): elements i to i + W, fp32.
template <class F>
void take(const Rows& rows, int64_t row, bool in_bf16, F&& read) {
    float* sums = rows.sums(row);
    __builtin_memset(sums, 0, (rows.groups() + GROUPS) * sizeof *sums);
    for (int from = 0; from < rows.inputs; from += PAIR) {
        alignas(64) uint16_t halves[PAIR] = {};
        for (int first = from; first < from + PAIR && first < rows.inputs; first += GROUP) {
            f32 total = {}, half = {};
            for (int i = first; i < first + GROUP; i += W) {
                const f32 x = read(i);
                if (in_bf16) Bf16::write(halves + i - from, x);
                else store(rows.numbers(row) + i, x);
                total += x, half += x;
                if (rows.inputs < 256 || (i + W) % 16) continue;
                rows.sums_of_16(row)[i / 16] = sum(half), half = f32{};
            }
            sums[first / GROUP] = sum(total);
        }
        if (in_bf16) put_pairs(halves, rows.halves(row) + from);
    }
}

}  // namespace stored
