// Attention of rows that each attend to a list of blocks of consecutive tokens (kernels/runs.py, Chosen).
//
// A row's list is attended to in spans of as many tokens as those of a run. Where the blocks of a span are not
// consecutive, its keys and values are gathered first. Either way the span is attended to as one of a run, so a row's
// bits are those of the same tokens in a run.
//
// Letters are those of attention.h.
#pragma once
#include "attention.h"

// Tiles, one after the other, in blocks of `size` tokens. keys, values: of each; they have `tile` tokens in pages of
// `page`, both multiples of `size`, and strides as those of a Run.
struct Tiles {
    const void* const* keys;
    const void* const* values;
    int64_t head_stride, page_stride, page, tile, size;
};

// blocks: of row t at blocks + t * most. tokens: [T], of each row's list; its last block may be incomplete. span: a
// multiple of a block.
struct Chosen {
    Tiles tiles;
    const int32_t* blocks;
    const int32_t* tokens;
    int64_t most, span;

    int64_t size() const { return tiles.size; }
};

namespace chosen {

// One row's tokens of a span, and the blocks that they are in.
struct Part {
    const int32_t* blocks;
    int64_t count, slot;
};

// Where a head's keys of a block are, and its values.
template <class E>
struct Place {
    using element = typename E::element;
    const element *keys, *values;

    Place(const Tiles& t, int64_t block, int64_t head, int64_t dim) {
        const int64_t token = block * t.size, number = token / t.tile, at = token % t.tile;
        const int64_t offset = at / t.page * t.page_stride + at % t.page * dim + head * t.head_stride;
        keys = static_cast<const element*>(t.keys[number]) + offset;
        values = static_cast<const element*>(t.values[number]) + offset;
    }
};

// Whether the part's tokens are one after the other in a page.
inline bool is_run(const Chosen& c, const Part& p) {
    const int64_t last = (p.count - 1) / c.size(), of_page = c.tiles.page / c.size();
    for (int64_t i = 1; i <= last; i++)
        if (p.blocks[i] != p.blocks[0] + i) return false;
    return p.blocks[0] / of_page == p.blocks[last] / of_page;
}

// Keys and values of the part's tokens, one after the other: [count, D] each.
template <class E>
void gather(const Chosen& c, const Part& p, int64_t head, int64_t dim, typename E::element* keys,
            typename E::element* values) {
    for (int64_t at = 0; at < p.count; at += c.size()) {
        const int64_t rest = p.count - at, numbers = (rest < c.size() ? rest : c.size()) * dim;
        const Place<E> from(c.tiles, p.blocks[at / c.size()], head, dim);
        __builtin_memcpy(keys + at * dim, from.keys, numbers * sizeof *keys);
        __builtin_memcpy(values + at * dim, from.values, numbers * sizeof *values);
    }
}

// Floats of a thread's scratch that are gathered.
template <class E>
inline int64_t gathered_room(int64_t dim, int64_t span) {
    return (2 * span * dim * int64_t(sizeof(typename E::element)) / 4 + 31) / 32 * 32;
}

// The query heads of one row over one head of a part. scratch: `scratch_room`.
template <class E>
void attend_one(const Attention& a, const Chosen& c, const Part& p, int64_t row, int64_t head, float* scratch) {
    const int64_t dim = a.held_dim(), size = 2 + a.room<E>();
    const int64_t own = row * a.group, folded = a.rows * a.group;
    float* partials = a.partials + ((p.slot * a.kv_heads + head) * folded + own) * size;
    const float* queries = a.queries + (head * folded + own) * a.head_dim;
    if (p.count <= 0) {
        for (int64_t g = 0; g < a.group; g++) partials[g * size] = attention::NONE, partials[g * size + 1] = 0;
        return;
    }
    auto keys = reinterpret_cast<typename E::element*>(scratch), values = keys + c.span * dim;
    Span span{keys, values, 0, p.count, p.slot, 0, false};
    if (is_run(c, p)) {
        const Place<E> there(c.tiles, p.blocks[0], head, dim);
        span.keys = there.keys, span.values = there.values;
    } else {
        gather<E>(c, p, head, dim, keys, values);
    }
    Attention of_row = a;  // which sees all of it
    of_row.rows = 1, of_row.position = p.count;
    attention::attend_rows<E>(of_row, span, queries, partials, nullptr, scratch + gathered_room<E>(dim, c.span));
}

// All rows -> partials, of every slot. Rows beside each other are worked on together: they choose alike.
template <class E>
void attend(const Attention& a, const Chosen& c, float* scratch, int64_t room, int64_t how_many) {
    struct None {};
    const int64_t items = a.slots * a.kv_heads * a.rows;
    threads::in_phases<None>(how_many, &items, 1, [&](int, int64_t item, None&, int thread) {
        const int64_t row = item % a.rows, head = item / a.rows % a.kv_heads, slot = item / a.rows / a.kv_heads;
        const int64_t first = slot * c.span, rest = c.tokens[row] - first;
        const Part part{c.blocks + row * c.most + first / c.size(), rest < c.span ? rest : c.span, slot};
        attend_one<E>(a, c, part, row, head, scratch + thread * room);
    });
}

// Floats of scratch that a thread needs.
template <class E>
inline int64_t scratch_room(int64_t dim, int64_t group, int64_t span, bool joined) {
    return gathered_room<E>(joined ? dim / 2 : dim, span) + attention::scratch_room<E>(dim, group, span, joined);
}

}  // namespace chosen
