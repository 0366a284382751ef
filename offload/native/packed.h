// Numbers of bf16 in about 12 of their 16 bits, none of them lost.
//
// A block is a run of numbers, in groups. A number's sign and mantissa are a byte as they are; its exponent is 4 bits,
// how far it is below the largest of its group, of which 15 says that it is among the escapes, a byte each. A block of N
// numbers in groups of G is: signs and mantissas [N]; distances [N / G, G / 2], whose low halves are those of a group's
// first half and whose high halves the other's; for each group 32 bits, its largest exponent and, from bit 8 on, how
// many escapes come before its own; the escapes, in the order of their numbers.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"
#include "vectors.h"

namespace packed {

constexpr int STEP = 32;  // numbers at a time, a divisor of half a group
constexpr int ESCAPE = 15;
constexpr int64_t DRAWN = 16;  // groups that a thread draws at a time

struct Shape {
    int64_t numbers, group, room;  // of a block, of a group; escapes that a block has room for

    int64_t groups() const { return numbers / group; }
    int64_t distances() const { return numbers; }
    int64_t heads() const { return distances() + numbers / 2; }
    int64_t escapes() const { return heads() + 4 * groups(); }
    int64_t size() const { return escapes() + room; }
};

INLINE int exponent(uint16_t number) { return number >> 7 & 255; }

INLINE int largest_exponent(const uint16_t* numbers, int64_t count) {
    uint16_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = numbers[i] & 0x7fff;
        most = magnitude > most ? magnitude : most;
    }
    return most >> 7;
}

// Escapes of the numbers of one group.
INLINE int64_t count_escapes(const uint16_t* numbers, int64_t count, int base) {
    const uint16_t least = base < ESCAPE ? 0 : uint16_t((base - ESCAPE + 1) << 7);  // what is below it escapes
    int64_t escapes = 0;
    for (int64_t at = 0; at < count; at += STEP) {
        uint16_t below = 0;
        for (int i = 0; i < STEP; i++) below += uint16_t((numbers[at + i] & 0x7fff) < least);
        escapes += below;
    }
    return escapes;
}

// The parts of STEP numbers. -> Where the next escape goes.
INLINE uint8_t* split(const uint16_t* numbers, int base, uint8_t* low, uint8_t* distances, uint8_t* escapes) {
    uint8_t escaped = 0;
    for (int i = 0; i < STEP; i++) {
        low[i] = uint8_t((numbers[i] >> 8 & 128) | (numbers[i] & 127));
        const uint8_t distance = uint8_t(base - exponent(numbers[i]));
        distances[i] = distance < ESCAPE ? distance : uint8_t(ESCAPE);
        escaped |= uint8_t(distance >= ESCAPE);
    }
    if (escaped)
        for (int i = 0; i < STEP; i++)
            if (distances[i] == ESCAPE) *escapes++ = uint8_t(exponent(numbers[i]));
    return escapes;
}

// A block at `low`, which may be where its numbers are, with zeros behind it up to its size. -> Bytes that it fills; 0,
// and nothing has changed, where its escapes have no room or memory is short.
inline int64_t pack(const uint16_t* block, uint8_t* low, const Shape& shape) {
    int64_t total = 0;
    for (int64_t at = 0; at < shape.numbers; at += shape.group)
        total += count_escapes(block + at, shape.group, largest_exponent(block + at, shape.group));
    if (total > shape.room) return 0;
    const int64_t rest = shape.size() - shape.distances(), half = shape.group / 2;
    auto* buffer = static_cast<uint8_t*>(calloc(rest + 3 * shape.group, 1));
    if (buffer == nullptr) return 0;
    auto* numbers = reinterpret_cast<uint16_t*>(buffer + rest);  // of a group: their place is written to meanwhile
    auto* apart = buffer + rest + 2 * shape.group;  // distances of a group, one a byte
    uint8_t* heads = buffer + (shape.heads() - shape.distances());
    uint8_t* escapes = buffer + (shape.escapes() - shape.distances());
    uint8_t* next = escapes;
    for (int64_t g = 0; g < shape.groups(); g++) {
        memcpy(numbers, block + g * shape.group, 2 * shape.group);
        const int base = largest_exponent(numbers, shape.group);
        const uint32_t head = uint32_t(base) | uint32_t(next - escapes) << 8;
        memcpy(heads + 4 * g, &head, 4);
        for (int64_t at = 0; at < shape.group; at += STEP)
            next = split(numbers + at, base, low + g * shape.group + at, apart + at, next);
        for (int64_t i = 0; i < half; i++) buffer[g * half + i] = uint8_t(apart[i] | apart[half + i] << 4);
    }
    memcpy(low + shape.distances(), buffer, rest);
    free(buffer);
    return shape.escapes() + total;
}

// Numbers of half a group. SHIFT: of its distances in their bytes. -> The escapes after its own.
template <int SHIFT>
INLINE const uint8_t* unpack_half(const uint8_t* low, const uint8_t* distances, int base, const uint8_t* escapes,
                                  int64_t count, uint16_t* out) {
    for (int64_t at = 0; at < count; at += STEP) {
        uint8_t escaped = 0;
        for (int i = 0; i < STEP; i++) {
            const uint8_t distance = distances[at + i] >> SHIFT & 15;
            const uint16_t rest = low[at + i];
            escaped |= uint8_t(distance == ESCAPE);
            out[at + i] = uint16_t((rest & 128) << 8 | (rest & 127) | uint16_t(base - distance) << 7);
        }
        if (escaped)
            for (int i = 0; i < STEP; i++)
                if ((distances[at + i] >> SHIFT & 15) == ESCAPE)
                    out[at + i] = uint16_t((out[at + i] & 0x807f) | uint16_t(*escapes++) << 7);
    }
    return escapes;
}

inline void unpack_group(const uint8_t* block, const Shape& shape, int64_t group, uint16_t* out) {
    uint32_t head;
    memcpy(&head, block + shape.heads() + 4 * group, 4);
    const int64_t half = shape.group / 2;
    const uint8_t* low = block + group * shape.group;
    const uint8_t* distances = block + shape.distances() + group * half;
    const uint8_t* escapes = block + shape.escapes() + (head >> 8);
    escapes = unpack_half<0>(low, distances, head & 255, escapes, half, out);
    unpack_half<4>(low + half, distances, head & 255, escapes, half, out + half);
}

// Groups `first` to `first + count` of the block at `from`, packed or as they are, go to `to`.
struct Part {
    const uint8_t* from;
    uint8_t* to;
    int64_t first, count, is_packed;
};

inline void unpack(const Part& part, const Shape& shape) {
    const int64_t bytes = 2 * shape.group;
    if (!part.is_packed) {
        memcpy(part.to, part.from + part.first * bytes, part.count * bytes);
        return;
    }
    for (int64_t g = 0; g < part.count; g++)
        unpack_group(part.from, shape, part.first + g, reinterpret_cast<uint16_t*>(part.to + g * bytes));
}

inline void pack_all(const uint16_t* const* blocks, uint8_t* const* to, int64_t count, int64_t* sizes,
                     const Shape& shape, int64_t how_many) {
    threads::each(how_many, count, [&](int64_t i) { sizes[i] = pack(blocks[i], to[i], shape); });
}

inline void unpack_all(const Part* parts, int64_t count, const Shape& shape, int64_t how_many) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) most = parts[i].count > most ? parts[i].count : most;
    const int64_t draws = (most + DRAWN - 1) / DRAWN;  // for each part
    threads::each(how_many, count * draws, [&](int64_t i) {
        Part part = parts[i / draws];
        const int64_t first = i % draws * DRAWN, left = part.count - first;
        if (left <= 0) return;
        part.first += first, part.to += first * 2 * shape.group, part.count = left < DRAWN ? left : DRAWN;
        unpack(part, shape);
    });
}

}  // namespace packed
