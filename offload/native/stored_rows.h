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

// How each 64 numbers of a row lie. even_odd: in bf16, the even ones first. by_byte, by_half: see `place`.
enum class Order { plain, even_odd, by_byte, by_half };

// Whether 16 bytes have the codes of 32 numbers, 4 bits each, and the next 16 those of the next 32.
consteval bool in_halves(Kind kind) {
    return form(kind).codes.bits == 4 && (form(kind).numbers < 256 || book(kind) != Book::none);
}

// Whether a group's codes are made in one register, whose bytes are then widened. Those in a grid are made by eight.
consteval bool by_byte(Kind kind) { return W == 8 && is_gguf(kind) && !has_grid(kind); }

template <class E>
INLINE Order order_for(Kind kind) {
    Order order = Order::plain;
    with_kind(kind, [&]<Kind KIND>() {
        if constexpr (paired<E>(KIND)) order = Order::even_odd;
        else if constexpr (by_byte(KIND)) order = in_halves(KIND) ? Order::by_half : Order::by_byte;
    });
    return order;
}

// Where number i of 64 lies. Codes are bytes of two registers, of which each makes four vectors of fp32: of the k-th, the
// lanes are bytes 4 k to 4 k + 4 of either half of the register. by_byte: a register has one group of 32; by_half: the
// first 16 numbers of both, and the other the second ones.
constexpr int place(Order order, int i) {
    const int first = i / 32, second = i / 16 % 2;
    const int of_register = order == Order::by_half ? second : first, of_half = order == Order::by_half ? first : second;
    return 32 * of_register + 8 * (i / 4 % 4) + 4 * of_half + i % 4;
}

// Rows, one after the other: [inputs] in fp32, of kinds of GGUF with zeros past the end, or half as much of it in bf16.
// Then the sums of groups, and zeros; from 256 inputs on the sums of 16; and last what sums of products with codes are
// to be multiplied by.
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
    float* unit(int64_t row) const { return numbers(row) + stride() - 1; }
};

// Of 64 numbers in bf16 the even ones, then the odd ones.
INLINE void put_pairs(const uint16_t* from, uint16_t* to) {
    for (int i = 0; i < PAIR / 2; i += W) {
        const u32 both = load<u32>(from + 2 * i);
        store(to + i, __builtin_convertvector(both & 0xffff, u16));
        store(to + PAIR / 2 + i, __builtin_convertvector(both >> 16, u16));
    }
}

// W numbers of 64, from number i on.
INLINE void put_by_byte(float* pair, Order order, int i, const f32& x) {
    using four = float __attribute__((vector_size(16)));
    for (int j = 0; j < W; j += 4)
        store(pair + place(order, i + j), load<four>(reinterpret_cast<const float*>(&x) + j));
}

// What sums of a row's products with codes are to be multiplied by. Codes in the upper bytes of lanes are 2^24 times as
// large. A row with numbers of 1 and more is that much smaller instead, so that its sums overflow no sooner.
INLINE float unit_of(const Rows& rows, int64_t row, f32 most) {
    constexpr float unit = 0x1p-24f;
    if (largest(most) < 1) return unit;
    float* numbers = rows.numbers(row);
    for (int i = 0; i < rows.padded(); i += W) store(numbers + i, load<f32>(numbers + i) * unit);
    return 1;
}

// One row. read(i): elements i to i + W, fp32.
template <class F>
void take(const Rows& rows, int64_t row, Order order, F&& read) {
    float *numbers = rows.numbers(row), *sums = rows.sums(row);
    const bool by_byte = order == Order::by_byte || order == Order::by_half;
    __builtin_memset(sums, 0, (rows.groups() + GROUPS) * sizeof *sums);
    if (rows.inputs % PAIR) __builtin_memset(numbers + rows.inputs / PAIR * PAIR, 0, PAIR * sizeof *numbers);
    alignas(64) uint16_t halves[PAIR] = {};
    f32 total = {}, half = {}, most = {};
    for (int i = 0; i < rows.inputs; i += W) {
        const f32 x = read(i);
        if (order == Order::even_odd) Bf16::write(halves + i % PAIR, x);
        else if (by_byte) put_by_byte(numbers + i / PAIR * PAIR, order, i % PAIR, x);
        else store(numbers + i, x);
        total += x, half += x, most = larger(__builtin_elementwise_abs(x), most);
        if (rows.inputs >= 256 && (i + W) % 16 == 0) rows.sums_of_16(row)[i / 16] = sum(half), half = f32{};
        if ((i + W) % GROUP) continue;
        sums[i / GROUP] = sum(total), total = f32{};
        if (order == Order::even_odd) put_pairs(halves, rows.halves(row) + i / PAIR * PAIR);
        if ((i + W) % PAIR == 0) __builtin_memset(halves, 0, sizeof halves);
    }
    *rows.unit(row) = by_byte ? unit_of(rows, row, most) : 1;
}

}  // namespace stored
