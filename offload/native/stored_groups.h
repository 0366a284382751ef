// Groups of 32 numbers of a block of GGUF's kinds: codes, integers of at most 8 bits with a sign, and the steps that they
// are multiplied by, of 32 or of 16 numbers (formats/encodings.py says where they lie).
#pragma once
#include "stored_grids.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace stored {

INLINE float half(const uint8_t* at) {
    uint16_t bits;
    __builtin_memcpy(&bits, at, 2);
#if defined(__F16C__)
    uint32_t wide = bits;
    asm("" : "+r"(wide));  // or it is put into a register in part, and waits for what was there before
    return _mm_cvtph_ps(_mm_cvtsi32_si128(int(wide)))[0];
#else
    return Fp16::widen_one(bits);
#endif
}

// Scales of e8m0, 2^(e - 127), halved: e in the lowest byte of each word, and anything above.
template <class Words>
INLINE Words half_e8m0(Words words) {
    const Words e = words & 255;
    return e > 1 ? (e - 1) << 23 : (e + 1) << 21;  // the bits of floats, of which the least two are subnormal
}

// W integers of 8 bits from `at` on, with a sign or, as uint8_t, without.
template <class Integer>
INLINE f32 integers(const Integer* at) {
    using vector = Integer __attribute__((vector_size(W)));
    return __builtin_convertvector(__builtin_convertvector(load<vector>(at), i32), f32);
}

// A float of 8 bits, e4m3, in each lane.
INLINE f32 float8(i32 code) {
    const u32 magnitude = (u32)code & 127;
    const f32 normal = (f32)((magnitude << 20) + (120u << 23));
    const f32 small = __builtin_convertvector((i32)magnitude, f32) * 0x1p-9f;
    u32 bits = magnitude < 8 ? (u32)small : (u32)normal;
    bits = magnitude == 127 ? u32{} + 0x7fc00000u : bits;
    return (f32)(bits | ((u32)code & 128) << 24);
}

// The numbers of codes in a book, integers with a sign.
template <Book BOOK>
INLINE group in_book(group codes) {
    if constexpr (BOOK == Book::none) return codes;
#if defined(__AVX2__)
    const __m128i numbers = load<__m128i>(BOOKS[int(BOOK)]);
    return (group)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), (__m256i)codes);
#else
    const int8x16_t numbers = load<int8x16_t>(BOOKS[int(BOOK)]);
    int8_t found[GROUP];
    for (int i = 0; i < GROUP; i += 16) store(found + i, vqtbl1q_s8(numbers, load<uint8x16_t>((uint8_t*)&codes + i)));
    return load<group>(found);
#endif
}

INLINE group joined(half_group first, half_group second) {
    return __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                   21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

// 16 bytes' low halves, then their high ones.
INLINE group nibbles(const uint8_t* at) {
#if defined(__AVX512BW__)
    const __m256i both = _mm256_broadcastsi128_si256(load<__m128i>(at));
    return (group)_mm256_and_si256(_mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)), _mm256_set1_epi8(15));
#else
    const half_group both = load<half_group>(at);
    return joined(both & 15, both >> 4);
#endif
}

// Of 32 bits, from the lowest on, the set ones as bytes of ones.
INLINE group spread_bits(uint32_t all) {
    const group four = (group)(uint32_t __attribute__((vector_size(GROUP)))){all};
    const group spread = __builtin_shufflevector(four, four, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2,
                                                 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const uint64_t bits = 0x8040201008040201u;
    const group bit = (group)(uint64_t __attribute__((vector_size(GROUP)))){bits, bits, bits, bits};
    return (group)((spread & bit) != 0);
}

// The codes of a block of 32 in 4 or 5 bits.
template <Kind KIND>
INLINE group codes_of_32(const uint8_t* block) {
    constexpr Form own = form(KIND);
    if constexpr (own.high.bits == 1) return nibbles(block + own.codes.at) | (spread_bits(read<uint32_t>(block + own.high.at)) & 16);
    return nibbles(block + own.codes.at);
}

// Of a block's 8 groups, the steps and what is taken away: 6 bits each, times the block's own.
struct Scales {
    float steps[8], least[8];

    explicit Scales(const uint8_t* block) {
        using eight = uint8_t __attribute__((vector_size(8)));
        using floats = float __attribute__((vector_size(32)));
        uint32_t words[3];  // 6 bits of the first four of either and 2 of the others, and then their lower 4
        __builtin_memcpy(words, block + 4, sizeof words);
        const uint64_t upper = (words[2] & 0x0f0f0f0fu) | (words[0] >> 6 & 0x03030303u) << 4;
        const uint64_t above = (words[2] >> 4 & 0x0f0f0f0fu) | (words[1] >> 6 & 0x03030303u) << 4;
        const uint64_t first = uint64_t(words[0] & 0x3f3f3f3fu) | upper << 32;
        const uint64_t second = uint64_t(words[1] & 0x3f3f3f3fu) | above << 32;
        store(steps, __builtin_convertvector((eight)first, floats) * half(block));
        store(least, __builtin_convertvector((eight)second, floats) * half(block + 2));
    }
};

// The codes of group g of a block.
INLINE group codes_of_q5_k(const uint8_t* block, int g) {
    const group both = load<group>(block + 48 + g / 2 * GROUP), fifths = load<group>(block + 16);
    return (g % 2 ? both >> 4 : both & 15) | (fifths >> g & 1) << 4;
}

// The same, less 32 each: with a sign.
INLINE group codes_of_q6_k(const uint8_t* block, int g) {
    const group lower = load<group>(block + g / 4 * 64 + g % 2 * GROUP), upper = load<group>(block + 128 + g / 4 * GROUP);
    return ((g % 4 < 2 ? lower & 15 : lower >> 4) | (upper >> g % 4 * 2 & 3) << 4) - 32;
}

// 32 codes of 2 bits, of which a byte has four in order.
INLINE group in_order_2(const uint8_t* at) {
    using words = uint32_t __attribute__((vector_size(GROUP)));
    using eight_bytes = uint8_t __attribute__((vector_size(8)));
    const words four = __builtin_convertvector(load<eight_bytes>(at), words) * 0x01010101u;
    return (group)((four & 0x03) | (four >> 2 & 0x0300) | (four >> 4 & 0x030000) | (four >> 6 & 0x03000000));
}

// The codes of group g of a block, less the centre: with a sign.
template <Kind KIND>
INLINE group codes_of_group(const uint8_t* block, int g, const Own& own) {
    constexpr Form kind = form(KIND);
    constexpr auto less = uint8_t(centre(KIND));
    if constexpr (has_grid(KIND)) return codes_in_grid<KIND>(block, g, own);
    else if constexpr (has_steps(KIND, "bytes")) return codes_of_q6_k(block, g);
    else if constexpr (has_steps(KIND, "k") && kind.high.bits) return codes_of_q5_k(block, g) - less;
    else if constexpr (has_code(KIND, "signed")) return load<group>(block + kind.codes.at);
    else if constexpr (kind.numbers == 32) return in_book<book(KIND)>(codes_of_32<KIND>(block)) - less;
    else if constexpr (has_code(KIND, "iq4")) return in_book<book(KIND)>(nibbles(block + kind.codes.at + 16 * g));
    else if constexpr (has_code(KIND, "e2m1")) {  // NVFP4: of 16 numbers eight low halves, then their high ones
        const group all = in_book<book(KIND)>(nibbles(block + kind.codes.at + 16 * g));
        return __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23, 8, 9, 10, 11,
                                       12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    } else if constexpr (has_code(KIND, "sign")) {
        return spread_bits(~read<uint32_t>(block + kind.codes.at + 4 * g)) | 1;
    } else if constexpr (kind.codes.bits == 2 && kind.numbers == 64) {
        return in_order_2(block + kind.codes.at + 8 * g) - less;
    } else if constexpr (kind.codes.bits == 2) {
        const group two = load<group>(block + kind.codes.at + g / 4 * GROUP) >> g % 4 * 2 & 3;
        if constexpr (!kind.high.bits) return two - less;
        return (two | (load<group>(block + kind.high.at) >> g & 1) << 2) - less;
    } else {
        const group both = load<group>(block + kind.codes.at + g / 2 * GROUP);
        return (g % 2 ? both >> 4 : both & 15) - less;
    }
}

// The block of group g of those from `at` on.
template <Kind KIND>
INLINE const uint8_t* block_of(const uint8_t* at, int g) {
    return at + g / groups_of_block(KIND) * form(KIND).nbytes;
}

// The codes of group g of the blocks from `at` on.
template <Kind KIND>
INLINE group codes_of(const uint8_t* at, int g, const Own& own) {
    return codes_of_group<KIND>(block_of<KIND>(at, g), g % groups_of_block(KIND), own);
}

// The same to memory, of a grid's eight at a time.
template <Kind KIND>
INLINE void store_codes(const uint8_t* at, int g, const Own& own, int8_t (&to)[GROUP]) {
    if constexpr (has_grid(KIND))
        for (int i = 0; i < 4; i++)
            store(to + 8 * i, octet_of<KIND>(block_of<KIND>(at, g), g % groups_of_block(KIND) * 4 + i, own));
    else store(to, codes_of<KIND>(at, g, own));
    if constexpr (W == 8 && !has_grid(KIND) && !has_code(KIND, "signed"))
        asm("" : "+m"(to));  // widened as they are loaded, not by shuffles of a register
}

// Of two groups whose codes of 4 bits begin at `first` and `second`, the first 16 codes of both, then the others.
template <Kind KIND>
INLINE void codes_by_half(const uint8_t* first, const uint8_t* second, group (&codes)[2]) {
    constexpr Form own = form(KIND);
    const group both = own.numbers > 32 ? load<group>(first) : joined(load<half_group>(first), load<half_group>(second));
    codes[0] = both & 15, codes[1] = both >> 4;
    if constexpr (own.high.bits) {
        constexpr int64_t back = own.codes.at - own.high.at;
        const auto one = read<uint32_t>(first - back), other = read<uint32_t>(second - back);
        codes[0] |= spread_bits((one & 0xffff) | other << 16) & 16;
        codes[1] |= spread_bits(one >> 16 | (other & 0xffff0000)) & 16;
    }
    for (group& each : codes) each = in_book<book(KIND)>(each) - uint8_t(centre(KIND));
    if constexpr (by_16(KIND)) {  // NVFP4: of 16 numbers eight low halves, then their high ones
        using octets = uint64_t __attribute__((vector_size(GROUP)));
        const octets low = (octets)codes[0], high = (octets)codes[1];
        codes[0] = (group)__builtin_shufflevector(low, high, 0, 4, 2, 6);
        codes[1] = (group)__builtin_shufflevector(low, high, 1, 5, 3, 7);
    }
}

constexpr uint64_t LOW_HALVES = 0x0f0f0f0f0f0f0f0f;

// Eight fields of 4 or of 2 bits as bytes.
INLINE uint64_t bytes_of_4(uint32_t fields) {
    uint64_t all = fields;
    all = (all | all << 16) & 0x0000ffff0000ffff, all = (all | all << 8) & 0x00ff00ff00ff00ff;
    return (all | all << 4) & LOW_HALVES;
}
INLINE uint64_t bytes_of_2(uint16_t fields) {
    uint64_t all = fields;
    all = (all | all << 24) & 0x000000ff000000ff, all = (all | all << 12) & 0x000f000f000f000f;
    return (all | all << 6) & 0x0303030303030303;
}

// The integers of 16 groups, a byte each, or of 8, in a block with steps "small".
struct Smalls {
    uint64_t first, second;
};

template <Kind KIND>
INLINE Smalls smalls(const uint8_t* block) {
    using bytes_8 = uint8_t __attribute__((vector_size(8)));
    const auto in_words = [](auto words) { return Smalls{(uint64_t)__builtin_convertvector(words, bytes_8), 0}; };
    const auto pair = [](uint64_t all) { return Smalls{bytes_of_4(uint32_t(all)), bytes_of_4(uint32_t(all >> 32))}; };
    if constexpr (is(form(KIND).name, "IQ4_XS")) {
        return {bytes_of_4(read<uint32_t>(block + 4)) | bytes_of_2(read<uint16_t>(block + 2)) << 4, 0};
    } else if constexpr (is(form(KIND).name, "Q3_K")) {
        const uint64_t low = read<uint64_t>(block + 96);
        const uint32_t high = read<uint32_t>(block + 104), two = 0x03030303;
        const auto upper = [&](int from) { return uint64_t(high >> from & two) | uint64_t(high >> (from + 2) & two) << 32; };
        return {(low & LOW_HALVES) | upper(0) << 4, (low >> 4 & LOW_HALVES) | upper(4) << 4};
    } else if constexpr (is(form(KIND).name, "Q2_K")) {
        return {read<uint64_t>(block) & LOW_HALVES, read<uint64_t>(block + 8) & LOW_HALVES};
    } else if constexpr (is(form(KIND).name, "IQ3_S")) {
        return {bytes_of_4(read<uint32_t>(block + 106)), 0};
    } else if constexpr (is(form(KIND).name, "IQ3_XXS")) {
        return in_words(load<uint32_t __attribute__((vector_size(32)))>(block + 66) >> 28);
    } else if constexpr (is(form(KIND).name, "IQ2_XXS")) {
        return in_words(load<uint64_t __attribute__((vector_size(64)))>(block + 2) >> 60);
    } else if constexpr (is(form(KIND).name, "IQ2_XS")) {
        return pair(read<uint64_t>(block + 66));
    } else if constexpr (is(form(KIND).name, "IQ2_S")) {
        return pair(read<uint64_t>(block + 74));
    } else if constexpr (is(form(KIND).name, "IQ1_S")) {
        return in_words(load<uint16_t __attribute__((vector_size(16)))>(block + 34) >> 12 & 7);
    } else {  // IQ1_M: four of three bits in each of four words
        const uint64_t words = read<uint64_t>(block + 48);
        const auto two = [&](uint64_t word) {
            return (word & 7) | (word << 5 & 0x700) | (word << 10 & 0x70000) | (word << 15 & 0x7000000);
        };
        const auto four = [&](int from) { return two(words >> from & 4095) | two(words >> (from + 16) & 4095) << 32; };
        return {four(0), four(32)};
    }
}

using eight = float __attribute__((vector_size(32)));

INLINE eight floats_of_bytes(uint64_t all) {
    using bytes_8 = uint8_t __attribute__((vector_size(8)));
    return __builtin_convertvector((bytes_8)all, eight);
}

// A block's scale, of 16 bits.
template <Kind KIND>
INLINE float scale_of(const uint8_t* block) {
    if constexpr (!has_scale(KIND, "F16/4")) return half(block + form(KIND).scale_at);
    const uint64_t tops = read<uint64_t>(block + 48) >> 12 & 0x000f000f000f000f;
    const uint32_t bits = uint32_t((tops | tops >> 12 | tops >> 24 | tops >> 36) & 0xffff);
    return half(reinterpret_cast<const uint8_t*>(&bits));
}

// The steps of the groups of some blocks, of 16 numbers each where a group has 16, to `steps`, which has room for W
// more; and Q2_K's least values to `least`.
template <Kind KIND, int BLOCKS>
INLINE void steps_of_blocks(const uint8_t* at, const Own& own, float* steps, [[maybe_unused]] float* least) {
    constexpr Form kind = form(KIND);
    if constexpr (has_scale(KIND, "E4M3")) {  // halved, as the codes are doubled
        uint32_t __attribute__((vector_size(16))) words = {};
        for (int b = 0; b < BLOCKS; b++) words[b] = read<uint32_t>(at + b * kind.nbytes);
        uint8_t scales[16 + W];
        store(scales, words);
        for (int i = 0; i < 4 * BLOCKS; i += W) {
            const f32 numbers = float8(__builtin_convertvector(load<bytes>(scales + i), i32));
            store(steps + i, (has_steps(KIND, "over") ? numbers / own.scale : numbers * own.scale) / 2);
        }
    } else if constexpr (has_steps(KIND, "bytes")) {
        auto scales = reinterpret_cast<const int8_t*>(at + kind.scale_at - 16);
        for (int i = 0; i < 16; i += W) store(steps + i, integers(scales + i) * half(at + kind.scale_at));
    } else if constexpr (has_steps(KIND, "small")) {
        const float d = scale_of<KIND>(at);
        const Smalls all = smalls<KIND>(at);
        const auto step = [&](uint64_t each) {
            return (floats_of_bytes(each) * float(kind.times) + float(kind.plus)) * d;
        };
        store(steps, step(all.first));
        if constexpr (kind.group == 16) store(steps + 8, step(all.second));
        if constexpr (kind.leasts) {
            const float m = half(at + kind.scale_at + 2);
            const auto value = [&](int from) { return floats_of_bytes(read<uint64_t>(at + from) >> 4 & LOW_HALVES) * m; };
            store(least, value(0)), store(least + 8, value(8));
        }
    } else {
        for (int i = 0; i < BLOCKS * kind.numbers / GROUP; i++)
            steps[i] = half(at + i / (kind.numbers / GROUP) * kind.nbytes + kind.scale_at);
    }
}

}  // namespace stored
