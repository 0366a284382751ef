// Attention of a few rows over spans of keys, and the merge of the spans.
//
// A span is a part of a page: consecutive tokens in memory, the same for every pass that sees them. Each row attends to
// each span by itself; then its spans are merged, first to last. So a row's bits depend on what it sees alone: not on
// the rows beside it, on threads, or on when a span came. Merge by log-sum-exp: FlashAttention (Dao et al. 2022,
// section 3.1).
//
// Letters: T rows, G query heads for each of H KV heads, R = G * T folded rows (row t * G + g), D head dimension.
#pragma once
#include "kv_codes.h"
#include "latents.h"
#include "threads.h"
#include "vectors.h"

// Tokens `first` to `first` + `tokens` in pages of `page`, which are attended to in spans of `span`, a divisor of
// `page`. Keys of head h in page i are at keys + i * page_stride + h * head_stride, [page, D], values likewise. Strides
// count elements. slot: of its first span, in the order of the merge. query: which of a row's queries is meant for it.
// windowed: rows see of it what is in their window. room: tokens that there is memory for.
//
// coded: keys points to blocks of kv_codes.h, whole ones, those of head h at h * head_stride bytes; all rows see all of
// them, and no mass of theirs is kept. There is nothing at values.
//
// Where an attention is joined, a token's key and its value are the same 2 D numbers, of which keys has the first half
// and values the second, and so have queries and the output.
struct Run {
    const void* keys;
    const void* values;
    int64_t head_stride, page_stride;
    int64_t first, tokens, room, page, span;
    int64_t slot, query, windowed, coded;

    int64_t spans() const { return (tokens + span - 1) / span; }
};

// One span of one head.
struct Span {
    const void* keys;
    const void* values;
    int64_t first, count, slot, query;
    bool windowed;
};

constexpr float LOG2_E = 1.44269504f;

struct Attention {
    const float* queries;  // [queries, H, R, D]
    float* partials;       // [slots, H, R, 2 + room()]: largest score, sum, out
    float* masses;         // [slots, H, R, chunks], or null
    int64_t rows, group, kv_heads, head_dim;
    int64_t joined;
    int64_t position, window;  // position of row 0; tokens that a row sees of windowed spans
    int64_t chunk, chunks;     // tokens of a chunk, chunks of a span
    int64_t out_stride;        // elements from one row of `out` to the next
    int64_t slots;
    double scale;  // of products of queries and keys; 0: head_dim^-0.5
    double cap;    // c: c tanh(score / c) in place of a score; 0: it stays
    float* mass;  // [T, H, slots * chunks], or null
    void* out;    // [T, G * H * D]
    float* sums;  // null, or [T, G * H, 2]: largest score in powers of 2, and sum. Then `out` is fp32, and `mass` is
                  // [T, G * H, slots * chunks], of each query head
    const float* sink_logits;  // null, or [G * H]: each query head's, in its rows' softmax beside their scores

    int64_t halves() const { return 1 + joined; }
    int64_t held_dim() const { return head_dim / halves(); }  // of a token at keys, and at values

    template <class E>
    int room() const {
        return int(halves()) * padded<E>(int(held_dim()));
    }

    float score_scale() const { return scale ? float(scale) : 1 / __builtin_sqrtf(float(head_dim)); }

    // The scale of what `soften` gets, whose weights are powers of 2 and not of e.
    float in_powers_of_two() const {
        if (cap) return LOG2_E;
        return scale ? LOG2_E * float(scale) : LOG2_E / __builtin_sqrtf(float(head_dim));
    }
};

namespace attention {

constexpr int KEYS = 2 * W;    // of a panel
constexpr int AHEAD = 64;      // tokens that values are fetched ahead, to the second cache
constexpr int KEYS_AHEAD = 32;  // and keys
constexpr float NONE = -__builtin_huge_valf();

struct Range {
    int from, to;
};

// What rows `first` to `last` see of the span together, as numbers of its tokens.
inline Range seen_by(const Attention& a, const Span& s, int64_t first, int64_t last) {
    int64_t to = a.position + last + 1 - s.first;
    int64_t from = s.windowed ? a.position + first + 1 - s.first - a.window : 0;
    to = to < s.count ? to : s.count;
    from = from > 0 ? from : 0;
    return to > from ? Range{int(from), int(to)} : Range{0, 0};
}

// W keys as columns: panel[d][key]. units_of(i) gives those of key i.
template <class E, class F>
INLINE void fill_columns(F&& units_of, int units, float* panel) {
    u32 rows[W];
#pragma unroll
    for (int i = 0; i < W; i++) rows[i] = units_of(i);
    transpose(rows);
#pragma unroll
    for (int i = 0; i < W; i++) {
        if (i >= units) break;
#pragma unroll
        for (int e = 0; e < E::per_unit; e++) store(panel + (i * E::per_unit + e) * KEYS, widen<E>(rows[i], e));
    }
}

// KEYS keys as columns: panel[d][key]. Past `count` they are zeros.
template <class E>
inline void fill_panel(const typename E::element* keys, int count, int dim, float* panel) {
    for (int block = 0; block < KEYS; block += W)
        for (int at = 0; at < dim; at += wide<E>) {
            const int units = (dim - at) / E::per_unit;
            auto from = keys + int64_t(block) * dim + at;
#pragma unroll
            for (int i = 0; i < W; i++) __builtin_prefetch(from + int64_t(i + KEYS_AHEAD) * dim, 0, 2);
            float* to = panel + int64_t(at) * KEYS + block;
            if (units >= W && block + W <= count)
                fill_columns<E>([&](int i) { return load<u32>(from + int64_t(i) * dim); }, W, to);
            else
                fill_columns<E>(
                    [&](int i) {
                        return block + i < count ? load_some(from + int64_t(i) * dim, units < W ? units : W) : u32{};
                    },
                    units, to);
        }
}

// scores[r][0..KEYS) of ROWS rows.
template <int ROWS>
inline void score(const float* queries, const float* panel, int dim, float* scores, int stride) {
    f32 acc[ROWS][2] = {};
    for (int d = 0; d < dim; d++) {
        f32 first = load<f32>(panel + d * KEYS), second = load<f32>(panel + d * KEYS + W);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            f32 q = all(queries[r * dim + d]);
            acc[r][0] = fma(q, first, acc[r][0]);
            acc[r][1] = fma(q, second, acc[r][1]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        store(scores + r * stride, acc[r][0]);
        store(scores + r * stride + W, acc[r][1]);
    }
}

// Products of a row with keys to capped scores in place. Beyond 1 tanh x is 1 - 2 / (1 + e^2x); below it that would
// cancel, and Lambert's continued fraction to its seventh term is as near as fp32. What is not a number stays so.
inline void cap_scores(float* scores, int stride, float scale, float cap) {
    for (int i = 0; i < stride; i += W) {
        f32 score = load<f32>(scores + i) * scale, x = score / cap, u = x * x;
        f32 power = 2 * LOG2_E * x;
        power = power > 64.0f ? all(64.0f) : power;
        power = power < -64.0f ? all(-64.0f) : power;
        f32 far = cap - 2 * cap / (1 + exp2(power));
        f32 near = score * (((u + 378) * u + 17325) * u + 135135) / (((28 * u + 3150) * u + 62370) * u + 135135);
        store(scores + i, u < 1.0f ? near : far);
    }
}

// Products of a row with keys to weights in place, 0 for what it does not see; -> largest score, in powers of 2, and
// sum. What is not a number stays so.
inline void soften(float* scores, int stride, Range seen, float scale, float* top, float* total) {
    if (seen.to == seen.from) {
        for (int i = 0; i < stride; i += W) store(scores + i, f32{});
        *top = NONE, *total = 0;
        return;
    }
    i32 lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    f32 most = all(NONE);
    for (int i = 0; i < stride; i += W) {
        i32 at = lane + i;
        f32 s = load<f32>(scores + i) * scale;
        s = ((at >= seen.from) & (at < seen.to)) ? s : all(NONE);
        store(scores + i, s);
        most = larger(most, s);
    }
    *top = largest(most);
    f32 added = {};
    for (int i = 0; i < stride; i += W) {
        f32 weight = exp2(load<f32>(scores + i) - *top);
        weight = load<f32>(scores + i) == NONE ? f32{} : weight;
        store(scores + i, weight);
        added += weight;
    }
    *total = sum(added);
}

// out[r] of ROWS rows and BLOCKS vectors of units of the values: sum over `keys` of weight * value. units: in a token's
// values from there on.
template <class E, int ROWS, int BLOCKS>
INLINE void mix(const typename E::element* values, int dim, int units, Range keys, const float* weights, int stride,
                float* out, int64_t out_stride) {
    f32 acc[ROWS][BLOCKS][E::per_unit] = {};
    for (int j = keys.from; j < keys.to; j++) {
        auto from = values + int64_t(j) * dim;
        f32 parts[BLOCKS][E::per_unit];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            __builtin_prefetch(from + AHEAD * dim + b * wide<E>, 0, 2);
            u32 v = units >= W * (b + 1) ? load<u32>(from + b * wide<E>) : load_some(from + b * wide<E>, units - W * b);
#pragma unroll
            for (int e = 0; e < E::per_unit; e++) parts[b][e] = widen<E>(v, e);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            f32 weight = all(weights[r * stride + j]);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int e = 0; e < E::per_unit; e++) acc[r][b][e] = fma(weight, parts[b][e], acc[r][b][e]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int e = 0; e < E::per_unit; e++) store(out + r * out_stride + b * wide<E> + e * W, acc[r][b][e]);
}

// Elements from head 0's part of the run to token `at` of it.
inline int64_t place_in(const Run& run, int64_t at, int64_t dim) {
    return at / run.page * run.page_stride + at % run.page * dim;
}

template <class E>
inline Span span_of(const Run& run, int64_t number, int64_t head, int64_t dim) {
    using element = typename E::element;
    const int64_t at = number * run.span, rest = run.tokens - at;
    const int64_t offset = place_in(run, at, dim) + head * run.head_stride;
    return {static_cast<const element*>(run.keys) + offset, static_cast<const element*>(run.values) + offset,
            run.first + at, rest < run.span ? rest : run.span, run.slot + number, run.query, run.windowed != 0};
}

// What is worked on: `folded` rows of queries [folded, dim], `count` keys, and scores in rows of `stride`.
struct Part {
    const float* queries;
    int folded, dim, count, stride;
};

template <class E>
void score_all(const Part& p, const typename E::element* keys, float* scores, float* panel) {
    for (int at = 0; at < p.stride; at += KEYS) {
        fill_panel<E>(keys + int64_t(at) * p.dim, p.count - at, p.dim, panel);
        by_rows(p.folded, [&]<int ROWS>(int r) {
            score<ROWS>(p.queries + r * p.dim, panel, p.dim, scores + int64_t(r) * p.stride + at, p.stride);
        });
    }
}

template <class E>
void mix_all(const Part& p, int from, const typename E::element* values, const float* weights, float* out,
             int64_t out_stride) {
    const int room = padded<E>(p.dim);
    const Range keys{from, p.count};
    by_rows(p.folded, [&]<int ROWS>(int r) {
        constexpr int blocks = ROWS * E::per_unit <= (W == 16 ? 8 : 4) ? 2 : 1;
        const float* own = weights + int64_t(r) * p.stride;
        float* to = out + r * out_stride;
        int at = 0;
        auto units = [&] { return (p.dim - at) / E::per_unit; };
        for (; at + blocks * wide<E> <= room; at += blocks * wide<E>)
            mix<E, ROWS, blocks>(values + at, p.dim, units(), keys, own, p.stride, to + at, out_stride);
        for (; at < room; at += wide<E>)
            mix<E, ROWS, 1>(values + at, p.dim, units(), keys, own, p.stride, to + at, out_stride);
    });
}

// Scores [R, stride] of tokens from `begin` of the span on to weights in place; -> largest scores and sums, in the
// partial results, and masses [R, chunks], unless null.
inline void soften_all(const Attention& a, const Span& s, int begin, int stride, float* scores, float* partials,
                       int64_t size, float* masses) {
    const float scale = a.in_powers_of_two();
    for (int r = 0; r < a.rows * a.group; r++) {
        Range own = seen_by(a, s, r / a.group, r / a.group);
        if (own.to > own.from) own = {own.from - begin, own.to - begin};
        float* row = scores + int64_t(r) * stride;
        if (a.cap) cap_scores(row, stride, a.score_scale(), float(a.cap));
        soften(row, stride, own, scale, partials + r * size, partials + r * size + 1);
        if (!masses) continue;
        float* mass = masses + r * a.chunks;
        for (int c = 0; c < a.chunks; c++) {
            float total = 0;
            const int64_t from = c * a.chunk - begin, to = from + a.chunk;
            for (int64_t i = from > 0 ? from : 0; i < (to < stride ? to : stride); i++) total += row[i];
            mass[c] = total;
        }
    }
}

// Rows over one head of a span. queries [R, D], partials [R, 2 + room()], masses [R, chunks] or null: those of the rows.
// scratch: `scratch_room`.
template <class E>
void attend_rows(const Attention& a, const Span& s, const float* queries, float* partials, float* masses,
                 float* scratch) {
    using element = typename E::element;
    const int dim = int(a.held_dim()), folded = int(a.rows * a.group);
    const int64_t size = 2 + a.room<E>();
    const Range some = seen_by(a, s, 0, a.rows - 1);
    const int begin = some.from / KEYS * KEYS, count = some.to - begin, stride = (count + KEYS - 1) / KEYS * KEYS;
    const element* const held[] = {static_cast<const element*>(s.keys) + int64_t(begin) * dim,
                                   static_cast<const element*>(s.values) + int64_t(begin) * dim};
    float *scores = scratch, *rest = scratch + int64_t(folded) * stride;
    if (a.joined) {
        latents::score_all<E>(queries, folded, dim, held, count, scores, stride, rest);
        soften_all(a, s, begin, stride, scores, partials, size, masses);
        for (int r = 0; r < folded; r++) {
            float* total = partials + r * size + 1;  // of the rounded weights; masses stay those before
            *total = latents::fill_weights<E>(scores + int64_t(r) * stride, stride, *total);
        }
        for (int half = 0; half < 2; half++)
            latents::mix_all<E>(scores, folded, stride, held[half], dim, some.from - begin, count,
                                partials + 2 + half * padded<E>(dim), size, rest);
        return;
    }
    const Part part{queries, folded, dim, count, stride};
    score_all<E>(part, held[0], scores, rest);
    soften_all(a, s, begin, stride, scores, partials, size, masses);
    mix_all<E>(part, some.from - begin, held[1], scores, partials + 2, size);
}

// All rows over one head of one span. scratch: `scratch_room`.
template <class E>
void attend_one(const Attention& a, const Span& s, int64_t head, float* scratch) {
    const int64_t folded = a.rows * a.group, base = (s.slot * a.kv_heads + head) * folded;
    const float* queries = a.queries + (s.query * a.kv_heads + head) * folded * a.head_dim;
    float* masses = a.masses ? a.masses + base * a.chunks : nullptr;
    attend_rows<E>(a, s, queries, a.partials + base * (2 + a.room<E>()), masses, scratch);
}

// All rows over one head of span `number` of a run of codes, whose rows are halves: decoded to the dtype, they are
// attended to as any. scratch: their numbers, then what `attend_one` needs.
template <class E>
void attend_joined_codes(const Attention& a, const Run& run, int64_t number, int64_t head, float* scratch) {
    using kv_codes::GROUP;
    using element = typename E::element;
    const kv_codes::Layout layout{int(a.held_dim())};
    const int64_t first = number * run.span, rest = run.tokens - first, count = rest < run.span ? rest : run.span;
    auto keys = reinterpret_cast<element*>(scratch), values = keys + run.span * layout.dim;
    auto blocks = static_cast<const uint8_t*>(run.keys) + head * run.head_stride + first / GROUP * layout.size();
    for (int64_t t = 0; t < count; t += GROUP)
        kv_codes::decode_block<E>(blocks + t / GROUP * layout.size(), layout, keys + t * layout.dim,
                                  values + t * layout.dim);
    Attention all_seen = a;  // but no masses
    all_seen.masses = nullptr, all_seen.position = count;
    const Span span{keys, values, 0, count, run.slot + number, run.query, false};
    attend_one<E>(all_seen, span, head, scratch + run.span * a.head_dim);
}

// All rows over one head of span `number` of a run of codes. scratch: scores [R, tokens of the span].
template <class E>
void attend_codes(const Attention& a, const Run& run, int64_t number, int64_t head, float* scratch) {
    using kv_codes::GROUP;
    const kv_codes::Layout layout{int(a.head_dim)};
    const int dim = layout.dim, folded = int(a.rows * a.group), room = padded<E>(dim);
    const int64_t size = 2 + room, first = number * run.span, rest = run.tokens - first;
    const int count = int(rest < run.span ? rest : run.span);
    auto blocks = static_cast<const uint8_t*>(run.keys) + head * run.head_stride + first / GROUP * layout.size();
    float* partials = a.partials + ((run.slot + number) * a.kv_heads + head) * folded * size;
    const float* queries = a.queries + (run.query * a.kv_heads + head) * folded * dim;
    const float scale = a.in_powers_of_two();
    by_rows(folded, [&]<int ROWS>(int r) {
        const int width = kv_codes::room_for(layout.channels());
        alignas(64) float out[ROWS * kv_codes::room_for(kv_codes::WIDEST)];
        __builtin_memset(out, 0, ROWS * width * sizeof(float));
        for (int t = 0; t < count; t += GROUP)
            kv_codes::score<ROWS>(queries + r * dim, blocks + t / GROUP * layout.size(), layout, scratch + t, count);
        for (int i = 0; i < ROWS; i++) {
            float* partial = partials + (r + i) * size;
            if (a.cap) cap_scores(scratch + i * count, count, a.score_scale(), float(a.cap));
            soften(scratch + i * count, count, {0, count}, scale, partial, partial + 1);
        }
        for (int t = 0; t < count; t += GROUP)
            kv_codes::mix<ROWS>(scratch + t, count, blocks + t / GROUP * layout.size(), layout, out, width);
        for (int i = 0; i < ROWS; i++) {
            float* to = partials + (r + i) * size + 2;
            for (int d = 0; d < room; d++) to[place<E>(d)] = d < dim ? out[i * width + d] : 0;
        }
    });
}

// One row of query heads `begin` to `end` of one KV head: their sink logits, then their spans, first to last.
template <class E>
void merge_one(const Attention& a, int64_t t, int64_t head, int64_t begin, int64_t end) {
    const int dim = int(a.head_dim), room = a.room<E>(), held = int(a.held_dim());
    const int64_t folded = a.rows * a.group, size = 2 + room, step = a.kv_heads * folded * size;
    const int64_t columns = a.slots * a.chunks;
    for (int64_t g = begin; g < end; g++) {
        const int64_t row = head * folded + t * a.group + g;
        const int64_t query_head = head * a.group + g, at = t * a.kv_heads * a.group + query_head;
        const float* partial = a.partials + row * size;
        const float sink = a.sink_logits ? a.sink_logits[query_head] * LOG2_E : NONE;
        float top = sink;
        for (int64_t i = 0; i < a.slots; i++) top = partial[i * step] > top ? partial[i * step] : top;
        float total = sink == NONE ? 0 : exp2(all(sink - top))[0];
        float out[1024] = {};
        for (int64_t i = 0; i < a.slots; i++) {
            const float* p = partial + i * step;
            if (p[0] == NONE) continue;
            float share = exp2(all(p[0] - top))[0];
            total = __builtin_fmaf(share, p[1], total);
            for (int d = 0; d < room; d += W) store(out + d, fma(all(share), load<f32>(p + 2 + d), load<f32>(out + d)));
        }
        for (int d = 0; d < room; d += W) store(out + d, total == 0 ? f32{} : load<f32>(out + d) / total);
        auto value = [&](int d) { return out[d / held * padded<E>(held) + place<E>(d % held)]; };
        const int64_t first = t * a.out_stride + query_head * dim;
        if (a.sums) {
            a.sums[2 * at] = top, a.sums[2 * at + 1] = total;
            for (int d = 0; d < dim; d++) static_cast<float*>(a.out)[first + d] = value(d);
        } else {
            auto to = static_cast<typename E::element*>(a.out) + first;
            for (int d = 0; d < dim; d++) to[d] = E::round_one(value(d));
        }
        float* mass = a.mass ? a.mass + (a.sums ? at : t * a.kv_heads + head) * columns : nullptr;
        for (int64_t i = 0; mass && (a.sums || g == 0) && i < columns; i++) mass[i] = 0;
        for (int64_t i = 0; mass && i < a.slots; i++) {
            if (partial[i * step] == NONE) continue;
            float share = exp2(all(partial[i * step] - top))[0] / total;
            const float* own = a.masses + (i * a.kv_heads * folded + row) * a.chunks;
            for (int64_t c = 0; c < a.chunks; c++) mass[i * a.chunks + c] += share * own[c];
        }
    }
}

// All slots of one KV head's rows -> out and mass: the items of a merge. Masses of a KV head are sums over its query
// heads, which one thread then merges.
struct Merge {
    int64_t parts, heads, items;

    explicit Merge(const Attention& a)
        : parts(a.mass && !a.sums ? 1 : a.group), heads(a.group / parts), items(a.rows * a.kv_heads * parts) {}

    template <class E>
    void run(const Attention& a, int64_t item) const {
        const int64_t begin = item % parts * heads, of_kv_heads = item / parts;
        merge_one<E>(a, of_kv_heads / a.kv_heads, of_kv_heads % a.kv_heads, begin, begin + heads);
    }
};

// The runs' spans -> partials, at their slots. is_last: all other runs have their partials, and are merged with these.
template <class E>
void attend(const Attention& a, const Run* runs, int64_t count, float* scratch, int64_t room, bool is_last,
            int64_t how_many) {
    struct Place {  // how far a thread has come: its items ascend
        int64_t before = 0, run = 0;
    };
    const Merge merge(a);
    int64_t counts[] = {0, merge.items};
    for (int64_t i = 0; i < count; i++) counts[0] += runs[i].spans() * a.kv_heads;
    threads::in_phases<Place>(how_many, counts, 1 + is_last, [&](int phase, int64_t item, Place& at, int thread) {
        if (phase == 1) return merge.run<E>(a, item);
        for (; item - at.before >= runs[at.run].spans() * a.kv_heads; at.run++)
            at.before += runs[at.run].spans() * a.kv_heads;
        const int64_t span = (item - at.before) / a.kv_heads, head = (item - at.before) % a.kv_heads;
        float* own = scratch + thread * room;
        if (runs[at.run].coded && a.joined) attend_joined_codes<E>(a, runs[at.run], span, head, own);
        else if (runs[at.run].coded) attend_codes<E>(a, runs[at.run], span, head, own);
        else attend_one<E>(a, span_of<E>(runs[at.run], span, head, a.held_dim()), head, own);
    });
}

// All slots -> out and mass.
template <class E>
void merge(const Attention& a, int64_t how_many) {
    const Merge all(a);
    threads::each(how_many, all.items, [&](int64_t item) { all.run<E>(a, item); });
}

// Floats of scratch that a thread needs for spans of at most `count` tokens, so that the next thread's is aligned.
template <class E>
inline int64_t scratch_room(int64_t dim, int64_t folded, int64_t count, bool joined) {
    const int64_t stride = (count + 2 * KEYS - 1) / KEYS * KEYS;
    int64_t rest = dim * KEYS;
    if (joined) {
        const int64_t scoring = latents::score_room<E>(int(folded), int(dim / 2));
        const int64_t mixing = latents::mix_room<E>(int(count)), decoded = count * dim;
        rest = (scoring > mixing ? scoring : mixing) + decoded;
    }
    return (folded * stride + rest + 31) / 32 * 32;
}

}  // namespace attention
