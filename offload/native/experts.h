// A mixture of experts over some rows (kernels/experts.py).
//
// Rows are scored in fp32, and what each of its experts makes of a row is rounded to the dtype, as by products.h. Rows of
// an expert lie together, so its weights are read once for all of them; a row's bits depend neither on the rows beside it
// nor on threads. The sum over a row's experts runs in the order in which they were chosen, in fp32, and is rounded once.
#pragma once
#include "panels.h"

// scored: whose rows and norm are those that are scored; the rest of it is not used. gate_up, down: the products of the
// expert at the beginning of a bank, x of the one being `rows` rows, and out of the one and x of the other scratch
// [lines, inner], out of the other [lines, outputs]; with scratch for as many rows. step: bytes from an expert of the
// bank to the next one. bank_place: [count], of each expert, or -1 if it is not there. router: [num_scores, inputs]
// fp32, of the experts and, if there are more scores, of the gate of what is beside. router_bias, router_scale: [count]
// fp32, or null. Scratch: normed [rows, inputs], scores [rows, num_scores], line_of [rows, used], row_of and expert_of
// [lines], starts [3, count]. chosen, weights: [rows, used], of each row the first rank first. beside: [rows, outputs],
// added to the sum, or null. out: [rows, outputs]. For `run_many`, laid: scratch for normed rows of the dtype, [rows,
// inputs]; decoded: for each thread [2, panels::COLUMNS, the longer of inputs and inner] of it. inputs and outputs are multiples of 16. The numbers from `renormalised`
// on are those of config.block.Experts; groups: at most 64; score_cap: 0 for none. factor, sum_factor, both_factor: its factors.
struct Experts {
    Product scored, gate_up, down;
    const int32_t* bank_place;
    const float *router, *router_bias, *router_scale;
    float *normed, *scores;
    int32_t *line_of, *row_of, *expert_of, *starts, *chosen;
    float* weights;
    const void* beside;
    void *out, *laid, *decoded;
    int64_t step, count, num_scores, used, lines, renormalised, sigmoid, biased;
    int64_t needs_softmax, ranks_scores, groups, groups_used, group_best, floored, rounds_scores, rounds_shares;
    double score_scale, score_cap, factor, sum_factor, both_factor, eps;
};

namespace experts {

constexpr int SIDE = tiles::SIDE;  // an expert's rows begin at multiples of it
constexpr int SCORES = 8;          // of a row, that are worked out together

template <class E>
void norm_row(const Experts& e, int64_t row) {
    const int64_t inputs = e.scored.inputs;
    products::read_row<E>(e.scored, row, [&](auto&& read) {
        for (int64_t at = 0; at < inputs; at += W) store(e.normed + row * inputs + at, read(int(at)));
    });
}

inline void score(const Experts& e, int64_t row, int64_t first) {
    const int64_t inputs = e.scored.inputs;
    const float* x = e.normed + row * inputs;
    for (int64_t i = first; i < first + SCORES && i < e.num_scores; i++) {
        const float* own = e.router + i * inputs;
        f32 total = {};
        for (int64_t at = 0; at < inputs; at += W) {
            __builtin_prefetch(reinterpret_cast<const char*>(own + at) + stored::AHEAD);
            total = fma(load<f32>(x + at), load<f32>(own + at), total);
        }
        e.scores[row * e.num_scores + i] = sum(total) * float(e.score_scale);
    }
}

inline float power(float x) { return exp2(all(x * 1.44269504f))[0]; }  // e^x for x <= 0

inline float sigmoid(float x) {
    const float small = power(x < 0 ? x : -x);
    return (x < 0 ? small : 1) / (1 + small);
}

inline float largest(const Experts& e, const float* scores) {
    float most = scores[0];
    for (int64_t expert = 1; expert < e.count; expert++) most = scores[expert] > most ? scores[expert] : most;
    return most;
}

// Makes shares of a row's scores. A softmax that no rank needs stays to be made.
template <class E>
void make_shares(const Experts& e, float* scores) {
    if (e.sigmoid)
        for (int64_t expert = 0; expert < e.count; expert++) scores[expert] = sigmoid(scores[expert]);
    if (e.needs_softmax) {
        const float most = largest(e, scores);
        float total = 0;
        for (int64_t expert = 0; expert < e.count; expert++) total += scores[expert] = power(scores[expert] - most);
        for (int64_t expert = 0; expert < e.count; expert++) scores[expert] /= total;
    }
    if (e.rounds_shares)
        for (int64_t expert = 0; expert < e.count; expert++) scores[expert] = rounded<E>(scores[expert]);
}

// The groups in use as bits, the first ones of equal sums.
template <class Rank>
uint64_t open_groups(const Experts& e, const Rank& rank) {
    if (e.groups == 1) return 1;
    const int64_t size = e.count / e.groups;
    float sums[64];
    for (int64_t group = 0; group < e.groups; group++) {
        float best = -__builtin_inff(), second = best;
        for (int64_t expert = group * size; expert < (group + 1) * size; expert++) {
            const float own = rank(expert);
            if (own > best) second = best, best = own;
            else if (own > second) second = own;
        }
        sums[group] = e.group_best == 1 ? best : best + second;
    }
    uint64_t open = 0;
    for (int64_t i = 0; i < e.groups_used; i++) {
        int64_t most = -1;
        for (int64_t group = 0; group < e.groups; group++)
            if (!(open >> group & 1) && (most < 0 || sums[group] > sums[most])) most = group;
        open |= uint64_t(1) << most;
    }
    return open;
}

// Fills in the experts of a row, the first ones of equal rank.
inline void rank_experts(const Experts& e, const float* scores, int32_t* chosen) {
    const auto rank = [&](int64_t expert) {
        return e.router_bias && !e.biased ? scores[expert] + e.router_bias[expert] : scores[expert];
    };
    const uint64_t open = open_groups(e, rank);
    const int64_t size = e.count / e.groups;
    int64_t found = 0;
    for (int64_t group = 0; group < e.groups; group++) {
        if (!(open >> group & 1)) continue;
        for (int64_t expert = group * size; expert < (group + 1) * size; expert++, found++) {
            int64_t at = found < e.used ? found : e.used;
            for (; at > 0 && rank(chosen[at - 1]) < rank(expert); at--)
                if (at < e.used) chosen[at] = chosen[at - 1];
            if (at < e.used) chosen[at] = int32_t(expert);
        }
    }
}

// The experts of a row and their weights.
template <class E>
void choose(const Experts& e, int64_t row) {
    float* scores = e.scores + row * e.num_scores;
    int32_t* chosen = e.chosen + row * e.used;
    float* weights = e.weights + row * e.used;
    if (e.biased)
        for (int64_t expert = 0; expert < e.count; expert++) scores[expert] += e.router_bias[expert];
    if (e.rounds_scores)
        for (int64_t expert = 0; expert < e.count; expert++) scores[expert] = rounded<E>(scores[expert]);
    if (const float cap = float(e.score_cap))
        for (int64_t expert = 0; expert < e.count; expert++)
            scores[expert] = (2 * sigmoid(2 * scores[expert] / cap) - 1) * cap;
    if (!e.ranks_scores) make_shares<E>(e, scores);
    rank_experts(e, scores, chosen);
    if (e.ranks_scores) make_shares<E>(e, scores);
    const bool is_share = e.sigmoid || e.needs_softmax;
    const float most = is_share ? 0 : largest(e, scores);
    const auto share = [&](int64_t expert) { return is_share ? scores[expert] : power(scores[expert] - most); };
    float total = 0;
    for (int64_t i = 0; i < e.used; i++) total += weights[i] = share(chosen[i]);
    if (is_share) {
        const float eps = float(e.eps);
        total = !e.renormalised ? 1 : !e.floored ? total + eps : total < eps ? eps : total;
    } else if (!e.renormalised) {
        total = 0;
        for (int64_t expert = 0; expert < e.count; expert++) total += share(expert);
    }
    for (int64_t i = 0; i < e.used; i++) {
        weights[i] = weights[i] / total * float(e.factor);
        if (e.router_scale) weights[i] *= e.router_scale[chosen[i]];
    }
}

// Gives each row of each wanted expert a line of scratch, an expert's in the order of the rows. -1: a line without a row,
// and a row's expert without a line. Returns the number of lines with a row.
template <class Wanted>
int64_t arrange(const Experts& e, int64_t rows, Wanted&& wanted) {
    int32_t *starts = e.starts, *counts = e.starts + e.count, next = 0;
    __builtin_memset(counts, 0, e.count * sizeof *counts);
    __builtin_memset(e.row_of, -1, e.lines * sizeof *e.row_of);
    int64_t pairs = 0;
    for (int64_t i = 0; i < rows * e.used; i++)
        if (wanted(e.chosen[i])) counts[e.chosen[i]]++, pairs++;
    for (int64_t expert = 0; expert < e.count; expert++) {
        starts[expert] = next;
        next += (counts[expert] + SIDE - 1) / SIDE * SIDE;
    }
    for (int64_t i = 0; i < rows * e.used; i++) {
        e.line_of[i] = -1;
        if (!wanted(e.chosen[i])) continue;
        const int32_t at = starts[e.chosen[i]]++;
        e.line_of[i] = at;
        e.row_of[at] = int32_t(i / e.used);
        e.expert_of[at] = e.chosen[i];
    }
    for (int64_t expert = 0; expert < e.count; expert++) starts[expert] -= counts[expert];
    return pairs;
}

// The same of the experts in the bank, once rows are chosen elsewhere. Another number than an expert's stands for none.
inline int64_t arrange_share(const Experts& e, int64_t rows) {
    return arrange(e, rows, [&](int32_t expert) { return 0 <= expert && expert < e.count && e.bank_place[expert] >= 0; });
}

template <class E>
void route(const Experts& e, int64_t rows, int64_t how_many) {
    const int64_t blocks = (e.num_scores + SCORES - 1) / SCORES, counts[] = {rows, rows * blocks, rows};
    struct None {};
    threads::in_phases<None>(how_many, counts, 3, [&](int phase, int64_t item, None&, int) {
        if (phase == 0) norm_row<E>(e, item);
        else if (phase == 1) score(e, item / blocks, item % blocks * SCORES);
        else choose<E>(e, item);
    });
    arrange(e, rows, [](int32_t) { return true; });
}

// Moves a product from the first expert of the bank to one `bytes` further on.
inline void move(Product& p, int64_t bytes) {
    const auto on = [&](const void*& at) {
        if (at) at = static_cast<const char*>(at) + bytes;
    };
    on(p.weight.rows);
    on(p.up.rows);
    on(p.bias);
}

// Fills in the experts of the bank that have rows, and returns how many there are: threads share their outputs evenly.
inline int64_t list_experts(const Experts& e, int32_t* list) {
    int64_t found = 0;
    for (int64_t expert = 0; expert < e.count; expert++)
        if (e.starts[e.count + expert] && e.bank_place[expert] >= 0) list[found++] = int32_t(expert);
    return found;
}

// The product of an expert of the bank.
inline Product product_of(const Experts& e, const Product& of_first, int64_t expert) {
    Product p = of_first;
    move(p, e.step * e.bank_place[expert]);
    return p;
}

// Line `line` of scratch, which begins as row `row` of x, as it is multiplied with a matrix of its expert.
template <class E>
void prepare(const Product& p, int64_t row, int64_t line) {
    Product from = p;
    using element = typename E::element;
    from.x = static_cast<const element*>(p.x) + (row - line) * p.x_stride;
    products::prepare_row<E>(from, p.weight, p.widened, line);
    if (p.widened_up != p.widened) products::prepare_row<E>(from, p.up, p.widened_up, line);
}

template <class E>
void sum_row(const Experts& e, int64_t row) {
    using element = typename E::element;
    auto parts = static_cast<const element*>(e.down.out);
    auto to = static_cast<element*>(e.out) + row * e.down.outputs;
    auto beside = static_cast<const element*>(e.beside) + (e.beside ? row * e.down.outputs : 0);
    const bool gated = e.num_scores > e.count;
    const float gate = gated ? rounded<E>(sigmoid(rounded<E>(e.scores[row * e.num_scores + e.count]))) : 1;
    for (int64_t at = 0; at < e.down.outputs; at += W) {
        f32 total = {};
        for (int64_t i = row * e.used; i < (row + 1) * e.used; i++)
            total = fma(all(e.weights[i]), E::read(parts + e.line_of[i] * e.down.out_stride + at), total);
        total = E::rounded(E::rounded(total) * float(e.sum_factor));
        if (e.beside) {
            f32 other = E::read(beside + at);
            if (gated) other = E::rounded(other * gate);
            total = E::rounded(E::rounded(total + other) * float(e.both_factor));
        }
        E::write(to + at, total);
    }
}

// What the experts of the bank make of their rows, once these are routed.
template <class E>
void run(const Experts& e, int64_t how_many) {
    const auto tiles_of = [](const Product& p) { return (p.outputs + products::OUTPUTS - 1) / products::OUTPUTS; };
    const auto is_here = [&](int64_t line) { return e.row_of[line] >= 0 && e.bank_place[e.expert_of[line]] >= 0; };
    int32_t* const list = e.starts + 2 * e.count;
    const int64_t inner = tiles_of(e.gate_up), outer = tiles_of(e.down), found = list_experts(e, list);
    const int64_t counts[] = {e.lines, found * inner, e.lines, found * outer};
    const auto work_out = [&](const Product& of_first, int64_t expert, int64_t tile) {
        products::work_out<E>(product_of(e, of_first, expert), e.starts[expert], e.starts[e.count + expert], tile);
    };
    threads::in_phases<tiles::Use>(how_many, counts, 4, [&](int phase, int64_t item, tiles::Use&, int) {
        if (phase == 0 && is_here(item)) prepare<E>(e.gate_up, e.row_of[item], item);
        if (phase == 1) work_out(e.gate_up, list[item / inner], item % inner);
        if (phase == 2 && is_here(item)) prepare<E>(e.down, item, item);
        if (phase == 3) work_out(e.down, list[item / outer], item % outer);
    });
}

// The same of many rows, by panels.h: numbers of stored matrices are rounded to the dtype. rows: how many there are, to
// be laid before the first bank; 0 for others.
template <class E>
void run_many(const Experts& e, int64_t rows, int64_t how_many) {
    using element = typename E::element;
    const auto panels_of = [](const Product& p) { return (p.outputs + panels::COLUMNS - 1) / panels::COLUMNS; };
    const int64_t inputs = e.gate_up.inputs, inner = panels_of(e.gate_up), outer = panels_of(e.down);
    const int64_t room = 2 * panels::COLUMNS * (inputs > e.down.inputs ? inputs : e.down.inputs);
    int32_t* const list = e.starts + 2 * e.count;
    const int64_t found = list_experts(e, list), counts[] = {rows, found * inner, found * outer};
    const auto laid = static_cast<element*>(e.laid);
    const auto made = static_cast<const element*>(e.gate_up.out);
    threads::in_phases<panels::Local>(how_many, counts, 3, [&](int phase, int64_t item, panels::Local& local, int number) {
        const auto decoded = static_cast<element*>(e.decoded) + number * room;
        const auto work_out = [&](const Product& of_first, int64_t expert, int64_t panel, auto&& row) {
            const Product p = product_of(e, of_first, expert);
            panels::work_out<E>(p, e.starts[expert], e.starts[e.count + expert], panel, row, local, decoded);
        };
        if (phase == 0)
            products::read_row<E>(e.gate_up, item, [&](auto&& read) {
                for (int64_t at = 0; at < inputs; at += W) E::write(laid + item * inputs + at, read(int(at)));
            });
        if (phase == 1)
            work_out(e.gate_up, list[item / inner], item % inner, [&](int64_t line) { return laid + e.row_of[line] * inputs; });
        if (phase == 2)
            work_out(e.down, list[item / outer], item % outer, [&](int64_t line) { return made + line * e.gate_up.out_stride; });
    });
}

// The rows' output, once all of their experts have run.
template <class E>
void sum(const Experts& e, int64_t rows, int64_t how_many) {
    struct None {};
    threads::in_phases<None>(how_many, &rows, 1, [&](int, int64_t row, None&, int) { sum_row<E>(e, row); });
}

// What the experts of the bank made of their rows, in the order of lines, to out, and to pairs which ones: numbers of
// [rows, used].
template <class E>
void gather(const Experts& e, int64_t rows, int64_t* pairs, int64_t how_many) {
    using element = typename E::element;
    int32_t *pair_of = e.row_of, *line_of = e.expert_of;  // which are not needed any more
    for (int64_t i = 0; i < rows * e.used; i++)
        if (e.line_of[i] >= 0) pair_of[e.line_of[i]] = int32_t(i);
    int64_t count = 0;
    for (int64_t line = 0; line < e.lines; line++)
        if (pair_of[line] >= 0) line_of[count] = int32_t(line), pairs[count++] = pair_of[line];
    threads::each(how_many, count, [&](int64_t i) {
        auto from = static_cast<const element*>(e.down.out) + line_of[i] * e.down.out_stride;
        __builtin_memcpy(static_cast<element*>(e.out) + i * e.down.outputs, from, e.down.outputs * sizeof *from);
    });
}

}  // namespace experts
