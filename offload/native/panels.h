// Products of many rows with a weight, as a prefill has them.
//
// The numbers of a weight are made once for up to MOST_ROWS rows, rounded to the dtype, and lie in a panel: of COLUMNS
// outputs and UNITS units of inputs, output by output beside each other, so that a unit of a row is multiplied with
// vectors of outputs. A unit is a pair of bf16 where the processor multiplies pairs, else a number in fp32. A sum runs
// over the inputs in their order, whatever rows are beside it: its bits depend on the row and the weight alone.
#pragma once
#include "products.h"

namespace panels {

constexpr int COLUMNS = W == 16 ? 32 : 16, VECTORS = COLUMNS / W;
constexpr int UNITS = 256;
constexpr int MOST_ROWS = 256;
constexpr int TOGETHER = W == 16 ? 12 : 6;  // rows whose sums are in registers
constexpr int PACKED = 2 * tiles::SIDE;     // rows that are packed together, at most

// Inputs of a unit.
template <class E>
constexpr int each = in_pairs<E> ? 2 : 1;

// What a thread works with. packed: units of some rows, zeros past their end.
struct Local {
    tiles::Use use;
    alignas(64) uint32_t panel[UNITS][COLUMNS];
    alignas(64) uint32_t packed[PACKED][UNITS];
    alignas(64) float sums[2][MOST_ROWS + PACKED][COLUMNS];
};

// W units of a row of `inputs` numbers from unit `first` on, zeros past its end.
template <class E>
INLINE u32 units_at(const typename E::element* row, int64_t inputs, int64_t first) {
    const int64_t left = inputs - first * each<E>;
    if constexpr (in_pairs<E>) return left >= 2 * W ? load<u32>(row + 2 * first) : load_some(row + 2 * first, int(left / 2));
    return (u32)read_some<E>(row + first, left);
}

// Fills the panel with `count` outputs of E, [count, inputs], and zeros beside them: `units` of them from unit `first` on.
template <class E>
void fill(const typename E::element* weight, int64_t inputs, int count, int64_t first, int units,
          uint32_t (*panel)[COLUMNS]) {
    for (int column = 0; column < COLUMNS; column += W)
        for (int at = 0; at < units; at += W) {
            u32 rows[W] = {};
            for (int i = 0; i < W && column + i < count; i++)
                rows[i] = units_at<E>(weight + (column + i) * inputs, inputs, first + at);
            transpose(rows);
            for (int i = 0; i < W; i++) store(panel[at + i] + column, rows[i]);
        }
}

// sums[r] += the products of ROWS packed rows with a panel of so many units.
template <class E, int ROWS>
void add(const Local& local, const uint32_t (*packed)[UNITS], int units, float (*sums)[COLUMNS]) {
    f32 acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = load<f32>(sums[r] + v * W);
    for (int u = 0; u < units; u++) {
        u32 weight[VECTORS];
        for (int v = 0; v < VECTORS; v++) weight[v] = load<u32>(local.panel[u] + v * W);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u32 x = packed[r][u] - u32{};
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] = in_pairs<E> ? add_pairs(acc[r][v], x, weight[v]) : fma((f32)x, (f32)weight[v], acc[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(sums[r] + v * W, acc[r][v]);
}

// The same of up to PACKED rows; sums past the last of them become any numbers.
template <class E>
void add_rows(const Local& local, int rows, int units, float (*sums)[COLUMNS]) {
    if constexpr (tiles::take<E>) {
        for (int r = 0; r < rows; r += tiles::SIDE)
            tiles::add<COLUMNS>(local.packed[r], UNITS, local.panel[0], units, sums[r]);
    } else {
        constexpr int some = TOGETHER / 3;
        int r = 0;
        while (r < rows) {
            const auto by = [&]<int ROWS>() { add<E, ROWS>(local, local.packed + r, units, sums + r), r += ROWS; };
            if (rows - r > 2 * some) by.template operator()<3 * some>();
            else if (rows - r > some) by.template operator()<2 * some>();
            else by.template operator()<some>();
        }
    }
}

// sums of `rows` rows with `count` outputs of E, [count, inputs]. row(r): of E, [inputs].
template <class E, class Row>
void multiply(const typename E::element* weight, int64_t inputs, int count, int rows, Row&& row, Local& local,
              float (*sums)[COLUMNS]) {
    constexpr int together = tiles::take<E> ? PACKED : TOGETHER;
    const int64_t all_units = inputs / each<E>;
    __builtin_memset(sums, 0, (rows + PACKED) * sizeof *sums);
    for (int64_t first = 0; first < all_units; first += UNITS) {
        const int left = int(all_units - first < UNITS ? all_units - first : UNITS), units = (left + W - 1) / W * W;
        fill<E>(weight, inputs, count, first, units, local.panel);
        for (int from = 0; from < rows; from += together) {
            const int some = rows - from < together ? rows - from : together;
            for (int r = 0; r < some; r++)
                for (int at = 0; at < units; at += W)
                    store(local.packed[r] + at, units_at<E>(row(from + r), inputs, first + at));
            add_rows<E>(local, some, units, sums + from);
        }
    }
}

// The outputs of panel `panel` of rows [begin, begin + rows): their products with their ending. row(r): of E, [inputs].
// decoded: room for 2 * COLUMNS rows of a matrix.
template <class E, class Row>
void work_out(const Product& p, int64_t begin, int64_t rows, int64_t panel, Row&& row, Local& local,
              typename E::element* decoded) {
    using element = typename E::element;
    const int64_t first = panel * COLUMNS;
    const int count = int(p.outputs - first < COLUMNS ? p.outputs - first : COLUMNS);
    const auto numbers = [&](const stored::Matrix& m, element* to) {
        if (m.kind == stored::Kind::none) return static_cast<const element*>(m.rows) + first * p.inputs;
        stored::decode_rows<E>(m, p.inputs, first, count, to);
        return static_cast<const element*>(to);
    };
    const bool gated = p.ending == Ending::gate;
    const element* weight[2] = {numbers(p.weight, decoded)};
    if (gated) weight[1] = numbers(p.up, decoded + COLUMNS * p.inputs);
    for (int64_t from = begin; from < begin + rows; from += MOST_ROWS) {
        const int some = int(begin + rows - from < MOST_ROWS ? begin + rows - from : MOST_ROWS);
        for (int i = 0; i < 1 + gated; i++) {
            multiply<E>(weight[i], p.inputs, count, some, [&](int r) { return row(from + r); }, local, local.sums[i]);
            if (!p.bias) continue;
            const auto bias = static_cast<const element*>(p.bias) + i * p.outputs + first;
            for (int r = 0; r < some; r++)
                for (int c = 0; c < count; c++) local.sums[i][r][c] += E::widen_one(bias[c]);
        }
        auto out = static_cast<element*>(p.out) + from * p.out_stride + first;
        for (int r = 0; r < some; r++, out += p.out_stride)
            for (int c = 0; c < count; c += products::OUTPUTS) {
                const int own = count - c < products::OUTPUTS ? count - c : products::OUTPUTS;
                products::finish<E>(p, local.sums[0][r] + c, local.sums[1][r] + c, out + c, own);
            }
    }
}

}  // namespace panels
