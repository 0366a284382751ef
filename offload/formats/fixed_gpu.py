"""Stored matrices on a GPU as products in fixed point take them, in Triton: codes as int8 by groups of 32, and the
steps and least values of their parts.

A step of a program has 256 inputs of each output: eight groups, whose codes are words of four, `[8, N, 8]` for N
outputs. A tensor core reads such words from registers as they are, so `as_bytes` costs nothing, if the compiler
computes codes in the tensor core's own layout from their last loads on. It does if nothing behind these loads depends
on a word's place: what does is loaded, too, from a table of the integers in their order (`counts_of`).

Where codes have less than 8 bits, those with a centre in the middle of them are in a byte's upper bits, with `spare`
bits below them. Codes of a book are looked up by permutations of bytes: both codes of a byte follow each other.
"""

# Triton reads the annotations of programs: they are not postponed.
import re
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.errors import TriforceError
from offload.formats.encodings import BOOKS, Encoding
from offload.formats.stored_codes_gpu import halves_at, in_bytes, integers_at, items_at, more
from offload.formats.stored_gpu import e4m3, half_of
from offload.machine import KERNELS

GROUP = 32  # inputs with one unit
STEP = 256  # inputs at a time
_COUNTED = 64
_checked = set[str]()  # compiled programs


@cache
def counts_of(device: torch.device) -> Tensor:
    """The integers from 0 on, int32 [64]. In memory that is never freed, as that of `stored_codes_gpu.book_of`."""
    return torch.arange(_COUNTED, dtype=torch.int32, device=device)


def check_bytes(compiled: Any) -> None:
    """Check once of a program that `launch` returned that `as_bytes` is right in it.

    Errors: TriforceError, with the remedy, where a word's bytes are not neighbours in a register of each thread."""
    if compiled is None or compiled.hash in _checked:  # the interpreter has no registers
        return
    if not joins_bytes(compiled.asm["ttgir"]):
        raise TriforceError(
            f"Triton {triton.__version__} puts the bytes of codes into registers in an order that products in fixed "
            f"point do not know; install another version, or set {KERNELS}=off in the environment"
        )
    _checked.add(compiled.hash)


def joins_bytes(ttgir: str) -> bool:
    """Whether, in a program with its layouts, the registers of a thread have the bytes of `as_bytes` in their order."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)", ttgir, re.MULTILINE))
    made = re.findall(r'elementwise_inline_asm "mov\.b32.* -> tensor<[0-9x]+xi8, (#\w+)>', ttgir)
    wanted = "{register = [[0, 0, 0, 1], [0, 0, 0, 2],"
    return bool(made) and all(wanted in layouts.get(each, "") for each in made)


@triton.constexpr_function
def spare_of(form: Encoding) -> int:
    """The bits of a byte below a code."""
    return 8 - form.width if form.centre_taken and form.centre_taken == 1 << (form.width - 1) else 0


@triton.constexpr_function
def pairs_of(form: Encoding) -> int:
    """The bytes of a run, where codes of their lower and upper halves alternate in the order of a product; 0 where the
    order is that of inputs."""
    return form.codes.run if form.code in BOOKS and form.codes.bits == 4 else 0


@triton.constexpr_function
def sums_of(form: Encoding) -> int:
    """The inputs whose sum a least value is multiplied by; 0 where there are no least values."""
    return min(form.group, GROUP) if form.least is not None or form.steps == "least" else 0


@triton.constexpr_function
def _book_word(code: str, number: int) -> int:
    """Numbers 4 * number to 4 * number + 3 of a book as a word."""
    return int.from_bytes(bytes(each & 255 for each in BOOKS[code][4 * number :][:4]), "little", signed=True)


@triton.jit
def permuted(low, high, places):
    """Four of the eight bytes of two words, by the four lowest fields of four bits of `places`, below 8: int32."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, places], tl.int32, True, 1)


@triton.jit
def as_bytes(words):
    """Words [G, N, K] as their bytes: int8 [G, N, 4 * K]. Four neighbours of a register are one: their word's."""
    wide = tl.broadcast_to(words[:, :, :, None], (words.shape[0], words.shape[1], words.shape[2], 4))
    own = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [wide], tl.int8, True, 4)
    return tl.reshape(own, (words.shape[0], words.shape[1], words.shape[2] * 4))


@triton.jit
def _words_at(home, odd, at, held, counts, BLOCK: tl.constexpr):
    """Load words from byte offsets `at`, [M, 1, K]: as `stored_codes_gpu.words_at`, but the shift is loaded."""
    if BLOCK % 4 == 0:
        words = tl.load(home + at // 4, mask=held, other=0)
    else:
        place = at + odd
        shift = tl.load(counts + place % 4 * 8)
        low = tl.load(home + place // 4, mask=held, other=0)
        high = tl.load(home + place // 4 + 1, mask=held & (place % 4 != 0), other=0)
        words = (low.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)).to(tl.int32) | high << 1 << (31 - shift)
    return words


@triton.jit
def _block_at(number, SIZE: tl.constexpr, FORM: tl.constexpr):
    """The offset in bytes of the block with the part `number` of `SIZE` inputs of a step."""
    return number * SIZE // FORM.numbers * FORM.nbytes


@triton.jit
def _plane(home, odd, first, rest, counts, PLANE: tl.constexpr, OUTPUTS: tl.constexpr, FORM: tl.constexpr):
    """A plane of a step's codes, in the lowest bits of the bytes of words: int32 [8, OUTPUTS, 8]. rest: groups from the
    step's first one on that the row has."""
    BITS: tl.constexpr = PLANE.bits
    RUN: tl.constexpr = PLANE.run
    PARTS: tl.constexpr = 8 // BITS
    group, word = tl.arange(0, 8)[:, None, None], tl.arange(0, 8)[None, None, :]
    at = first + _block_at(group, 32, FORM) + PLANE.at
    if RUN == 1:  # 4 codes after the other in the bits of a word
        own = tl.arange(0, BITS)[None, None, :]
        inside = group * 32 % FORM.numbers // 32 * (4 * BITS)
        words = _words_at(home, odd, at + inside + 4 * own, group < rest, counts, FORM.nbytes)
        wide = tl.broadcast_to(words[:, :, :, None], (8, OUTPUTS, BITS, 8 // BITS))
        fields = tl.reshape(wide, (8, OUTPUTS, 8)) >> tl.load(counts + word % (8 // BITS) * (4 * BITS))
        codes = in_bytes(fields & ((1 << 4 * BITS) - 1), BITS)
    elif RUN < 32:  # a group has all parts of its bytes
        OWN: tl.constexpr = 32 // (RUN * PARTS)
        APART: tl.constexpr = 16 if pairs_of(FORM) else BITS  # a part's codes, or those of half a word
        own = tl.arange(0, OWN * RUN // 4)[None, None, :]
        inside = group * 32 % FORM.numbers // PARTS
        words = _words_at(home, odd, at + inside + 4 * own, group < rest, counts, FORM.nbytes)
        apart = tl.reshape(words, (8, OUTPUTS, OWN, 1, RUN // 4))
        wide = tl.reshape(tl.broadcast_to(apart, (8, OUTPUTS, OWN, PARTS, RUN // 4)), (8, OUTPUTS, 8))
        codes = wide >> tl.load(counts + word // (RUN // 4) % PARTS * APART)
    else:  # a part of 32 bytes is a group
        EACH: tl.constexpr = RUN // 32
        RUNS: tl.constexpr = 8 // (EACH * PARTS)
        own = tl.arange(0, EACH * RUNS)[:, None, None]
        held = own // EACH * (EACH * PARTS) < rest
        inside = own * (32 * PARTS) % FORM.numbers // PARTS
        begun = first + _block_at(own, 32 * PARTS, FORM) + PLANE.at
        codes = _words_at(home, odd, begun + inside + 4 * word, held, counts, FORM.nbytes)
        if PARTS > 1:
            apart = tl.reshape(codes, (RUNS, 1, EACH, OUTPUTS, 8))
            wide = tl.reshape(tl.broadcast_to(apart, (RUNS, PARTS, EACH, OUTPUTS, 8)), (8, OUTPUTS, 8))
            codes = wide >> tl.load(counts + group // EACH % PARTS * BITS)
    return codes


@triton.jit
def codes_of_groups(
    home,  # pointers [1, N, 1] to whole words
    odd,  # int32 [1, N, 1]: the bytes, below 4, from there to the row's first one
    first,  # the step's first byte in a row
    rest,  # groups from the step's first one on that a row has: codes of others are any
    book,  # from stored_codes_gpu.book_of
    counts,  # from counts_of
    OUTPUTS: tl.constexpr,  # N
    FORM: tl.constexpr,  # an Encoding with integers
):
    """Codes less their centre, times 2**spare: words of int8, int32 [8, N, 8]."""
    BITS: tl.constexpr = FORM.codes.bits
    ONES: tl.constexpr = 0x01010101
    TOPS: tl.constexpr = 0x80808080 - 2**32
    if FORM.grid is not None:
        codes = _in_grid(home, odd, first, rest, book, FORM.grid, FORM)
    else:
        codes = _plane(home, odd, first, rest, counts, FORM.codes, OUTPUTS, FORM)
        if pairs_of(FORM):
            codes = _in_book(codes, FORM.code)
        elif FORM.code == "sign":
            codes = (codes & ONES) * 254 ^ -1
        elif BITS < 8:
            codes = codes & ((1 << BITS) - 1) * ONES
            if FORM.high.bits:
                UPPER: tl.constexpr = ((1 << FORM.high.bits) - 1) * ONES
                codes |= (_plane(home, odd, first, rest, counts, FORM.high, OUTPUTS, FORM) & UPPER) << BITS
            if spare_of(FORM):
                codes = codes << spare_of(FORM) ^ TOPS
            elif FORM.centre_taken:
                codes = codes + (128 - FORM.centre_taken) * ONES ^ TOPS
    return codes


@triton.jit
def _in_book(codes, CODE: tl.constexpr):
    """The numbers of the codes in the lower 16 bits of words."""
    places, picked = codes & 0x7777, codes >> 1 & 0x4444 | 0x3210
    lower = permuted(_book_word(CODE, 0), _book_word(CODE, 1), places)
    upper = permuted(_book_word(CODE, 2), _book_word(CODE, 3), places)
    return permuted(lower, upper, picked)


@triton.jit
def _in_grid(home, odd, first, rest, book, GRID: tl.constexpr, FORM: tl.constexpr):
    """Words of the codes of a step in a grid. The last loads are those of entries and of signs."""
    BLOCK: tl.constexpr = FORM.nbytes
    group, word = tl.arange(0, 8)[:, None, None], tl.arange(0, 8)[None, None, :]
    held, at, eight = group < rest, first, group * 4 + word // 2
    item = eight if GRID.each == 8 else group * 8 + word
    index = items_at(home, odd, at, item, held, GRID.low, BLOCK)
    if GRID.high.bits:
        index |= items_at(home, odd, at, item, held, GRID.high, BLOCK) << 8
    entry = tl.load(book + 16 + (index * 2 + word % 2 if GRID.each == 8 else index))
    signs = items_at(home, odd, at, eight, held, GRID.signs, BLOCK)
    if GRID.signs.bits == 1:
        entry = more(entry, tl.load(book + signs))
    else:
        if GRID.signs.bits == 7:
            signs |= (0x96696996 - 2**32 >> ((signs ^ signs >> 5) & 31) & 1) << 7  # as `stored_codes_gpu.in_grid`
        one = tl.load(book + (signs >> word % 2 * 4 & 15))
        entry = (entry ^ one * 255) + one
    return entry


@triton.jit
def steps_of_parts(
    home, odd,  # as above, [1, N]
    first,
    part,  # int32 [M, 1]: parts of a step
    held,  # bool [M, 1]: parts that the row has
    tail,  # fp32 [1, N]: rows' own scales, where they have some
    FORM: tl.constexpr,
):  # fmt: skip
    """The steps of parts, and the least values of codes less their centre: fp32 [M, N] both. -0, which changes no sum,
    of parts that are not held."""
    SIZE: tl.constexpr = min(FORM.group, 32)
    BLOCK: tl.constexpr = FORM.nbytes
    at, group = first + _block_at(part, SIZE, FORM), part * SIZE % FORM.numbers // FORM.group
    head = halves_at(home, odd, at + FORM.scale_at, held, BLOCK)
    if FORM.scale == "E8M0":
        exponent = head & 255
        step = tl.where(exponent > 1, (exponent - 1) << 23, (exponent + 1) << 21).to(tl.float32, bitcast=True)
    elif FORM.scale == "E4M3":
        step = e4m3(head << (24 - 8 * group))
        step = (step * tail if FORM.steps == "times" else tl.div_rn(step, tail)) * 0.5  # e2m1 is doubled
    else:
        if FORM.scale == "F16/4":
            next_head = halves_at(home, odd, at + (FORM.scale_at + 4), held, BLOCK)
            head = head >> 12 & 0xF | head >> 24 & 0xF0 | next_head >> 4 & 0xF00 | next_head >> 16 & 0xF000
        step = half_of(head, 0)
        if FORM.steps == "bytes":
            scales = halves_at(home, odd, at + (FORM.scale_at - 16) + group // 2 * 2, held, BLOCK)
            step *= (scales >> group % 2 * 8).to(tl.int8).to(tl.float32)
        elif FORM.small is not None:
            small = integers_at(home, odd, at, group, held, FORM.small, BLOCK).to(tl.float32)
            step *= small * FORM.small.times + FORM.small.plus
    least = step
    if FORM.least is not None:
        least = half_of(head, 16) * -integers_at(home, odd, at, group, held, FORM.least, BLOCK).to(tl.float32)
    elif FORM.steps == "least":
        least = half_of(head, 16)
    if sums_of(FORM) and FORM.centre_taken:
        least = step * FORM.centre_taken + least
    return tl.where(held, step, -0.0), tl.where(held, least, -0.0)
