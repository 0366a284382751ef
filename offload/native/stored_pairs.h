// Codes of GGUF's kinds, 64 at a time, a byte each; the entries of grids in words; and both in pairs of bf16, as they are
// multiplied.
#pragma once
#include "stored_codes.h"

namespace stored {

#if defined(__AVX512BW__)

INLINE __m512i joined(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}
INLINE __m512i by_half(int first, int second) {
    return joined(_mm256_set1_epi16(short(first)), _mm256_set1_epi16(short(second)));
}
INLINE __m512i twice(const uint8_t* from) { return _mm512_broadcast_i64x4(load<__m256i>(from)); }

// Of seven signs in each byte the eighth, where it makes their count even.
INLINE uint64_t with_eighth(uint64_t sevens) {
    uint64_t odd = sevens ^ sevens >> 4;
    odd ^= odd >> 2, odd ^= odd >> 1;
    return sevens | (odd & 0x0101010101010101) << 7;
}

// The same of four times seven bits each.
INLINE uint64_t with_eighth(uint32_t first, uint32_t second) {
    constexpr uint64_t sevens = 0x7f7f7f7f7f7f7f7f;
    return with_eighth(_pdep_u64((first & 0xfffffff) | uint64_t(second) << 28, sevens));
}

// The entries of a block's codes in a grid, as `formats.grids.words` has them: words of 16 bits, whose fields are
// places of numbers. TABLE: which one of the tables of these. None of another kind.
template <Kind KIND, int TABLE = 0>
struct Words {
    INLINE Words(const uint8_t*, const Own&) {}
};

template <Kind KIND, int TABLE>
    requires(has_grid(KIND))
struct Words<KIND, TABLE> {
    static constexpr bool OF_4 = has_code(KIND, "iq3_s") || has_code(KIND, "iq3_xxs"), SHIFTED = has_code(KIND, "iq1");
    static constexpr int EACH = OF_4 ? 4 : 8;
    struct Fields {  // of 32 even or odd numbers, the words that they are in and their bits' places there
        alignas(64) uint16_t word[32], shift[2][32];

        consteval Fields() : word{}, shift{} {
            for (int i = 0; i < 32; i++) word[i] = uint16_t(2 * i / EACH);
            for (int i = 0; i < 64; i++) shift[i % 2][i / 2] = uint16_t((OF_4 ? 3 : 2) * (i % EACH));
        }
    };
    static constexpr Fields FIELDS{};
    static constexpr int ENTRIES = has_code(KIND, "iq1") ? 2048 : has_code(KIND, "iq2_s") ? 1024
                                 : has_code(KIND, "iq3_s") || has_code(KIND, "iq2_xs") ? 512 : 256;
    __m512i words[OF_4 ? 2 : 1], less, numbers;  // less: of IQ1, 4 in the words of entries that are less by 1, not more

    INLINE Words(const uint8_t* block, const Own& own) {
        const uint8_t* all = own.grid + ENTRIES * EACH;
        numbers = load<__m512i>(all + 2 * ENTRIES + 64 * TABLE);
        const auto widened = [](const uint8_t* at) { return _mm512_cvtepu8_epi16(load<__m256i>(at)); };
        const auto with_upper = [&](const uint8_t* at, __m512i upper, int bits) {
            return _mm512_ternarylogic_epi32(upper, _mm512_set1_epi16(short(bits)), widened(at), 0xea);
        };
        const auto spread = [](__m512i fields, int step) {  // fields every so many bits of 64: one in each word
            const __m512i two = _mm512_or_si512(fields, _mm512_slli_epi64(fields, 16 - step));
            return _mm512_or_si512(two, _mm512_slli_epi64(two, 32 - 2 * step));
        };
        if constexpr (has_code(KIND, "iq3_s")) {
            for (int i = 0; i < 2; i++) {
                const __m512i low = widened(block + 2 + 32 * i), ninth = _mm512_set1_epi16(256);
                words[i] = find(all, _mm512_mask_add_epi16(low, read<uint32_t>(block + 66 + 4 * i), low, ninth));
            }
        } else if constexpr (has_code(KIND, "iq3_xxs")) {
            for (int i = 0; i < 2; i++) words[i] = find(all, widened(block + 2 + 32 * i));
        } else if constexpr (has_code(KIND, "iq2_xxs")) {
            words[0] = find(all, _mm512_cvtepu8_epi16(_mm512_cvtepi64_epi32(load<__m512i>(block + 2))));
        } else if constexpr (has_code(KIND, "iq2_xs")) {
            words[0] = find(all, load<__m512i>(block + 2));
        } else if constexpr (has_code(KIND, "iq2_s")) {
            const __m512i fields = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(read<int64_t>(block + 66)));
            words[0] = find(all, with_upper(block + 2, spread(_mm512_slli_epi64(fields, 8), 2), 0x0300));
        } else if constexpr (has_scale(KIND, "F16/4")) {  // IQ1_M
            const __m512i fields = _mm512_cvtepu8_epi32(load<__m128i>(block + 32));
            const __m512i upper = _mm512_or_si512(_mm512_slli_epi32(fields, 8), _mm512_slli_epi32(fields, 20));
            words[0] = find(all, with_upper(block, upper, 0x0700));
            less = _mm512_and_si512(_mm512_srli_epi16(upper, 9), _mm512_set1_epi16(4));
        } else {  // IQ1_S
            const __m512i fields = _mm512_cvtepu16_epi64(load<__m128i>(block + 34));
            words[0] = find(all, with_upper(block + 2, spread(_mm512_slli_epi64(fields, 8), 3), 0x0700));
            const __m512i lowest = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0908090809080908, 0x0100010001000100));
            less = _mm512_and_si512(_mm512_srli_epi16(_mm512_shuffle_epi8(fields, lowest), 13), _mm512_set1_epi16(4));
        }
    }

    // The even or the odd of 64 numbers from groups 2 pair and 2 pair + 1, without their signs but of IQ1.
    INLINE __m512i numbers_of(int pair, int odd) const {
        const int first = pair * PAIR / EACH;
        const __m512i place = _mm512_add_epi16(load<__m512i>(FIELDS.word), _mm512_set1_epi16(short(first % 32)));
        const __m512i own = _mm512_permutexvar_epi16(place, words[first / 32]);
        const __m512i fields = _mm512_srlv_epi16(own, load<__m512i>(FIELDS.shift[odd]));
        if constexpr (!SHIFTED) return _mm512_permutexvar_epi16(fields, numbers);
        const __m512i added = _mm512_permutexvar_epi16(place, less);
        return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(fields, _mm512_set1_epi16(3), added, 0xea), numbers);
    }

  private:
    // Words at 32 indices, of which upper bits may be anything, by registers of 64 words.
    template <int FROM = 0, int COUNT = ENTRIES>
    INLINE static __m512i find(const uint8_t* all, __m512i indices) {
        const auto at = [&](int word) { return load<__m512i>(all + 2 * word); };
        if constexpr (COUNT == 64) {
            return _mm512_permutex2var_epi16(at(FROM), indices, at(FROM + 32));
        } else {
            constexpr int half = COUNT / 2;
            const __mmask32 upper = _mm512_test_epi16_mask(indices, _mm512_set1_epi16(half));
            const __m512i low = find<FROM, half>(all, indices), high = find<FROM + half, half>(all, indices);
            return _mm512_mask_blend_epi16(upper, low, high);
        }
    }
};

// The numbers below 0 of 64 of groups 2 pair and 2 pair + 1 of a block.
template <Kind KIND>
INLINE uint64_t signs_of(const uint8_t* block, int pair) {
    const int i = 8 * pair, g = 2 * pair;
    if constexpr (has_code(KIND, "iq3_s")) return read<uint64_t>(block + 74 + i);
    else if constexpr (has_code(KIND, "iq2_s")) return read<uint64_t>(block + 34 + i);
    else if constexpr (has_code(KIND, "iq3_xxs"))
        return with_eighth(read<uint32_t>(block + 66 + 4 * g), read<uint32_t>(block + 70 + 4 * g));
    else if constexpr (has_code(KIND, "iq2_xxs"))
        return with_eighth(read<uint32_t>(block + 6 + 8 * g), read<uint32_t>(block + 14 + 8 * g));
    const __m128i sevens = _mm_srli_epi16(load<__m128i>(block + 2 + 2 * i), 9);
    return with_eighth(uint64_t(_mm_cvtsi128_si64(_mm_packus_epi16(sevens, sevens))));
}

// The codes of a pair of groups as bytes, if they are in planes and have no sign.
template <Kind KIND>
struct Bytes {
    // both: whether there is a second group. What is above a code of 4 or 6 bits may be anything.
    INLINE static __m512i of(const uint8_t* at, int pair, bool both) {
        constexpr Form own = form(KIND);
        const uint8_t* codes = block_of<KIND>(at, 2 * pair) + own.codes.at;
        if constexpr (own.codes.bits == 2 && own.numbers == 64) {  // a byte has four in order
            const __m512i four = _mm512_cvtepu8_epi32(load<__m128i>(codes));
            const __m512i two = _mm512_or_si512(four, _mm512_slli_epi32(four, 12));
            return _mm512_and_si512(_mm512_or_si512(two, _mm512_slli_epi32(two, 6)), _mm512_set1_epi8(3));
        } else if constexpr (own.codes.bits == 2) {
            const int shift = pair % 2 * 4;
            const __m512i moved = _mm512_srlv_epi16(twice(codes + pair / 2 * GROUP), by_half(shift, shift + 2));
            const __m512i two = _mm512_and_si512(moved, _mm512_set1_epi8(3));
            if constexpr (!own.high.bits) return two;
            const __mmask64 third = _mm512_test_epi8_mask(twice(at + own.high.at), bit_of(pair));
            return _mm512_mask_add_epi8(two, third, two, _mm512_set1_epi8(4));
        } else if constexpr (by_16(KIND) && own.numbers == 64) {  // NVFP4: eight low halves, then their high ones
            const __m512i both_halves = _mm512_castsi256_si512(load<__m256i>(codes));
            const __m512i octets = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), both_halves);
            return _mm512_srlv_epi64(octets, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4));
        } else if constexpr (own.high.bits == 2) {  // above four
            __m512i lower = load<__m512i>(at + pair / 2 * PAIR), upper = twice(at + own.high.at + pair / 2 * GROUP);
            if (pair % 2) lower = _mm512_srli_epi16(lower, 4), upper = _mm512_srlv_epi16(upper, by_half(0, 2));
            else upper = _mm512_sllv_epi16(upper, by_half(4, 2));
            return _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), lower, upper, 0xca);
        } else if constexpr (of_256(KIND) && book(KIND) == Book::none) {
            const __m512i four = _mm512_srlv_epi16(twice(at + own.codes.at + pair * GROUP), by_half(0, 4));
            if constexpr (!own.high.bits) return four;
            return with_fifth(four, _mm512_test_epi8_mask(twice(at + own.high.at), bit_of(pair)));
        } else {
            constexpr int size = of_256(KIND) ? GROUP / 2 : int(own.nbytes);  // from one group to the next
            const uint8_t *first = at + 2 * pair * size + own.codes.at, *second = first + (both ? size : 0);
            const auto halves = [](const uint8_t* of) { return _mm256_broadcastsi128_si256(load<__m128i>(of)); };
            const __m512i shift = _mm512_maskz_set1_epi32(0xf0f0, 0x00040004);
            const __m512i four = _mm512_srlv_epi16(joined(halves(first), halves(second)), shift);
            if constexpr (!own.high.bits) return four;
            uint32_t fifths[2];
            constexpr int64_t back = own.codes.at - own.high.at;
            __builtin_memcpy(fifths, first - back, 4), __builtin_memcpy(fifths + 1, second - back, 4);
            return with_fifth(four, uint64_t(fifths[1]) << 32 | fifths[0]);
        }
    }

  private:
    // In each byte the bit of its group, among those of eight groups.
    INLINE static __m512i bit_of(int pair) { return by_half(0x0101 << 2 * pair, 0x0202 << 2 * pair); }

    INLINE static __m512i with_fifth(__m512i four, __mmask64 fifth) {
        const __m512i code = _mm512_and_si512(four, _mm512_set1_epi8(15));
        return _mm512_mask_add_epi8(code, fifth, code, _mm512_set1_epi8(16));
    }
};

#endif

#if defined(__AVX512BF16__)

// The codes of a pair of groups in bf16, less the centre, in the order of rows.
template <Kind KIND>
struct Pairs {
    static constexpr int INPUTS = PAIR, MOST = 8;
    static constexpr bool WITH_SIGN = has_code(KIND, "signed") || has_code(KIND, "sign");  // they are converted
    using OfBlock = Words<KIND>;
    __m512bh even, odd;
    f32 step;

    template <int COUNT>
    INLINE Pairs(const uint8_t* at, int pair, const Own& own, const Steps<KIND, COUNT>& steps, const OfBlock& words) {
        u32 lane;  // a lane is of four inputs
        for (int i = 0; i < W; i++) lane[i] = by_16(KIND) ? pair * 4 + i / 4 : pair * 2 + i / 8;
        step = (f32)_mm512_permutexvar_ps((__m512i)lane, (__m512)load<f32>(steps.steps));
        const auto odd_of = [](__m512i bytes) { return _mm512_srli_epi16(bytes, 8); };
        if constexpr (has_grid(KIND)) {
            const __m512i first = words.numbers_of(pair, 0), second = words.numbers_of(pair, 1);
            if constexpr (Words<KIND>::SHIFTED) {
                even = (__m512bh)first, odd = (__m512bh)second;
            } else {
                const uint64_t below = signs_of<KIND>(at, pair);
                even = below_0(first, _pext_u64(below, 0x5555555555555555));
                odd = below_0(second, _pext_u64(below, 0xaaaaaaaaaaaaaaaa));
            }
        } else if constexpr (WITH_SIGN) {
            const __m512i code = joined((__m256i)codes_of<KIND>(at, 2 * pair, own),
                                        (__m256i)codes_of<KIND>(at, COUNT > 1 ? 2 * pair + 1 : 2 * pair, own));
            const auto number = [&](int i) {  // in byte i of each four; bf16 in an upper half
                return (u32)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(code, 24 - 8 * i), 24));
            };
            even = (__m512bh)(number(0) >> 16 | number(2)), odd = (__m512bh)(number(1) >> 16 | number(3));
        } else {
            const __m512i code = Bytes<KIND>::of(at, pair, COUNT > 1);
            even = value(code), odd = value(odd_of(code));
        }
    }

    INLINE f32 add(f32 acc, const Rows& rows, int row, int first) const {
        const uint16_t* x = rows.halves(row) + first;
        const __m512 part = _mm512_dpbf16_ps(__m512{}, even, load<__m512bh>(x));  // in this order x needs no register
        return fma((f32)_mm512_dpbf16_ps(part, odd, load<__m512bh>(x + PAIR / 2)), step, acc);
    }

  private:
    // Of codes in words, by their lowest bits alone.
    INLINE static __m512bh value(__m512i code) {
        const auto table = [](int from) {
            const f32 first = counted<book(KIND)>(from) - float(centre(KIND));
            return narrowed<Bf16, true>(first, bits(KIND) == 4 ? first : first + float(W));
        };
        if constexpr (bits(KIND) == 6) return (__m512bh)_mm512_permutex2var_epi16(table(0), code, table(2 * W));
        return (__m512bh)_mm512_permutexvar_epi16(code, table(0));
    }

    // The numbers in bf16, with a sign where a bit is set.
    INLINE static __m512bh below_0(__m512i numbers, uint64_t which) {
        return (__m512bh)_mm512_mask_add_epi16(numbers, uint32_t(which), numbers, _mm512_set1_epi16(-0x8000));
    }
};

#else

template <Kind>
struct Pairs;

#endif

}  // namespace stored
