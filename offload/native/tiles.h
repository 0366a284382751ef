// AMX, which Intel's Xeons have since Sapphire Rapids: eight tiles of 16 rows of 64 bytes, and the product of two of
// them in one instruction. Here, C [16 outputs, 16 rows] fp32 += A [16 outputs, 32 inputs] bf16, as weights are in
// memory, times B [16 pairs of inputs, 16 rows, 2] bf16. An element of C depends on its row of A and its column of B
// alone, so a row's bits do not depend on the rows beside it. All tiles are full; what is missing at an edge is copied
// to a full one first.
#pragma once
#include "vectors.h"

namespace tiles {

constexpr int SIDE = 16, DEEP = 32;

// Elements of type E can be multiplied in tiles.
template <class E>
constexpr bool take = false;

#if defined(__AMX_BF16__)
}  // namespace tiles
#include <immintrin.h>
namespace tiles {

template <>
constexpr bool take<Bf16> = true;

// Ask the system for the tiles' registers: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
inline bool permitted() {
    long result;
    asm volatile("syscall" : "=a"(result) : "a"(158L), "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return result == 0;
}

// A thread's tiles are set up while this lives.
struct Use {
    Use() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } setup;
        for (int i = 0; i < 8; i++) setup.bytes[i] = 64, setup.rows[i] = SIDE;
        _tile_loadconfig(&setup);
    }
    ~Use() { _tile_release(); }
    Use(const Use&) = delete;
};

// Inputs DEEP * block and on of a row, even and odd ones, to B's tiles: [row groups, blocks, 16 pairs, 16 rows, 2].
inline void put(const f32 (&parts)[2], float* widened, int inputs, int64_t row, int block) {
    const int64_t blocks = padded<Bf16>(inputs) / DEEP;
    auto to = reinterpret_cast<uint32_t*>(widened) + (row / SIDE * blocks + block) * SIDE * SIDE + row % SIDE;
    const u32 pairs = pairs_of(parts);
    for (int i = 0; i < SIDE; i++) to[i * SIDE] = pairs[i];
}

// results[r][o] of up to SIDE outputs and GROUPS * SIDE rows, from row 0 of `widened`.
template <int GROUPS>
void dots(const uint16_t* weight, int inputs, int outputs, const float* widened, float (*results)[SIDE]) {
    const int blocks = padded<Bf16>(inputs) / DEEP;
    auto b = reinterpret_cast<const char*>(widened);
    const int64_t group = int64_t(blocks) * 1024;
    alignas(64) uint16_t edge[SIDE][DEEP];
    _tile_zero(0);
    if constexpr (GROUPS > 1) _tile_zero(1);
    if constexpr (GROUPS > 2) _tile_zero(2);
    if constexpr (GROUPS > 3) _tile_zero(3);
    for (int i = 0; i < blocks; i++, b += 1024) {
        const uint16_t* from = weight + i * DEEP;
        if (outputs < SIDE || (i + 1) * DEEP > inputs) {
            const int count = inputs - i * DEEP < DEEP ? inputs - i * DEEP : DEEP;
            __builtin_memset(edge, 0, sizeof edge);
            for (int o = 0; o < outputs; o++) __builtin_memcpy(edge[o], from + int64_t(o) * inputs, count * 2);
            _tile_loadd(4, edge, 64);
        } else {
            _tile_loadd(4, from, int64_t(inputs) * 2);
        }
        _tile_loadd(5, b, 64);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (GROUPS > 1) _tile_loadd(6, b + group, 64), _tile_dpbf16ps(1, 4, 6);
        if constexpr (GROUPS > 2) _tile_loadd(7, b + 2 * group, 64), _tile_dpbf16ps(2, 4, 7);
        if constexpr (GROUPS > 3) _tile_loadd(5, b + 3 * group, 64), _tile_dpbf16ps(3, 4, 5);
    }
    alignas(64) float products[SIDE][SIDE];
    auto keep = [&](float (*to)[SIDE]) {
        u32 rows[W];
        for (int i = 0; i < SIDE; i++) rows[i] = load<u32>(products[i]);
        transpose(rows);
        for (int i = 0; i < SIDE; i++) store(to[i], rows[i]);
    };
    _tile_stored(0, products, 64), keep(results);
    if constexpr (GROUPS > 1) _tile_stored(1, products, 64), keep(results + SIDE);
    if constexpr (GROUPS > 2) _tile_stored(2, products, 64), keep(results + 2 * SIDE);
    if constexpr (GROUPS > 3) _tile_stored(3, products, 64), keep(results + 3 * SIDE);
}

// results[r][o] of `rows` rows, at most 4 * SIDE. results has room for whole groups of SIDE.
inline void block(const uint16_t* weight, int inputs, int outputs, const float* widened, int rows,
                  float (*results)[SIDE]) {
    if (rows > 3 * SIDE) dots<4>(weight, inputs, outputs, widened, results);
    else if (rows > 2 * SIDE) dots<3>(weight, inputs, outputs, widened, results);
    else if (rows > SIDE) dots<2>(weight, inputs, outputs, widened, results);
    else dots<1>(weight, inputs, outputs, widened, results);
}

// sums [SIDE rows, COLUMNS] fp32 += rows [SIDE, units of bf16] by their stride, times a panel [units, COLUMNS of pairs].
// units: a multiple of SIDE.
template <int COLUMNS>
void add(const uint32_t* rows, int64_t stride, const uint32_t* panel, int units, float* sums) {
    static_assert(COLUMNS == 2 * SIDE);
    constexpr int line = 4 * COLUMNS;  // bytes
    _tile_loadd(0, sums, line), _tile_loadd(1, sums + SIDE, line);
    for (int u = 0; u < units; u += SIDE) {
        _tile_loadd(4, rows + u, 4 * stride);
        _tile_loadd(5, panel + u * COLUMNS, line), _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, panel + u * COLUMNS + SIDE, line), _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, sums, line), _tile_stored(1, sums + SIDE, line);
}

#else

inline bool permitted() { return true; }
struct Use {
    Use() {}
};
template <class... Any>
void put(Any&&...) {}
template <class... Any>
void block(Any&&...) {}
template <int, class... Any>
void add(Any&&...) {}

#endif

}  // namespace tiles
