// Vectors of fp32 lanes, and the 16-bit elements that are widened to them.
//
// Keys, values and weights are read as "units" of 32 bits: two 16-bit elements, or one of 32 bits. A vector of units is
// widened without a shuffle into `per_unit` vectors, of its even and of its odd elements. Whatever is multiplied with
// it is kept in the same order: element i of a row is at `place<E>(i)`.
#pragma once
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

using f32 = float __attribute__((vector_size(4 * W)));
using u32 = uint32_t __attribute__((vector_size(4 * W)));
using i32 = int32_t __attribute__((vector_size(4 * W)));
using u16 = uint16_t __attribute__((vector_size(2 * W)));
using f16 = _Float16 __attribute__((vector_size(2 * W)));

#define INLINE inline __attribute__((always_inline))

template <class V>
INLINE V load(const void* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
inline void store(void* to, V v) {
    __builtin_memcpy(to, &v, sizeof v);
}

// The first `count` units, then zeros.
INLINE u32 load_some(const void* from, int count) {
    alignas(64) uint32_t lanes[W] = {};
    for (int i = 0; i < count; i++) __builtin_memcpy(lanes + i, static_cast<const char*>(from) + 4 * i, 4);
    return load<u32>(lanes);
}

INLINE f32 all(float x) { return x - f32{}; }
INLINE f32 fma(f32 a, f32 b, f32 c) { return __builtin_elementwise_fma(a, b, c); }
INLINE f32 larger(f32 a, f32 b) { return a > b ? a : b; }

// Sum of the lanes of 4, 8 or 16: halves are added until one lane is left.
template <class V>
INLINE float sum(V v) {
    if constexpr (sizeof v == 64) {
        return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
    } else if constexpr (sizeof v == 32) {
        return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
    } else {
        const auto two = __builtin_shufflevector(v, v, 0, 1) + __builtin_shufflevector(v, v, 2, 3);
        return two[0] + two[1];
    }
}

INLINE float largest(f32 v) {
    float most = v[0];
    for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// 2^x for x <= 0, and for small x > 0. -inf gives 0. Relative error below 2e-7: the Taylor polynomial of degree 7 on
// [-1/2, 1/2].
INLINE f32 exp2(f32 x) {
    x = x < -127.0f ? all(-127.0f) : x;
    f32 whole = __builtin_elementwise_roundeven(x);
    f32 t = x - whole;
    f32 p = all(1.52527338e-5f);
    p = fma(p, t, all(1.54035304e-4f));
    p = fma(p, t, all(1.33335581e-3f));
    p = fma(p, t, all(9.61812911e-3f));
    p = fma(p, t, all(5.55041087e-2f));
    p = fma(p, t, all(2.40226507e-1f));
    p = fma(p, t, all(6.93147181e-1f));
    p = fma(p, t, all(1.0f));
    i32 exponent = __builtin_convertvector(whole, i32) + 127;
    return p * (f32)(exponent << 23);
}

// An element type: `widen` gives every other element of a vector of units, `read` and `write` are for W elements in a
// row.
struct Bf16 {
    static constexpr int per_unit = 2;
    using element = uint16_t;
    template <int part>
    INLINE static f32 widen(u32 units) {
        return part == 0 ? (f32)(units << 16) : (f32)(units & 0xffff0000u);
    }
    INLINE static f32 read(const element* from) {
        return (f32)(__builtin_convertvector(load<u16>(from), u32) << 16);
    }
    INLINE static u16 narrow(f32 rounded) { return __builtin_convertvector((u32)rounded >> 16, u16); }
    INLINE static void write(element* to, f32 rounded) { store(to, narrow(rounded)); }
    INLINE static f32 rounded(f32 x) {
        const u32 bits = (u32)x;
        return x == x ? (f32)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u) : x;
    }
    static float widen_one(element x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }
    static element round_one(float x) {
        uint32_t bits = __builtin_bit_cast(uint32_t, x);
        if (x != x) return uint16_t(bits >> 16) | 64;
        return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

struct Fp16 {
    static constexpr int per_unit = 2;
    using element = uint16_t;
    template <int part>
    INLINE static f32 widen(u32 units) {
        u16 halves = __builtin_convertvector(part == 0 ? units : units >> 16, u16);
        return __builtin_convertvector((f16)halves, f32);
    }
    INLINE static f32 read(const element* from) { return __builtin_convertvector(load<f16>(from), f32); }
    INLINE static u16 narrow(f32 rounded) { return (u16)__builtin_convertvector(rounded, f16); }
    INLINE static void write(element* to, f32 rounded) { store(to, narrow(rounded)); }
    INLINE static f32 rounded(f32 x) { return __builtin_convertvector(__builtin_convertvector(x, f16), f32); }
    static float widen_one(element x) { return float(__builtin_bit_cast(_Float16, x)); }
    static element round_one(float x) { return __builtin_bit_cast(uint16_t, _Float16(x)); }
};

struct Fp32 {
    static constexpr int per_unit = 1;
    using element = float;
    template <int part>
    INLINE static f32 widen(u32 units) {
        return (f32)units;
    }
    INLINE static f32 read(const element* from) { return load<f32>(from); }
    INLINE static void write(element* to, f32 rounded) { store(to, rounded); }
    INLINE static f32 rounded(f32 x) { return x; }
    static float widen_one(element x) { return x; }
    static element round_one(float x) { return x; }
};

// Whether the processor multiplies units of two elements, and adds both products to a lane in fp32. It takes subnormal
// numbers for zeros.
template <class E>
#if defined(__AVX512BF16__)
constexpr bool in_pairs = __is_same(E, Bf16);
#else
constexpr bool in_pairs = false;
#endif

INLINE f32 add_pairs(f32 acc, u32 one, u32 other) {
#if defined(__AVX512BF16__)
    return (f32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)one, (__m512bh)other);
#else
    return (void)one, (void)other, acc;
#endif
}

// Units of bf16: the even elements and the odd ones, rounded.
INLINE u32 pairs_of(const f32 (&parts)[2]) { return (u32)parts[0] >> 16 | ((u32)parts[1] & 0xffff0000u); }

// Elements that one vector of units holds.
template <class E>
constexpr int wide = W * E::per_unit;

template <class E>
inline float rounded(float x) {
    return E::widen_one(E::round_one(x));
}

template <class E>
INLINE f32 widen(u32 units, int part) {
    if constexpr (E::per_unit == 2) return part == 0 ? E::template widen<0>(units) : E::template widen<1>(units);
    return E::template widen<0>(units);
}

// Where element i is in a row that is kept in the order of units.
template <class E>
inline int place(int i) {
    int within = i % wide<E>;
    return i - within + within % E::per_unit * W + within / E::per_unit;
}

// A row of `count` elements has room for whole vectors of units.
template <class E>
inline int padded(int count) {
    return (count + wide<E> - 1) / wide<E> * wide<E>;
}

// zip<0>: a0 b0 a1 b1 ... of the first halves; zip<1>: of the second ones.
template <int half>
INLINE u32 zip(u32 a, u32 b) {
#if defined(__AVX512F__)
    return half == 0 ? __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
                     : __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return half == 0 ? __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
                     : __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return half == 0 ? __builtin_shufflevector(a, b, 0, 4, 1, 5) : __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Lane i is the sum of the lanes of v[i], added as `sum` adds them.
INLINE f32 sums(f32 (&v)[W]) {
#pragma unroll
    for (int count = W / 2; count; count /= 2)
#pragma unroll
        for (int i = 0; i < count; i++)
            v[i] = (f32)zip<0>((u32)v[i], (u32)v[i + count]) + (f32)zip<1>((u32)v[i], (u32)v[i + count]);
    return v[0];
}

// results[r][o] of ROWS rows and OUTS columns: the sum of the lanes of acc[r * OUTS + o].
template <int ROWS, int OUTS, int COLUMNS>
INLINE void put_sums(f32 (&acc)[ROWS * OUTS], float (*results)[COLUMNS]) {
    if constexpr (ROWS * OUTS == W) {
        alignas(64) float lanes[W];
        store(lanes, sums(acc));
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < OUTS; o++) results[r][o] = lanes[r * OUTS + o];
    } else {
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < OUTS; o++) results[r][o] = sum(acc[r * OUTS + o]);
    }
}

// W vectors of W units: rows become columns. log2(W) perfect shuffles.
INLINE void transpose(u32 (&rows)[W]) {
#pragma unroll
    for (int done = 1; done < W; done *= 2) {
        u32 next[W];
#pragma unroll
        for (int i = 0; i < W / 2; i++) {
            next[2 * i] = zip<0>(rows[i], rows[i + W / 2]);
            next[2 * i + 1] = zip<1>(rows[i], rows[i + W / 2]);
        }
#pragma unroll
        for (int i = 0; i < W; i++) rows[i] = next[i];
    }
}

// f.template operator()<n>(r) for blocks of n rows from r on, at most `most`, 4 or 8, that make up `rows`.
template <int most = W == 16 ? 8 : 4, class F>
inline void by_rows(int rows, F&& f) {
    int r = 0;
    for (; r + most <= rows; r += most) f.template operator()<most>(r);
    if constexpr (most == 8)
        if (r + 4 <= rows) f.template operator()<4>(r), r += 4;
    if (r + 2 <= rows) f.template operator()<2>(r), r += 2;
    if (r < rows) f.template operator()<1>(r);
}

// W elements, of which so many are there; zeros past them.
template <class E>
INLINE f32 read_some(const typename E::element* from, int64_t count) {
    if (count >= W) return E::read(from);
    typename E::element some[W] = {};
    for (int i = 0; i < count; i++) some[i] = from[i];
    return E::read(some);
}

template <class E>
INLINE void write_some(typename E::element* to, f32 x, int64_t count) {
    if (count >= W) return E::write(to, E::rounded(x));
    typename E::element some[W];
    E::write(some, E::rounded(x));
    for (int i = 0; i < count; i++) to[i] = some[i];
}
