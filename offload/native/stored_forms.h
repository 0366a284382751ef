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
    Plane codes, high;        // the codes' lowest bits, and those above them
    const char *code, *scale, *steps;
};

constexpr Form FORMS[] = {
    {"Q4_0", 32, 18, {2, 4}, {}, "integer", "F16", "one"},
    {"Q4_1", 32, 20, {4, 4}, {}, "integer", "F16", "least"},
    {"Q5_0", 32, 22, {6, 4}, {2, 1}, "integer", "F16", "one"},
    {"Q5_1", 32, 24, {8, 4}, {4, 1}, "integer", "F16", "least"},
    {"Q8_0", 32, 34, {2, 8}, {}, "signed", "F16", "one"},
    {"MXFP4", 32, 17, {1, 4}, {}, "e2m1", "E8M0", "one"},
    {"IQ4_NL", 32, 18, {2, 4}, {}, "iq4", "F16", "one"},
    {"Q4_K", 256, 144, {16, 4}, {}, "integer", "F16", "k"},
    {"Q5_K", 256, 176, {48, 4}, {16, 1}, "integer", "F16", "k"},
    {"Q6_K", 256, 210, {0, 4}, {128, 2}, "integer", "F16", "bytes"},
    {"INT4_F16", 0, 0, {4, 4}, {}, "integer", "F16", "zero"},
    {"INT4_BF16", 0, 0, {4, 4}, {}, "integer", "BF16", "zero"},
    {"INT8_F16", 0, 0, {4, 8}, {}, "integer", "F16", "zero"},
    {"INT8_BF16", 0, 0, {4, 8}, {}, "integer", "BF16", "zero"},
    {"FP8_F32", 0, 0, {4, 8}, {}, "e4m3", "F32", "one"},
    {"FP8_F16", 0, 0, {4, 8}, {}, "e4m3", "F16", "one"},
    {"FP8_BF16", 0, 0, {4, 8}, {}, "e4m3", "BF16", "one"},
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
consteval int centre(Kind kind) {  // taken from codes as they are multiplied
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

// A matrix of rows of blocks, each of `numbers` numbers and `nbytes` bytes.
struct Matrix {
    const void* rows;
    Kind kind;
    int64_t numbers, nbytes;
};

// f.operator()<KIND>() for the matrix's kind.
template <int FIRST = 1, class F>
INLINE void with_kind(Kind kind, F&& f) {
    if constexpr (FIRST <= NUM_FORMS) {
        if (kind == Kind(FIRST)) f.template operator()<Kind(FIRST)>();
        else with_kind<FIRST + 1>(kind, f);
    }
}

}  // namespace stored
