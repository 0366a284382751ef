// What cached keys and values of bf16 have beside their codes in 4 bits (kv_codes.h), by the rule of intervals.h.
//
// A block is the keys, or the values, of a page: [kv_heads, page_tokens, head_dim]. 32 tokens of a head are a group, as
// of the codes; groups count through a head's tokens, then through the heads. The parts of a block's residual are the
// low bytes, [groups, 32 tokens, head_dim]; for each group, and once more for the end of the last, where its 4 bits
// begin, in bytes, and where its escapes do, each from the beginning of their part: int32 [groups + 1, 2]; 4 bits each;
// escapes. So the last head says where the part of the escapes begins. All ends at a multiple of 16.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "intervals.h"
#include "kv_codes.h"

namespace kv_residuals {

using intervals::by_lanes;
using intervals::Head;
using intervals::lanes;
using intervals::u32s;
using intervals::u8s;
using kv_codes::CHANNELS;
using kv_codes::GROUP;
using kv_codes::Layout;
using kv_codes::WIDEST;
using Intervals = intervals::Intervals<WIDEST>;

constexpr int64_t DRAWN = 2;  // groups that a thread draws at a time

enum class Order : int64_t { lanes, matrices };
enum class Kind : int64_t { keys, values };

struct Shape {
    int64_t kv_heads, page_tokens, head_dim;

    int64_t groups_of_head() const { return page_tokens / GROUP; }
    int64_t groups() const { return kv_heads * groups_of_head(); }
    int64_t of_group() const { return GROUP * head_dim; }
    int64_t numbers() const { return groups() * of_group(); }
    int64_t heads() const { return numbers(); }
    int64_t fours() const { return heads() + (groups() + 1) * int64_t(sizeof(Head)); }
    Layout layout() const { return {int(head_dim)}; }
};

// The codes of a page's keys or values: of head h at `at` + h * head_bytes, group by group.
struct PageCodes {
    const uint8_t* at;
    int64_t head_bytes;
    Kind kind;

    const uint8_t* block(const Shape& shape, int64_t group) const {
        const int64_t of_head = shape.groups_of_head();
        return at + group / of_head * head_bytes + group % of_head * shape.layout().size();
    }
};

// Of a group's keys or values, a token at a time.
struct Group {
    Layout layout;
    const uint8_t* block;
    Kind kind;
    uint8_t numbers[GROUP * WIDEST];  // codes, one a byte: [GROUP, dim]
    float step[WIDEST], low[WIDEST];  // of keys, or of a token's values

    Group(const Shape& shape, const PageCodes& codes, int64_t group, Order order)
        : layout(shape.layout()), block(codes.block(shape, group)), kind(codes.kind) {
        if (kind == Kind::keys) {
            for (int d = 0; d < layout.dim; d++) scale(d, 1, block + d * 4);
            order == Order::lanes ? keys_in_lanes() : keys_in_matrices();
        } else {
            order == Order::lanes ? values_in_lanes() : values_in_matrices();
        }
    }

    // each(intervals, t)
    template <class F>
    INLINE void by_token(F&& each) {
        intervals::by_two(GROUP, [&](int t) __attribute__((always_inline)) { return of_token(t); }, each);
    }

private:
    INLINE Intervals of_token(int t) {
        if (kind == Kind::values)
            for (int d = 0; d < layout.dim; d += CHANNELS)
                scale(d, CHANNELS, block + layout.value_scales() + (d / CHANNELS * GROUP + t) * 4);
        const uint8_t* own = numbers + t * layout.dim;
        return {layout.dim, [&](int d) { return step[d]; }, [&](int d) { return low[d]; },
                [&](int d) { return own[d]; }};
    }

    // Of channels `first` to `first + count`.
    INLINE void scale(int first, int count, const uint8_t* from) {
        const auto unit = load<uint32_t>(from);
        for (int d = first; d < first + count; d++)
            step[d] = __builtin_bit_cast(float, unit << 16), low[d] = __builtin_bit_cast(float, unit & 0xffff0000u);
    }

    void keys_in_lanes() {
        const int dim = layout.dim, half = dim / 2;
        const uint8_t* from = block + layout.key_codes();
        for (int d = 0; d < half; d += 4)
            for (int t = 0; t < GROUP; t++, from += 4) {
                const auto eight = load<uint32_t>(from), mask = 0x0f0f0f0fu;
                uint8_t* to = numbers + t * dim + d;
                store(to, eight & mask), store(to + half, eight >> 4 & mask);
            }
    }

    void keys_in_matrices() {
        const int half = GROUP / 2 * layout.dim;
        const uint8_t* from = block + layout.key_codes();
        for (int i = 0; i < half; i++) numbers[i] = from[i] & 15, numbers[half + i] = from[i] >> 4;
    }

    // at(t, d): where the codes of tokens t to t + 4 of channel d are, in the low halves.
    template <class At>
    INLINE void values(At&& at) {
        const int dim = layout.dim, half = GROUP / 2 * dim;
        for (int t = 0; t < GROUP / 2; t += 4)
            by_lanes(dim, [&]<int N>(int first) {
                const auto units = lanes<u32s<N>>([&](int d) { return load<uint32_t>(at(t, d)); }, first);
                for (int i = 0; i < 4; i++) {
                    const auto both = __builtin_convertvector(units >> 8 * i, u8s<N>);
                    uint8_t* to = numbers + (t + i) * dim + first;
                    store(to, both & 15), store(to + half, both >> 4);
                }
            });
    }

    void values_in_lanes() {
        const int channels = layout.channels();
        values([&](int t, int d) { return block + layout.value_codes() + t * channels + d * 4; });
    }

    void values_in_matrices() {
        values([&](int t, int d) { return block + layout.value_codes() + d * (GROUP / 2) + t; });
    }
};

struct Block {
    const uint16_t* numbers;
    uint8_t* to;  // where its residual goes: elsewhere
    PageCodes codes;
};

// Heads of a block's groups, from bytes of their own. -> Whether all numbers would come back.
inline bool count(const Block& b, const Shape& shape, Order order, Head* heads) {
    Head total{};
    for (int64_t g = 0; g < shape.groups(); g++) {
        Group group(shape, b.codes, g, order);
        Head found{};
        bool comes_back = true;
        group.by_token([&](const Intervals& all, int t) {
            const uint16_t* numbers = b.numbers + (g * GROUP + t) * shape.head_dim;
            comes_back &= intervals::count(numbers, int(shape.head_dim), all, found);
        });
        if (!comes_back) return false;
        heads[g] = total;
        total.fours += (found.fours + 1) / 2, total.escapes += found.escapes;
    }
    heads[shape.groups()] = total;
    return true;
}

// Low bytes, and 4 bits and escapes where zeros are.
inline void split(const Block& b, const Shape& shape, Order order, const Head* heads) {
    const int dim = int(shape.head_dim);
    uint8_t *fours = b.to + shape.fours(), *escapes = fours + heads[shape.groups()].fours;
    for (int64_t g = 0; g < shape.groups(); g++) {
        Group group(shape, b.codes, g, order);
        intervals::Place place{fours + heads[g].fours, escapes + heads[g].escapes, escapes};
        group.by_token([&](const Intervals& all, int t) {
            const int64_t at = (g * GROUP + t) * dim;
            intervals::split(b.numbers + at, dim, all, b.to + at, place);
        });
    }
}

// A block's residual, with zeros up to the multiple of 16. -> Bytes that it fills; 0, and nothing is written, where a
// number would not come back, or it would fill more than `most`, or memory is short.
inline int64_t split_off(const Block& b, const Shape& shape, Order order, int64_t most) {
    const int64_t of_heads = shape.fours() - shape.heads();
    auto* heads = static_cast<Head*>(malloc(of_heads));
    if (heads == nullptr) return 0;
    int64_t size = 0;
    if (count(b, shape, order, heads)) {
        const Head& end = heads[shape.groups()];
        size = (shape.fours() + end.fours + end.escapes + 15) / 16 * 16;
        if (size > most) size = 0;
    }
    if (size) {
        memcpy(b.to + shape.heads(), heads, of_heads);
        memset(b.to + shape.fours(), 0, size - shape.fours());
        split(b, shape, order, heads);
    }
    free(heads);
    return size;
}

// Groups `first` to `first + count` of the block whose residual is at `from` go to `to`.
struct Part {
    uint8_t* from;
    uint16_t* to;
    PageCodes codes;
    int64_t first, count;
};

inline void restore(const Part& part, const Shape& shape, Order order) {
    const int dim = int(shape.head_dim);
    uint8_t* fours = part.from + shape.fours();
    auto* heads = reinterpret_cast<const Head*>(part.from + shape.heads());
    uint8_t* escapes = fours + heads[shape.groups()].fours;
    for (int64_t g = 0; g < part.count; g++) {
        const int64_t number = part.first + g;
        Group group(shape, part.codes, number, order);
        intervals::Place place{fours + heads[number].fours, escapes + heads[number].escapes, escapes};
        group.by_token([&](const Intervals& all, int t) {
            const uint8_t* low = part.from + (number * GROUP + t) * dim;
            intervals::restore(low, dim, all, place, part.to + (g * GROUP + t) * dim);
        });
    }
}

inline void split_off_all(const Block* blocks, int64_t count, int64_t* sizes, const Shape& shape, Order order,
                          int64_t most, int64_t how_many) {
    threads::each(how_many, count, [&](int64_t i) { sizes[i] = split_off(blocks[i], shape, order, most); });
}

inline void restore_all(const Part* parts, int64_t count, const Shape& shape, Order order, int64_t how_many) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) most = parts[i].count > most ? parts[i].count : most;
    const int64_t draws = (most + DRAWN - 1) / DRAWN;  // for each part
    threads::each(how_many, count * draws, [&](int64_t i) {
        Part part = parts[i / draws];
        const int64_t first = i % draws * DRAWN, left = part.count - first;
        if (left <= 0) return;
        part.first += first, part.to += first * shape.of_group(), part.count = left < DRAWN ? left : DRAWN;
        restore(part, shape, order);
    });
}

}  // namespace kv_residuals
