// Keys and values in 4 bits: attention of rows to them, and their making.
//
// Tokens form groups of 32. A number is low + step * code: keys share step and low by channel of a group, values by
// token and 64 channels, both bf16. A group of one head is a block of bytes: step and low of the keys [D]; their codes
// [D / 8, 32 tokens, 4 channels], whose low halves hold the first half of the channels and the high halves the other;
// step and low of the values [channel groups, 32 tokens]; their codes [4, channels, 4 tokens], whose low halves hold
// tokens 0 to 16 and the high halves the others. So lanes are tokens, then channels, and nothing is added across them.
//
// A query, times the keys' steps, and a row's weights, times the values' steps, are taken to 8 bits for a group: then
// their products with codes are sums of exact integers. Codes count from their middle there, since what rounding leaves
// of a query or a weight would be multiplied by it.
#pragma once
#include "codes.h"

namespace kv_codes {

using codes::Sum;
using codes::TINY;
using codes::u8;

constexpr int GROUP = 32;     // tokens
constexpr int CHANNELS = 64;  // of the values
constexpr int VECTORS = GROUP / W;
constexpr int LANES = 16;  // channels are filled up to so many
constexpr int WIDEST = 1024;
constexpr float MIDDLE = 8;  // of the codes

// Where the parts of a block are, in bytes.
struct Layout {
    int dim;

    int groups() const { return (dim + CHANNELS - 1) / CHANNELS; }
    int channels() const { return (dim + LANES - 1) / LANES * LANES; }
    int key_codes() const { return dim * 4; }
    int value_scales() const { return key_codes() + dim * GROUP / 2; }
    int value_codes() const { return value_scales() + groups() * GROUP * 4; }
    int size() const { return value_codes() + channels() * GROUP / 2; }
};

// Numbers in whole vectors, with one more so that rows do not take each other's places in the nearest cache.
constexpr int room_for(int count) { return (count + W - 1) / W * W + W; }

// The first `count` numbers, then zeros.
INLINE u32 some(const void* from, int count) { return count >= W ? load<u32>(from) : load_some(from, count); }

INLINE f32 magnitude(f32 x) { return (f32)((u32)x & 0x7fffffffu); }

// One number for each of COUNT rows.
template <int COUNT>
struct Each {
    alignas(64) float lanes[W];

    explicit Each(f32 v) { store(lanes, v); }
    float operator[](int row) const { return lanes[row * (W / COUNT)]; }
};

// In every W / COUNT-th lane what op makes of the lanes of a vector, from the first vector on.
template <int COUNT, class Op>
INLINE f32 reduced(f32 (&v)[COUNT], Op op) {
    auto fold = [&](f32 a, f32 b) { return op((f32)zip<0>((u32)a, (u32)b), (f32)zip<1>((u32)a, (u32)b)); };
#pragma unroll
    for (int count = COUNT / 2; count; count /= 2)
#pragma unroll
        for (int i = 0; i < count; i++) v[i] = fold(v[i], v[i + count]);
#pragma unroll
    for (int left = W / COUNT; left > 1; left /= 2) v[0] = fold(v[0], v[0]);
    return v[0];
}

template <int COUNT>
INLINE f32 added(f32 (&v)[COUNT]) {
    return reduced(v, [](f32 a, f32 b) { return a + b; });
}

// Rows of numbers to whole multiples of a scale of their own. FULL: the multiple that the largest becomes.
template <int COUNT, int FULL>
struct Rounding {
    Each<COUNT> scale, inverse;

    explicit Rounding(f32 (&most)[COUNT]) : Rounding(reduced(most, larger)) {}
    explicit Rounding(f32 most) : scale(most * (1.0f / FULL)), inverse(most > TINY ? float(FULL) / most : f32{}) {}

    // x in 8 bits -> the same in 32, plus HIDDEN: to add so much leaves whole numbers in the lowest bits
    INLINE u32 put(int row, f32 x, void* to) const {
        const u32 bits = (u32)fma(x, all(inverse[row]), all(12582912.0f));
        store(to, __builtin_convertvector(bits, codes::bytes));
        return bits;
    }
    static constexpr uint32_t HIDDEN = 0x4b400000u;
};

// scores[r][0..GROUP) of ROWS rows: products of queries [ROWS, D] with the keys of a block.
template <int ROWS>
void score(const float* queries, const uint8_t* block, Layout layout, float* scores, int stride) {
    const int dim = layout.dim, half = dim / 2, room = room_for(dim);
    alignas(64) float stepped[ROWS * room_for(WIDEST)];
    alignas(64) uint8_t numbers[ROWS * room_for(WIDEST)];
    f32 base[ROWS] = {}, most[ROWS] = {};
    for (int d = 0; d < dim; d += W) {
        const u32 units = some(block + d * 4, dim - d);
        const f32 step = Bf16::widen<0>(units), middle = fma(step, all(MIDDLE), Bf16::widen<1>(units));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const f32 q = (f32)some(queries + r * dim + d, dim - d), x = q * step;
            base[r] = fma(q, middle, base[r]);
            most[r] = larger(magnitude(x), most[r]);
            store(stepped + r * room + d, x);
        }
    }
    const Rounding<ROWS, 127> rounding(most);
    const Each<ROWS> bases(added(base));
    f32 sums[ROWS];  // of the multiples
    for (int r = 0; r < ROWS; r++) {
        u32 total = {};
        int vectors = 0;
        for (int d = 0; d < dim; d += W, vectors++)
            total += rounding.put(r, load<f32>(stepped + r * room + d), numbers + r * room + d);
        sums[r] = __builtin_convertvector((i32)(total - vectors * rounding.HIDDEN), f32);
    }
    const Each<ROWS> offsets(added(sums));
    const uint8_t* keys = block + layout.key_codes();
    i32 total[ROWS][VECTORS] = {};
    for (int first = 0; first < half; first += GROUP) {
        const int last = first + GROUP < half ? first + GROUP : half;
        Sum low[ROWS][VECTORS], high[ROWS][VECTORS];
        for (int d = first; d < last; d += 4) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const u8 both = load<u8>(keys + d * GROUP + v * W * 4), one = both & 15, other = both >> 4;
                __builtin_prefetch(keys + d * GROUP + v * W * 4 + layout.size());
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    auto own = reinterpret_cast<const int8_t*>(numbers + r * room + d);
                    low[r][v].add(one, own), high[r][v].add(other, own + half);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) total[r][v] += low[r][v].value() + high[r][v].value();
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            const f32 sum = __builtin_convertvector(total[r][v], f32) - MIDDLE * offsets[r];
            store(scores + r * stride + v * W, fma(all(rounding.scale[r]), sum, all(bases[r])));
        }
}

// out[r][0..channels) of ROWS rows += weights [ROWS, GROUP] times the values of a block.
template <int ROWS>
void mix(const float* weights, int stride, const uint8_t* block, Layout layout, float* out, int out_stride) {
    const int channels = layout.channels();
    const uint8_t *scales = block + layout.value_scales(), *values = block + layout.value_codes();
    for (int first = 0; first < channels; first += CHANNELS, scales += GROUP * 4) {
        alignas(64) uint8_t numbers[ROWS][GROUP];
        f32 stepped[ROWS][VECTORS], base[ROWS] = {}, most[ROWS] = {};
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const u32 units = load<u32>(scales + v * W * 4);
            const f32 step = Bf16::widen<0>(units), middle = fma(step, all(MIDDLE), Bf16::widen<1>(units));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const f32 weight = load<f32>(weights + r * stride + v * W);
                base[r] = fma(weight, middle, base[r]);
                stepped[r][v] = weight * step;
                most[r] = larger(stepped[r][v], most[r]);
            }
        }
        const Rounding<ROWS, 255> rounding(most);
        const Each<ROWS> bases(added(base));
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) rounding.put(r, stepped[r][v], numbers[r] + v * W);
        const int last = first + CHANNELS < channels ? first + CHANNELS : channels;
        for (int d = first; d < last; d += W) {
            Sum sums[ROWS];
#pragma unroll
            for (int t = 0; t < GROUP / 2; t += 4) {
                const uint8_t* from = values + (t / 4 * channels + d) * 4;
                const u8 both = load<u8>(from), one = (both & 15) - uint8_t(MIDDLE), other = (both >> 4) - uint8_t(MIDDLE);
                __builtin_prefetch(from + layout.size());
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    sums[r].add_signed(one, numbers[r] + t), sums[r].add_signed(other, numbers[r] + GROUP / 2 + t);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float* to = out + r * out_stride + d;
                const f32 product = __builtin_convertvector(sums[r].value(), f32);
                store(to, fma(all(rounding.scale[r]), product, load<f32>(to) + bases[r]));
            }
        }
    }
}

// Keys and values of one head and one group, [GROUP, D] each -> a block.
template <class E>
void encode_block(const typename E::element* keys, const typename E::element* values, Layout layout, uint8_t* block) {
    const int dim = layout.dim, half = dim / 2, channels = layout.channels();
    alignas(64) float one[CHANNELS];
    alignas(64) uint8_t codes_of[CHANNELS];
    auto scaled = [&]<int COUNT>(uint8_t* scale) {
        f32 x[COUNT / W];
        for (int v = 0; v < COUNT / W; v++) x[v] = load<f32>(one + v * W);
        codes::quantise<COUNT>(x, codes_of).put(scale);
    };
    __builtin_memset(block + layout.key_codes(), 0, dim * GROUP / 2);
    __builtin_memset(block + layout.value_codes(), 0, channels * GROUP / 2);
    for (int d = 0; d < dim; d++) {
        for (int t = 0; t < GROUP; t++) one[t] = E::widen_one(keys[t * dim + d]);
        scaled.template operator()<GROUP>(block + d * 4);
        const int within = d % half;
        uint8_t* to = block + layout.key_codes() + within / 4 * GROUP * 4 + within % 4;
        for (int t = 0; t < GROUP; t++) to[t * 4] |= codes_of[t] << (d < half ? 0 : 4);
    }
    for (int t = 0; t < GROUP; t++)
        for (int g = 0; g < layout.groups(); g++) {
            const int first = g * CHANNELS, count = dim - first < CHANNELS ? dim - first : CHANNELS;
            for (int d = 0; d < CHANNELS; d++)  // what is missing of a group changes neither its least number nor its largest
                one[d] = E::widen_one(values[t * dim + first + (d < count ? d : 0)]);
            scaled.template operator()<CHANNELS>(block + layout.value_scales() + (g * GROUP + t) * 4);
            const int within = t % (GROUP / 2);
            uint8_t* to = block + layout.value_codes() + (within / 4 * channels + first) * 4 + within % 4;
            for (int d = 0; d < count; d++) to[d * 4] |= codes_of[d] << (t < GROUP / 2 ? 0 : 4);
        }
}

// A block -> keys and values of its head and group, [GROUP, D] each: low + step * code in fp32, rounded once.
template <class E>
void decode_block(const uint8_t* block, Layout layout, typename E::element* keys, typename E::element* values) {
    const int dim = layout.dim, half = dim / 2, channels = layout.channels();
    auto number = [](const uint8_t* scale, int code) {
        uint16_t units[2];
        __builtin_memcpy(units, scale, sizeof units);
        return E::round_one(Bf16::widen_one(units[1]) + Bf16::widen_one(units[0]) * float(code));
    };
    for (int t = 0; t < GROUP; t++) {
        const int high = t < GROUP / 2 ? 0 : 4, within = t % (GROUP / 2);
        for (int d = 0; d < half; d++) {
            const int both = block[layout.key_codes() + d / 4 * GROUP * 4 + t * 4 + d % 4];
            keys[t * dim + d] = number(block + d * 4, both & 15);
            keys[t * dim + half + d] = number(block + (half + d) * 4, both >> 4);
        }
        const uint8_t* codes = block + layout.value_codes() + within / 4 * channels * 4 + within % 4;
        for (int d = 0; d < dim; d++)
            values[t * dim + d] = number(block + layout.value_scales() + (d / CHANNELS * GROUP + t) * 4,
                                         codes[d * 4] >> high & 15);
    }
}

}  // namespace kv_codes

// Keys and values to take to 4 bits: of head h of layer l at keys + l * layer_stride + h * head_stride, [tokens, D],
// strides in elements; blocks likewise, strides in bytes.
struct Encoding {
    const void* keys;
    const void* values;
    uint8_t* blocks;
    int64_t layer_stride, head_stride, layer_bytes, head_bytes;
    int64_t layers, kv_heads, groups, head_dim;
};

namespace kv_codes {

template <class E>
void encode(const Encoding& e, int64_t how_many) {
    using element = typename E::element;
    const Layout layout{int(e.head_dim)};
    threads::each(how_many, e.layers * e.kv_heads * e.groups, [&](int64_t item) {
        const int64_t layer = item / (e.kv_heads * e.groups), head = item / e.groups % e.kv_heads;
        const int64_t group = item % e.groups;
        const int64_t from = layer * e.layer_stride + head * e.head_stride + group * GROUP * e.head_dim;
        encode_block<E>(static_cast<const element*>(e.keys) + from, static_cast<const element*>(e.values) + from,
                        layout, e.blocks + layer * e.layer_bytes + head * e.head_bytes + group * layout.size());
    });
}

}  // namespace kv_codes
