// Functions of fp32 lanes, within a few units of the last place. What is not a number stays so.
#pragma once
#include "vectors.h"

// e^x. Below the smallest normal number 0; beyond e^88 infinite. Cody and Waite's reduction to |t| <= ln(2) / 2, then
// the Taylor polynomial of degree 7.
INLINE f32 exp(f32 x) {
    f32 near = x > -87.3f ? x : all(-87.3f);
    near = near < 88.0f ? near : all(88.0f);
    const f32 whole = __builtin_elementwise_roundeven(near * 1.44269504f);
    f32 t = fma(whole, all(-0.693359375f), near);  // its product is exact
    t = fma(whole, all(2.12194440e-4f), t);
    f32 p = all(1.98412698e-4f);
    p = fma(p, t, all(1.38888889e-3f));
    p = fma(p, t, all(8.33333333e-3f));
    p = fma(p, t, all(4.16666667e-2f));
    p = fma(p, t, all(1.66666667e-1f));
    p = fma(p, t, all(0.5f));
    p = fma(p, t, all(1.0f));
    p = fma(p, t, all(1.0f));
    p *= (f32)((__builtin_convertvector(whole, i32) + 127) << 23);
    p = x < -87.3f ? f32{} : p;
    p = x > 88.0f ? all(__builtin_huge_valf()) : p;
    return x == x ? p : x;
}

INLINE f32 sigmoid(f32 x) { return 1.0f / (1.0f + exp(-x)); }

INLINE f32 silu(f32 x) { return x / (1.0f + exp(-x)); }

// ln(1 + e^x) = max(x, 0) + ln(1 + y) with y = e^-|x|, and ln(1 + y) = 2 artanh(s) with s = y / (2 + y) <= 1/3: no
// difference of near numbers. The series to s^17.
INLINE f32 softplus(f32 x) {
    const f32 y = exp(x < 0.0f ? x : -x), s = y / (2.0f + y), u = s * s;
    f32 p = all(1.0f / 17);
    p = fma(p, u, all(1.0f / 15));
    p = fma(p, u, all(1.0f / 13));
    p = fma(p, u, all(1.0f / 11));
    p = fma(p, u, all(1.0f / 9));
    p = fma(p, u, all(1.0f / 7));
    p = fma(p, u, all(1.0f / 5));
    p = fma(p, u, all(1.0f / 3));
    p = fma(p * u, s, s);
    return fma(all(2.0f), p, x < 0.0f ? f32{} : x);
}
