// The table of forms in which checkpoints store matrices, as formats/encodings.py has it (tests/test_stored.py compares
// them), and the dispatch by a form's place in it.
#pragma once
#include "vectors.h"

namespace stored {

struct Plane {
    int64_t at, bits;  // of each number, from byte `at` of a block on
};

struct Form {
    const char* name;
    int64_t numbers, nbytes;  // of a block; 0 in our own blocks, which are of several sizes
    Plane codes, high;        // the codes' lowest bits, and those above them; none of codes in a grid
    const char *code, *scale, *steps;
    int64_t scale_at, group, centre;
    double times = 0, plus = 0;  // what small integers are multiplied by, and what is added
    int64_t leasts = 0;          // whether small integers are taken away, too
};

constexpr Form FORMS[] = {
    {"Q4_0", 32, 18, {2, 4}, {}, "integer", "F16", "one", 0, 32, 8},
    {"Q4_1", 32, 20, {4, 4}, {}, "integer", "F16", "least", 0, 32, 0},
    {"Q5_0", 32, 22, {6, 4}, {2, 1}, "integer", "F16", "one", 0, 32, 16},
    {"Q5_1", 32, 24, {8, 4}, {4, 1}, "integer", "F16", "least", 0, 32, 0},
    {"Q8_0", 32, 34, {2, 8}, {}, "signed", "F16", "one", 0, 32, 0},
    {"MXFP4", 32, 17, {1, 4}, {}, "e2m1", "E8M0", "one", 0, 32, 0},
    {"IQ4_NL", 32, 18, {2, 4}, {}, "iq4", "F16", "one", 0, 32, 0},
    {"Q4_K", 256, 144, {16, 4}, {}, "integer", "F16", "k", 0, 32, 0, 1, 0, 1},
    {"Q5_K", 256, 176, {48, 4}, {16, 1}, "integer", "F16", "k", 0, 32, 0, 1, 0, 1},
    {"Q6_K", 256, 210, {0, 4}, {128, 2}, "integer", "F16", "bytes", 208, 16, 32},
    {"IQ4_XS", 256, 136, {8, 4}, {}, "iq4", "F16", "small", 0, 32, 0, 1, -32, 0},
    {"Q3_K", 256, 110, {32, 2}, {0, 1}, "integer", "F16", "small", 108, 16, 4, 1, -32, 0},
    {"Q2_K", 256, 84, {16, 2}, {}, "integer", "F16", "small", 80, 16, 0, 1, 0, 1},
    {"IQ3_S", 256, 110, {}, {}, "iq3_s", "F16", "small", 0, 32, 0, 2, 1, 0},
    {"IQ3_XXS", 256, 98, {}, {}, "iq3_xxs", "F16", "small", 0, 32, 0, 0.5, 0.25, 0},
    {"IQ2_S", 256, 82, {}, {}, "iq2_s", "F16", "small", 0, 16, 0, 0.25, 0.125, 0},
    {"IQ2_XS", 256, 74, {}, {}, "iq2_xs", "F16", "small", 0, 16, 0, 0.25, 0.125, 0},
    {"IQ2_XXS", 256, 66, {}, {}, "iq2_xxs", "F16", "small", 0, 32, 0, 0.25, 0.125, 0},
    {"IQ1_S", 256, 50, {}, {}, "iq1", "F16", "small", 0, 32, 0, 0.25, 0.125, 0},
    {"IQ1_M", 256, 56, {}, {}, "iq1", "F16/4", "small", 48, 16, 0, 0.25, 0.125, 0},
    {"Q2_0", 64, 18, {2, 2}, {}, "integer", "F16", "one", 0, 64, 1},
    {"Q1_0", 128, 18, {2, 1}, {}, "sign", "F16", "one", 0, 128, 0},
    {"TQ2_0", 256, 66, {0, 2}, {}, "integer", "F16", "one", 64, 256, 1},
    {"NVFP4", 64, 36, {4, 4}, {}, "e2m1", "E4M3", "times", 0, 16, 0},
    {"NVFP4_INV", 64, 36, {4, 4}, {}, "e2m1", "E4M3", "over", 0, 16, 0},
    {"INT4_F16", 0, 0, {4, 4}, {}, "integer", "F16", "zero", 0, 0, 0},
    {"INT4_BF16", 0, 0, {4, 4}, {}, "integer", "BF16", "zero", 0, 0, 0},
    {"INT8_F16", 0, 0, {4, 8}, {}, "integer", "F16", "zero", 0, 0, 0},
    {"INT8_BF16", 0, 0, {4, 8}, {}, "integer", "BF16", "zero", 0, 0, 0},
    {"FP8_F32", 0, 0, {4, 8}, {}, "e4m3", "F32", "one", 0, 0, 0},
    {"FP8_F16", 0, 0, {4, 8}, {}, "e4m3", "F16", "one", 0, 0, 0},
    {"FP8_BF16", 0, 0, {4, 8}, {}, "e4m3", "BF16", "one", 0, 0, 0},
};
constexpr int NUM_FORMS = sizeof FORMS / sizeof *FORMS;

enum class Kind : int64_t { none };  // Kind(n): the n-th form, from 1 on

constexpr const Form& form(Kind kind) { return FORMS[int64_t(kind) - 1]; }

consteval bool is(const char* one, const char* other) {
    return *one == *other && (!*one || is(one + 1, other + 1));
}
consteval bool has_code(Kind kind, const char* code) { return is(form(kind).code, code); }
consteval bool has_steps(Kind kind, const char* steps) { return is(form(kind).steps, steps); }
consteval bool has_scale(Kind kind, const char* scale) { return is(form(kind).scale, scale); }
constexpr bool is_gguf(Kind kind) { return form(kind).numbers; }
consteval int bits(Kind kind) { return int(form(kind).codes.bits + form(kind).high.bits); }
consteval bool has_grid(Kind kind) { return is_gguf(kind) && !form(kind).codes.bits; }
consteval bool by_16(Kind kind) { return form(kind).group == 16; }
consteval int centre(Kind kind) {  // taken from codes as they are multiplied
    if (form(kind).codes.bits < 4) return int(form(kind).centre);
    return has_code(kind, "integer") ? 1 << (bits(kind) - 1) : 0;
}

// The numbers of codes of 4 bits, where they are no integers in order. e2m1: doubled; -0 is 0.
enum class Book { none, e2m1, iq4 };
constexpr int8_t BOOKS[][16] = {
    {},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
};

consteval Book book(Kind kind) {
    return has_code(kind, "e2m1") ? Book::e2m1 : has_code(kind, "iq4") ? Book::iq4 : Book::none;
}

// A matrix of rows of blocks, each of `numbers` numbers and `nbytes` bytes, and of `tail` bytes, a row's own scale in
// fp32. grid: int8, the entries of a kind with codes in a grid.
struct Matrix {
    const void *rows, *grid;
    Kind kind;
    int64_t numbers, nbytes, tail;

    int64_t row_bytes(int64_t inputs) const { return inputs / numbers * nbytes + tail; }
};

constexpr int GROUP = 32;  // numbers that are decoded together
constexpr int AHEAD = 4096, LINE = 64;  // bytes that are asked for before they are read, and of a line of the cache
consteval int groups_of_block(Kind kind) { return int(form(kind).numbers / GROUP); }
using group = uint8_t __attribute__((vector_size(GROUP)));
using bytes = uint8_t __attribute__((vector_size(W)));
using half_group = uint8_t __attribute__((vector_size(GROUP / 2)));

// What a row of blocks shares: the entries of its grid, and its own scale.
struct Own {
    const uint8_t* grid;
    float scale;
};

// Of a row whose tail is at `tail`.
template <Kind KIND>
INLINE Own shared_of(const Matrix& m, const uint8_t* tail) {
    return {static_cast<const uint8_t*>(m.grid), has_scale(KIND, "E4M3") ? load<float>(tail) : 1};
}

template <class T>
INLINE T read(const uint8_t* at) {
    T number;
    __builtin_memcpy(&number, at, sizeof number);
    return number;
}

// f.operator()<KIND>() for the matrix's kind.
template <int FIRST = 1, class F>
INLINE void with_kind(Kind kind, F&& f) {
    if constexpr (FIRST <= NUM_FORMS) {
        if (kind == Kind(FIRST)) f.template operator()<Kind(FIRST)>();
        else with_kind<FIRST + 1>(kind, f);
    }
}

}  // namespace stored
