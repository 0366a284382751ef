// Matrices as quantised checkpoints store them: rows of blocks (formats/stored.py says what is in them), and their
// decoding to numbers of a dtype.
//
// A number is computed in fp32 as the format's own library does, step by step, and rounded to the dtype, which may be
// fp32. Of codes of up to 5 bits all values that a group can have are computed once, and looked up.
#pragma once
#include "stored_groups.h"
#include "threads.h"

namespace stored {

#if defined(__AVX512BW__)
// 32 numbers of 16 bits, rounded. normal: see `put`.
template <class E, bool normal>
INLINE __m512i narrowed(f32 first, f32 second) {
#if defined(__AVX512BF16__)
    if constexpr (normal && __is_same(E, Bf16)) return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#endif
    const __m256i low = (__m256i)E::narrow(E::rounded(first)), high = (__m256i)E::narrow(E::rounded(second));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#endif

// A group's numbers. value(i): W of them from i on. normal: none but zero is below 2^-126, which some instructions want.
template <class E, bool normal, class Value>
INLINE void put(typename E::element* out, Value&& value) {
#if defined(__AVX512BW__)
    if constexpr (E::per_unit == 2) {
        const __m512i all = narrowed<E, normal>(value(0), value(W));
        __builtin_memcpy(out, &all, sizeof all);
        return;
    }
#endif
    for (int i = 0; i < GROUP; i += W) E::write(out + i, E::rounded(value(i)));
}

// The numbers of W codes from `from` on.
template <Book BOOK = Book::none>
INLINE f32 counted(int from) {
    i32 number;
    for (int i = 0; i < W; i++) number[i] = BOOK == Book::none ? from + i : BOOKS[int(BOOK)][(from + i) % 16];
    return __builtin_convertvector(number, f32);
}

// A group's numbers by their codes, below COUNT, 16 or 32: `value` of each one's integer.
template <class E, int COUNT, bool normal, Book BOOK = Book::none, class Value>
INLINE void look_up(group codes, typename E::element* out, Value&& value) {
#if defined(__AVX512BW__)
    if constexpr (E::per_unit == 2) {
        const f32 first = value(counted<BOOK>(0));
        const __m512i table = narrowed<E, normal>(first, COUNT == 32 ? value(counted(W)) : first);
        const __m512i found = _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16((__m256i)codes), table);
        __builtin_memcpy(out, &found, sizeof found);
        return;
    }
    const __m512 first = (__m512)value(counted<BOOK>(0)), last = COUNT == 32 ? (__m512)value(counted(W)) : first;
    for (int i = 0; i < GROUP; i += W) {
        const __m256i all = (__m256i)codes;
        const __m512i code = _mm512_cvtepu8_epi32(i ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all));
        store(out + i, COUNT == 32 ? _mm512_permutex2var_ps(first, code, last) : _mm512_permutexvar_ps(code, first));
    }
    return;
#elif defined(__AVX2__)
    if constexpr (E::per_unit == 2 && COUNT == 16) {
        __m256i all;  // as bytes: the low ones in both halves, then the high ones
        const auto words = [&](int from) { return (__m128i)E::narrow(E::rounded(value(counted<BOOK>(from)))); };
        all = _mm256_inserti128_si256(_mm256_castsi128_si256(words(0)), words(W), 1);
        const auto packed = [](__m256i some) {  // the low bytes of 16 words, in both halves
            return _mm256_permute4x64_epi64(_mm256_packus_epi16(some, some), 0x88);
        };
        const __m256i lower = _mm256_shuffle_epi8(packed(_mm256_and_si256(all, _mm256_set1_epi16(255))), (__m256i)codes);
        const __m256i upper = _mm256_shuffle_epi8(packed(_mm256_srli_epi16(all, 8)), (__m256i)codes);
        const __m256i one = _mm256_unpacklo_epi8(lower, upper), other = _mm256_unpackhi_epi8(lower, upper);
        const __m256i front = _mm256_permute2x128_si256(one, other, 0x20);
        const __m256i back = _mm256_permute2x128_si256(one, other, 0x31);
        __builtin_memcpy(out, &front, 32), __builtin_memcpy(out + 16, &back, 32);
        return;
    }
#endif
    alignas(GROUP) int8_t numbers[GROUP];  // codes are below 32
    store(numbers, in_book<BOOK>(codes));
    put<E, normal>(out, [&](int i) { return value(integers(numbers + i)); });
}

// 32 bytes' low halves are the codes of one group, their high ones those of the next.
template <class E, class Value, class Other>
INLINE void look_up_both(group codes, typename E::element* out, Value&& value, Other&& other) {
#if defined(__AVX512BW__)
    if constexpr (E::per_unit == 2) {
        const __m512i table = narrowed<E, true>(value(counted(0)), other(counted(0)));
        const __m512i code = _mm512_cvtepu8_epi16((__m256i)codes);
        const __m512i low = _mm512_and_si512(code, _mm512_set1_epi16(15));
        const __m512i high = _mm512_or_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi16(16));
        const __m512i one = _mm512_permutexvar_epi16(low, table), two = _mm512_permutexvar_epi16(high, table);
        __builtin_memcpy(out, &one, sizeof one), __builtin_memcpy(out + GROUP, &two, sizeof two);
        return;
    }
#endif
    look_up<E, 16, true>(codes & 15, out, value), look_up<E, 16, true>(codes >> 4, out + GROUP, other);
}

// Blocks of 32: llama.cpp's older ones, and MXFP4.
template <class E, Kind KIND>
INLINE void decode_32(const uint8_t* block, typename E::element* out) {
    constexpr bool is_half = has_scale(KIND, "F16");
    const float d = is_half ? half(block) : __builtin_bit_cast(float, half_e8m0(uint32_t(*block)));
    if constexpr (has_code(KIND, "signed")) {
        auto codes = reinterpret_cast<const int8_t*>(block + form(KIND).codes.at);
        return put<E, true>(out, [&](int i) { return integers(codes + i) * d; });
    }
    constexpr int count = 1 << bits(KIND);
    if constexpr (has_steps(KIND, "least")) {
        const float least = half(block + 2);
        look_up<E, count, true>(codes_of_32<KIND>(block), out, [&](f32 code) { return code * d + least; });
    } else if constexpr (form(KIND).codes.bits == 4) {
        const auto value = [&](f32 number) { return (number - float(centre(KIND))) * d; };
        look_up<E, count, is_half, book(KIND)>(codes_of_32<KIND>(block), out, value);
    }
}

template <class E, int BITS>
INLINE void decode_k(const uint8_t* block, typename E::element* out) {
    const Scales scales(block);
#pragma unroll
    for (int g = 0; g < 8; g += 2) {
        const auto value = [&](f32 code) { return code * scales.steps[g] - scales.least[g]; };
        const auto other = [&](f32 code) { return code * scales.steps[g + 1] - scales.least[g + 1]; };
        if constexpr (BITS == 4) {
            look_up_both<E>(load<group>(block + 16 + g / 2 * GROUP), out + g * GROUP, value, other);
        } else {
            look_up<E, 32, true>(codes_of_q5_k(block, g), out + g * GROUP, value);
            look_up<E, 32, true>(codes_of_q5_k(block, g + 1), out + (g + 1) * GROUP, other);
        }
    }
}

// A block by the codes and steps of its groups.
template <class E, Kind KIND>
INLINE void decode_groups(const uint8_t* block, const Own& own, typename E::element* out) {
    constexpr int each = by_16(KIND) ? 16 : GROUP;
    alignas(64) float steps[16 + W], least[16];
    steps_of_blocks<KIND, 1>(block, own, steps, least);
#pragma unroll
    for (int g = 0; g < form(KIND).numbers / GROUP; g++) {
        alignas(GROUP) int8_t codes[GROUP];
        store_codes<KIND>(block, g, own, codes);
        put<E, !has_scale(KIND, "E4M3")>(out + g * GROUP, [&](int i) {
            const int part = (g * GROUP + i) / each;
            const f32 numbers = integers(codes + i) * steps[part];
            return form(KIND).leasts ? numbers - least[part] : numbers;
        });
    }
}

// Our own blocks. S: the scale's dtype.
template <class E, class S, int BITS, bool FLOAT>
INLINE void decode_grouped(const uint8_t* block, int64_t numbers, typename E::element* out) {
    if constexpr (BITS == 4 && W < 16 && __is_same(E, Fp32) && __is_same(S, Fp16)) {  // S has them, in a smaller table
        alignas(64) typename S::element own[128];
        decode_grouped<S, S, BITS, FLOAT>(block, numbers, own);
        for (int i = 0; i < numbers; i += W) store(out + i, S::read(own + i));
        return;
    }
    typename S::element bits;
    int16_t zero;
    __builtin_memcpy(&bits, block, sizeof bits), __builtin_memcpy(&zero, block + 2, 2);
    const float scale = S::widen_one(bits), from = float(zero);
    const uint8_t* codes = block + 4;
    constexpr bool normal = __is_same(S, Fp16);
    const auto value = [&](f32 code) { return S::rounded((code - from) * scale); };
    for (int i = 0; i < numbers; i += GROUP) {
        if constexpr (BITS == 4) {  // of the first half of the numbers in low halves, of the second in high ones
            if (i >= numbers / 2) return;
            const group both = numbers == GROUP ? nibbles(codes) : load<group>(codes + i);
            if (numbers == GROUP) return look_up<E, 16, normal>(both, out, value);
            look_up<E, 16, normal>(both & 15, out + i, value);
            look_up<E, 16, normal>(both >> 4, out + numbers / 2 + i, value);
        } else if constexpr (FLOAT) {
            put<E, normal>(out + i, [&](int j) {
                const i32 code = __builtin_convertvector(load<bytes>(codes + i + j), i32);
                return S::rounded(float8(code) * scale);
            });
        } else {
            put<E, normal>(out + i, [&](int j) { return value(integers(codes + i + j)); });
        }
    }
}

template <class E, Kind KIND>
INLINE void decode_block(int64_t numbers, const uint8_t* block, const Own& own, typename E::element* out) {
    constexpr int width = int(form(KIND).codes.bits);
    if constexpr (has_steps(KIND, "k")) decode_k<E, bits(KIND)>(block, out);
    else if constexpr (form(KIND).numbers == 32) decode_32<E, KIND>(block, out);
    else if constexpr (is_gguf(KIND)) decode_groups<E, KIND>(block, own, out);
    else if constexpr (has_scale(KIND, "F16")) decode_grouped<E, Fp16, width, has_code(KIND, "e4m3")>(block, numbers, out);
    else if constexpr (has_scale(KIND, "BF16")) decode_grouped<E, Bf16, width, has_code(KIND, "e4m3")>(block, numbers, out);
    else decode_grouped<E, Fp32, width, has_code(KIND, "e4m3")>(block, numbers, out);
}

// Rows `first` to first + count, of `inputs` numbers each, one after the other.
template <class E>
void decode_rows(const Matrix& m, int64_t inputs, int64_t first, int64_t count, typename E::element* out) {
    const int64_t row_bytes = m.row_bytes(inputs);
    const auto from = static_cast<const uint8_t*>(m.rows) + first * row_bytes;
    with_kind(m.kind, [=]<Kind KIND>() {  // copies: they stay in registers
        const Matrix own = m;
        typename E::element* to = out;
        for (int64_t row = 0; row < count; row++) {
            const uint8_t *block = from + row * row_bytes, *stop = block + row_bytes - own.tail;
            const Own shared = shared_of<KIND>(own, stop);
            for (; block < stop; block += own.nbytes, to += own.numbers) {
                for (int64_t at = 0; at < own.nbytes; at += LINE) __builtin_prefetch(block + AHEAD + at);
                decode_block<E, KIND>(own.numbers, block, shared, to);
            }
        }
    });
}

// The same of all rows, on up to how_many threads.
template <class E>
void decode(const Matrix& m, int64_t outputs, int64_t inputs, typename E::element* out, int64_t how_many) {
    constexpr int64_t some = 16;
    threads::each(how_many, (outputs + some - 1) / some, [&](int64_t item) {
        const int64_t first = item * some, rest = outputs - first;
        decode_rows<E>(m, inputs, first, rest < some ? rest : some, out + first * inputs);
    });
}

}  // namespace stored
