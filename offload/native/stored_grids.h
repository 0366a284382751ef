// The codes of IQ1, IQ2 and IQ3: entries of a table at indices that a block has, and signs (formats/encodings.py says
// where; formats/grids.py has the tables).
#pragma once
#include "stored_forms.h"

namespace stored {

using octet = uint8_t __attribute__((vector_size(8)));

// Of eight signs as bits, -1 or 1 as bytes, also by the first seven of them where the eighth makes their count even.
struct Signs {
    uint64_t by_8[256], by_7[128];

    consteval Signs() : by_8{}, by_7{} {
        for (int bits = 0; bits < 256; bits++)
            for (int i = 0; i < 8; i++) by_8[bits] |= (bits >> i & 1 ? 255ull : 1) << 8 * i;
        for (int bits = 0; bits < 128; bits++) by_7[bits] = by_8[bits | __builtin_parity(bits) << 7];
    }
};
constexpr Signs SIGNS;

// An index in a register of its own, or all of them are computed in a vector and taken out of it again.
INLINE uint32_t alone(uint32_t index) {
    asm("" : "+r"(index));
    return index;
}

INLINE octet entry_of_8(const Own& own, uint32_t index) { return load<octet>(own.grid + 8 * alone(index)); }

INLINE octet entries_of_4(const Own& own, uint32_t first, uint32_t second) {
#if defined(__AVX2__)
    const __m128i one = _mm_cvtsi32_si128(read<int>(own.grid + 4 * alone(first)));
    return (octet)_mm_insert_epi32(one, read<int>(own.grid + 4 * alone(second)), 1)[0];
#else
    return (octet)(read<uint32_t>(own.grid + 4 * first) | uint64_t(read<uint32_t>(own.grid + 4 * second)) << 32);
#endif
}

INLINE octet with_signs(octet codes, const uint64_t& signs) {
#if defined(__AVX2__)
    const __m128i all = _mm_cvtsi64_si128((int64_t)codes), own = _mm_loadl_epi64((const __m128i*)&signs);
    return (octet)_mm_sign_epi8(all, own)[0];
#else
    return codes * (octet)signs;
#endif
}

// Eight codes of a block in a grid, from number 8 i on.
template <Kind KIND>
INLINE octet octet_of(const uint8_t* block, int i, const Own& own) {
    const int g = i / 4, n = i % 4;  // of a group of 32
    if constexpr (has_code(KIND, "iq3_s")) {
        const uint32_t first = block[2 + 2 * i], second = block[3 + 2 * i], high = block[66 + g];
        const octet codes = entries_of_4(own, first | (high << (8 - 2 * n) & 256), second | (high << (7 - 2 * n) & 256));
        return with_signs(codes, SIGNS.by_8[block[74 + i]]);
    } else if constexpr (has_code(KIND, "iq3_xxs")) {
        const octet codes = entries_of_4(own, block[2 + 2 * i], block[3 + 2 * i]);
        return with_signs(codes, SIGNS.by_7[read<uint32_t>(block + 66 + 4 * g) >> 7 * n & 127]);
    } else if constexpr (has_code(KIND, "iq2_xxs")) {
        const uint8_t* at = block + 2 + 8 * g;
        return with_signs(entry_of_8(own, at[n]), SIGNS.by_7[read<uint32_t>(at + 4) >> 7 * n & 127]);
    } else if constexpr (has_code(KIND, "iq2_xs")) {
        const uint32_t word = read<uint16_t>(block + 2 + 2 * i);
        return with_signs(entry_of_8(own, word & 511), SIGNS.by_7[word >> 9]);
    } else if constexpr (has_code(KIND, "iq2_s")) {
        const uint32_t high = block[66 + g] >> 2 * n & 3;
        return with_signs(entry_of_8(own, block[2 + i] | high << 8), SIGNS.by_8[block[34 + i]]);
    } else if constexpr (has_scale(KIND, "F16/4")) {  // IQ1_M
        const uint32_t high = block[32 + i / 2] >> 4 * (i % 2);
        return entry_of_8(own, block[i] | (high & 7) << 8) + uint8_t(high & 8 ? -1 : 1);
    } else {  // IQ1_S
        const uint32_t high = read<uint16_t>(block + 34 + 2 * g);
        return entry_of_8(own, block[2 + i] | (high >> 3 * n & 7) << 8) + uint8_t(high >> 15 ? -1 : 1);
    }
}

template <Kind KIND>
INLINE group codes_in_grid(const uint8_t* block, int g, const Own& own) {
    uint64_t __attribute__((vector_size(GROUP))) found;
#pragma unroll
    for (int n = 0; n < 4; n++) found[n] = (uint64_t)octet_of<KIND>(block, 4 * g + n, own);
    return (group)found;
}

}  // namespace stored
