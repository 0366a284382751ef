// The choice of the blocks with the highest scores for each row (kernels/choosing.py).
//
// Blocks are scored as rows are multiplied with a weight of the dtype (products.h): a score's bits depend on its row and
// its block alone. The least score that is chosen is found by bisection of its bits, counting the scores that reach it.
#pragma once
#include "products.h"

// scored: x the queries [rows * heads, D], weight the pooled keys [blocks, D], with scratch for as many rows; the rest
// of it is not used. scores: scratch [rows, blocks]. visible: [rows], of each row's blocks those that count. chosen:
// [rows, most].
struct Choosing {
    Product scored;
    float* scores;
    const int32_t* visible;
    int32_t* chosen;
    int64_t rows, heads, most;
};

namespace choosing {

constexpr int64_t TILES = 8;  // of blocks, of an item
using products::MOST_ROWS;
using products::OUTPUTS;

// Adds to the scores of a tile of blocks what is positive of `some` products, from row `from` on. The first head's are
// written. What is not a number counts as none.
inline void add_scores(const Choosing& c, int64_t from, int some, int64_t first, int count,
                       const float (*results)[OUTPUTS]) {
    for (int r = 0; r < some; r++) {
        float* scores = c.scores + (from + r) / c.heads * c.scored.outputs + first;
        const bool begins = (from + r) % c.heads == 0;
        for (int o = 0; o < count; o++)
            scores[o] = (begins ? 0.0f : scores[o]) + (results[r][o] > 0 ? results[r][o] : 0.0f);
    }
}

template <class E>
void score(const Choosing& c, int64_t tile) {
    const Product& p = c.scored;
    const int64_t first = tile * OUTPUTS, rows = c.rows * c.heads;
    const int count = int(p.outputs - first < OUTPUTS ? p.outputs - first : OUTPUTS);
    alignas(64) float results[MOST_ROWS][OUTPUTS];
    for (int64_t from = 0; from < rows; from += MOST_ROWS) {
        const int some = int(rows - from < MOST_ROWS ? rows - from : MOST_ROWS);
        products::block<E>(p, p.weight, p.widened, nullptr, from, first, count, some, results);
        add_scores(c, from, some, first, count, results);
    }
}

// Scores are not negative, so their bits as integers are in their order.
INLINE int32_t bits_of(float score) { return __builtin_bit_cast(int32_t, score); }

inline int64_t count_from(const float* scores, int64_t count, int32_t least) {
    i32 found = {};
    int64_t i = 0;
    for (; i + W <= count; i += W) found -= load<i32>(scores + i) >= least;  // true is -1
    int64_t total = __builtin_reduce_add(found);
    for (; i < count; i++) total += bits_of(scores[i]) >= least;
    return total;
}

// The largest number that at least `most` of the scores reach, or a smaller one that just as many do.
inline int32_t least_chosen(const float* scores, int64_t count, int64_t most) {
    int32_t low = 0, high = bits_of(__builtin_huge_valf()) + 1;  // all reach low, and none high
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        const int64_t found = count_from(scores, count, middle);
        if (found == most) return middle;
        (found > most ? low : high) = middle;
    }
    return low;
}

// The numbers of the `most` highest of `visible` scores, ascending: of equal ones the first.
inline void pick(const float* scores, int64_t visible, int64_t most, int32_t* chosen) {
    for (int64_t i = 0; i < most && visible <= most; i++) chosen[i] = i < visible ? int32_t(i) : -1;
    if (visible <= most) return;
    const int32_t least = least_chosen(scores, visible, most);
    int64_t equal = most - count_from(scores, visible, least + 1), found = 0;
    const auto look = [&](int64_t i) {
        const int32_t bits = bits_of(scores[i]);
        if (bits > least || (bits == least && equal-- > 0)) chosen[found++] = int32_t(i);
    };
    int64_t i = 0;
    for (; i + W <= visible && found < most; i += W) {
        if (!__builtin_reduce_or(load<i32>(scores + i) >= least)) continue;
        for (int j = 0; j < W; j++) look(i + j);
    }
    for (; i < visible && found < most; i++) look(i);
}

template <class E>
void run(const Choosing& c, int64_t how_many) {
    const int64_t num_tiles = (c.scored.outputs + OUTPUTS - 1) / OUTPUTS;
    const int64_t counts[] = {c.rows * c.heads, (num_tiles + TILES - 1) / TILES, c.rows};
    threads::in_phases<tiles::Use>(how_many, counts, 3, [&](int phase, int64_t item, tiles::Use&, int) {
        if (phase == 0) return products::prepare_row<E>(c.scored, c.scored.weight, c.scored.widened, item);
        if (phase == 2) return pick(c.scores + item * c.scored.outputs, c.visible[item], c.most, c.chosen + item * c.most);
        for (int64_t tile = item * TILES; tile < (item + 1) * TILES && tile < num_tiles; tile++) score<E>(c, tile);
    });
}

}  // namespace choosing
