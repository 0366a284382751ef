// New rows: queries and keys are rotated, queries are widened, keys and values are written to their places in a cache.
// The roundings are those of kernels/rope.py.
#pragma once
#include "attention.h"
#include "vectors.h"

// q [T, G * H, D], k and v [T, H, D] in rows of so many elements; k null: queries only. cos, sin: the tables of all
// positions, [n, width]; of each half of a head the first width / 2 numbers are rotated, D / 2 or fewer. growth: what queries at these are multiplied by once they are rotated, [n], or null. q_weight,
// k_weight: what rotated heads are multiplied by, [D], or null. position: of row 0 in the tables; no row is rotated by a
// later one than `last`. index: of row 0 among the runs' tokens. A row is written where a run has room for its index.
// joined: k has a token's whole row, whose halves are written where keys and values of other attentions are; v is not
// read.
struct Rotation {
    const void* q;
    const void* k;
    const void* v;
    const void* cos;
    const void* sin;
    const void* growth;
    const void* q_weight;
    const void* k_weight;
    float* queries;  // [H, R, D]; null: keys and values only
    const Run* runs;
    int64_t count;  // of the runs
    int64_t q_stride, k_stride, v_stride;
    int64_t rows, group, kv_heads, head_dim;
    int64_t joined, width;
    int64_t position, last, index;
};

// The norm of x [rows, heads, D], in rows of `stride` elements: each head's part by itself. fp32: the norm's weights
// [D] are, else of the dtype.
struct HeadNorm {
    void* x;
    const void* norm;
    int64_t fp32, heads, dim, stride;
    double epsilon;
};

namespace rotation {

template <class E>
inline float turned(const typename E::element* x, const typename E::element* cos, const typename E::element* sin,
                    int d, int dim, int width) {
    const bool first = d < dim / 2;
    const int other = first ? d + dim / 2 : d - dim / 2, within = first ? d : other;
    if (within >= width / 2) return E::widen_one(x[d]);
    const int at = first ? within : within + width / 2;
    const float straight = rounded<E>(E::widen_one(x[d]) * E::widen_one(cos[at]));
    const float across = rounded<E>(E::widen_one(x[other]) * E::widen_one(sin[at]));
    return rounded<E>(straight + across);
}

// The same of W numbers that are all rotated, from number d of a half on.
template <class E>
INLINE f32 turned_all(const typename E::element* x, const typename E::element* cos, const typename E::element* sin, int d,
                      int other, int at) {
    const f32 straight = E::rounded(E::read(x + d) * E::read(cos + at)), across = E::rounded(E::read(x + other) * E::read(sin + at));
    return E::rounded(straight + across);
}

template <class E>
inline float weight_of(const void* weight, int d) {
    return weight ? E::widen_one(static_cast<const typename E::element*>(weight)[d]) : 1;
}

template <class E>
void write_row(const Rotation& r, int64_t t, const typename E::element* cos, const typename E::element* sin) {
    using element = typename E::element;
    const int dim = int(r.head_dim), held = dim / int(1 + r.joined);
    for (int64_t i = 0; i < r.count; i++) {
        const Run& run = r.runs[i];
        const int64_t at = r.index + t - run.first;
        if (at < 0 || at >= run.room) continue;
        const int64_t offset = attention::place_in(run, at, held);
        for (int64_t h = 0; h < r.kv_heads; h++) {
            auto key = static_cast<element*>(const_cast<void*>(run.keys)) + offset + h * run.head_stride;
            auto value = static_cast<element*>(const_cast<void*>(run.values)) + offset + h * run.head_stride;
            auto k = static_cast<const element*>(r.k) + t * r.k_stride + h * dim;
            auto number = [&](int d) { return E::round_one(turned<E>(k, cos, sin, d, dim, int(r.width)) * weight_of<E>(r.k_weight, d)); };
            for (int d = 0; d < held; d++) key[d] = number(d);
            if (r.joined)
                for (int d = 0; d < held; d++) value[d] = number(held + d);
            else __builtin_memcpy(value, static_cast<const element*>(r.v) + t * r.v_stride + h * dim, dim * sizeof(element));
        }
    }
}

template <class E>
void append_rows(const Rotation& r) {
    using element = typename E::element;
    const int dim = int(r.head_dim);
    const int64_t folded = r.rows * r.group;
    for (int64_t t = 0; t < r.rows; t++) {
        const int64_t row = r.position + t < r.last ? r.position + t : r.last;
        const int width = int(r.width);
        auto cos = static_cast<const element*>(r.cos) + row * width, sin = static_cast<const element*>(r.sin) + row * width;
        auto growth = static_cast<const element*>(r.growth);
        const float factor = growth ? E::widen_one(growth[row]) : 1;
        for (int64_t h = 0; r.queries && h < r.kv_heads * r.group; h++) {
            float* to = r.queries + (h / r.group * folded + t * r.group + h % r.group) * dim;
            auto from = static_cast<const element*>(r.q) + t * r.q_stride + h * dim;
            if (factor == 1 && !r.q_weight) {  // what is not rotated is widened alone
                for (int half = 0; half < dim; half += dim / 2) {
                    const int stop = half + width / 2, whole = half + width / 2 / W * W, at = half ? width / 2 : 0;
                    for (int d = half; d < whole; d += W)
                        store(to + d, turned_all<E>(from, cos, sin, d, (d + dim / 2) % dim, d - half + at));
                    for (int d = whole; d < stop; d++) to[d] = turned<E>(from, cos, sin, d, dim, width);
                    for (int d = half + width / 2; d < half + dim / 2; d++) to[d] = E::widen_one(from[d]);
                }
                continue;
            }
            for (int d = 0; d < dim; d++)
                to[d] = rounded<E>(turned<E>(from, cos, sin, d, dim, width) * factor * weight_of<E>(r.q_weight, d));
        }
        if (r.k) write_row<E>(r, t, cos, sin);
    }
}

// SOME heads, one after the other, normed in place. A head's sum is one chain: several run at once.
template <class E, int SOME>
void norm_some(const HeadNorm& n, typename E::element* x) {
    const int64_t dim = n.dim;
    auto weight = [&](int64_t d) {
        return n.fp32 ? static_cast<const float*>(n.norm)[d]
                      : E::widen_one(static_cast<const typename E::element*>(n.norm)[d]);
    };
    float squares[SOME] = {};
    for (int64_t d = 0; d < dim; d++)
#pragma unroll
        for (int i = 0; i < SOME; i++) squares[i] += E::widen_one(x[i * dim + d]) * E::widen_one(x[i * dim + d]);
    for (int i = 0; i < SOME; i++) {
        const float scale = 1.0f / __builtin_sqrtf(squares[i] / float(dim) + float(n.epsilon));
        for (int64_t d = 0; d < dim; d++)
            x[i * dim + d] = E::round_one(E::widen_one(x[i * dim + d]) * scale * weight(d));
    }
}

// Each head of `rows` rows of all parts.
template <class E>
void norm_heads(const HeadNorm* parts, int64_t count, int64_t rows) {
    constexpr int SOME = 4;
    for (const HeadNorm* n = parts; n < parts + count; n++)
        for (int64_t row = 0; row < rows; row++) {
            auto x = static_cast<typename E::element*>(n->x) + row * n->stride;
            int64_t head = 0;
            for (; head + SOME <= n->heads; head += SOME) norm_some<E, SOME>(*n, x + head * n->dim);
            for (; head < n->heads; head++) norm_some<E, 1>(*n, x + head * n->dim);
        }
}

}  // namespace rotation
