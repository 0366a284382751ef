"""Decoding of stored matrices on a GPU, in Triton, bit for bit as `StoredMatrix.matrix`.

Codes are read in words of 4 bytes. The parts of a word are extracted one after the other: the lower halves of its
bytes, then the upper ones. For codes of 6 bits, four parts share a word that has 2 bits of each. Words are grouped in
runs: the numbers of a run are the first parts of all its bytes, then the second parts.

Codes are converted to numbers without a conversion or a shift. The masked bits, reinterpreted in place as fp32, are a
subnormal number; times 2**127 it is the code times a power of two, which is compensated in the step. If a number is a
product plus a sum, the product is exact in fp32, as steps and codes have 24 bits together at most: so it does not
matter whether the compiler fuses both operations. The bits of e2m1, put where fp32 has its last two of the exponent and
its first of the mantissa, are a float 2**-126 times as large. Numbers of other codes are looked up: of 4 bits in a book,
two at a time, of grids eight at a time. They are then read as int8, as are codes of few bits that lie in their order.
"""

# Triton reads the annotations of programs: they are not postponed.
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.encodings import BOOKS, Encoding
from offload.formats.stored import StoredMatrix, entries
from offload.native.launch import launch

WARPS = 4  # of a program that decodes
_WORDS = 4096  # words times parts per program, but one part counts as two


def blocks_at_once(encoding: Encoding) -> int:
    """The number of blocks per decoding program."""
    return _WORDS // max(encoding.parts, 2) // encoding.words


def book_of(stored: StoredMatrix) -> Tensor:
    """The book of the codes, int16 [256], by bytes of two codes: in each the number of the lower half's code as an
    int8, and that of the upper half's above it; or the table of their grid. Of forms that are read without one any
    tensor, the blocks."""
    own, device = stored.encoding, stored.rows.device
    if own.grid is not None:
        return entries(own.grid, device)
    return _book(own.code, device) if own.looked_up else stored.rows


@cache
def _book(code: str, device: torch.device) -> Tensor:
    """In memory that is never freed, since graphs read it; the first launch of a pass is no graph's."""
    numbers = torch.tensor(BOOKS[code], dtype=torch.int8).view(torch.uint8)
    pairs = torch.stack([numbers.expand(16, 16), numbers[:, None].expand(16, 16)], -1).contiguous()
    return pairs.view(torch.int16).flatten().to(device)


def decode(stored: StoredMatrix, out: Tensor) -> None:
    """Fill out, [outputs, inputs] of 16 or 32 bits, contiguous, in one launch; all tensors are on the GPU. Up to 3
    bytes after the rows are read."""
    assert out.is_contiguous()
    assert tuple(out.shape) == stored.shape
    stored = stored.aligned()
    blocks, row_blocks = blocks_at_once(stored.encoding), stored.shape[1] // stored.encoding.numbers
    num_blocks = len(out) * row_blocks
    if num_blocks:
        launch(
            decode_blocks, (-(-num_blocks // blocks),), (stored.rows, book_of(stored), out, num_blocks, row_blocks),
            BLOCKS=blocks, FORM=stored.encoding, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def half_of(word, at):
    """The fp16 number from bit `at` of a word on, fp32."""
    return (word >> at).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def tiny(bits):
    """Reinterpret bits as fp32 times 2**127: int32 -> fp32. Below 2**23, bit AT has the value 2**(AT - 22). Exact."""
    return bits.to(tl.float32, bitcast=True) * 2.0**127


@triton.jit
def rounded(x, SCALE: tl.constexpr):
    """Round fp32 to the dtype of a scale, and convert back."""
    if SCALE == "F16":
        x = x.to(tl.float16).to(tl.float32)
    if SCALE == "BF16":
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def spread(x, SIZE: tl.constexpr):
    """Repeat rows: [M, N] -> [SIZE, N], each row SIZE / M times."""
    often: tl.constexpr = SIZE // x.shape[0]
    wide = tl.broadcast_to(x[:, None, :], (x.shape[0], often, x.shape[1]))
    return tl.reshape(wide, (SIZE, x.shape[1]))


@triton.jit
def words_at(home, odd, at, held, BLOCK: tl.constexpr, TURNED: tl.constexpr):
    """Load words: int32 [M, N] from the byte offsets `at` [M, 1]. home: pointers [1, N] to whole words. odd: the bytes,
    below 4, from `home` to the first block. Offsets and `odd` are even if blocks have an even number of bytes. held:
    other words are 0. TURNED: the halves of an aligned word are swapped, and those of an unaligned word are in
    order."""
    if BLOCK % 4 == 0:
        words = tl.load(home + at // 4, mask=held, other=0)
    elif BLOCK % 2:
        source, shift = home + (at + odd) // 4, ((at + odd) & 3) * 8
        low = tl.load(source, mask=held, other=0)
        high = tl.load(source + 1, mask=held & (shift != 0), other=0)
        # A funnel shift: this is how LLVM knows it, and how nothing is shifted by 32.
        words = (low.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)).to(tl.int32) | high << 1 << (31 - shift)
    else:
        apart, source = in_two(odd, at), home + (at + odd) // 4
        low = tl.load(source, mask=held, other=0)
        if TURNED:
            high = tl.load(source + tl.where(apart, 1, 0), mask=held, other=0)
            words = (low >> 16) & 0xFFFF | high << 16
        else:
            high = tl.load(source + 1, mask=held & apart, other=0)
            words = tl.where(apart, (low >> 16) & 0xFFFF | high << 16, low)
    return words


@triton.jit
def in_two(odd, at):
    """Whether the four bytes from `at` on span two words."""
    return (at + odd) & 2 != 0


@triton.jit
def halves_at(home, odd, at, held, BLOCK: tl.constexpr):
    """Load words of which only the lower halves are valid, or bytes if blocks have an odd number of them, as
    `words_at`."""
    if BLOCK % 4:
        words = tl.load(home + (at + odd) // 4, mask=held, other=0) >> (((at + odd) & (3 if BLOCK % 2 else 2)) * 8)
    else:
        words = tl.load(home + at // 4, mask=held, other=0)
    return words


@triton.jit
def items_at(home, odd, at, item, held, FIELD: tl.constexpr, BLOCK: tl.constexpr):
    """Load items of a Field, in the lowest bits: int32 [M, N] from the byte offsets `at` of blocks, which have an even
    number of bytes, and `item`, both [M, 1]."""
    first = FIELD.at + item // FIELD.many * FIELD.outer
    if FIELD.is_across:
        items = words_at(home, odd, at + first // 8, held, BLOCK, False) >> (item % FIELD.many * FIELD.inner)
    else:
        bit = first + item % FIELD.many * FIELD.inner
        if BLOCK % 4:
            half = at + bit // 16 * 2 + odd
            items = tl.load(home + half // 4, mask=held, other=0) >> (half & 2) * 8 >> bit % 16
        else:
            items = tl.load(home + at // 4 + bit // 32, mask=held, other=0) >> bit % 32
    return items & ((1 << FIELD.bits) - 1)


@triton.jit
def integers_at(home, odd, at, group, held, SMALL: tl.constexpr, BLOCK: tl.constexpr):
    """Load the integers of a Small, as `items_at`."""
    integers = items_at(home, odd, at, group, held, SMALL.low, BLOCK)
    if SMALL.high.bits:
        integers |= items_at(home, odd, at, group, held, SMALL.high, BLOCK) << SMALL.low.bits
    return integers


@triton.jit
def codes_of(
    home, odd,  # as above: blocks
    book,  # from book_of
    word,  # int32 [M]: words of codes, counted through the blocks
    held,  # bool [M, 1]
    FORM: tl.constexpr,  # an Encoding
    TURNED: tl.constexpr,
):  # fmt: skip
    """Words of codes, of their remaining bits and of their upper bits, [M, N] each; a form uses the first ones."""
    BLOCK: tl.constexpr = FORM.nbytes
    at, within = (word // FORM.words * BLOCK)[:, None], (word % FORM.words)[:, None]
    if FORM.in_halves:
        lower = at + FORM.codes.at + within // 8 * 64 + within % 8 * 4
        codes = words_at(home, odd, lower, held, BLOCK, TURNED)
        others = words_at(home, odd, lower + 32, held, BLOCK, TURNED)
        upper = words_at(home, odd, at + FORM.high.at + within * 4, held, BLOCK, TURNED)
    elif FORM.grid is not None:
        codes, others = in_grid(home, odd, book, at, within, held, FORM.grid, BLOCK)
        upper = codes
    elif FORM.fours.bits:
        codes = in_bytes(items_at(home, odd, at, within, held, FORM.fours, BLOCK), FORM.codes.bits)
        others, upper = codes, codes
    else:
        codes = words_at(home, odd, at + FORM.codes.at + within * 4, held, BLOCK, TURNED)
        others, upper = codes, codes
        if FORM.high.run == 32:
            upper = words_at(home, odd, at + FORM.high.at + within % 8 * 4, held, BLOCK, TURNED)
        if FORM.looked_up:
            codes, others = in_book(book, codes)
    return codes, others, upper


@triton.jit
def in_bytes(codes, BITS: tl.constexpr):
    """Four codes of one or two bits, a byte each: int32 to words."""
    twos = (codes | codes << (16 - 2 * BITS)) & ((1 << 2 * BITS) - 1) * 0x00010001
    return (twos | twos << (8 - BITS)) & ((1 << BITS) - 1) * 0x01010101


@triton.jit
def in_book(book, codes):
    """Words of the numbers of the codes in the lower halves of bytes, and of those in the upper ones, int8."""
    one, two = tl.load(book + (codes & 255)).to(tl.int32), tl.load(book + (codes >> 8 & 255)).to(tl.int32)
    three, four = tl.load(book + (codes >> 16 & 255)).to(tl.int32), tl.load(book + (codes >> 24 & 255)).to(tl.int32)
    lower = one & 0xFF | (two & 0xFF) << 8 | (three & 0xFF) << 16 | four << 24
    return lower, one >> 8 & 0xFF | two & 0xFF00 | (three & 0xFF00) << 8 | (four & 0xFF00) << 16


@triton.jit
def in_grid(home, odd, book, at, eight, held, GRID: tl.constexpr, BLOCK: tl.constexpr):
    """Words of the first four and of the last four of each block's codes 8 * eight to 8 * eight + 7, int8."""
    index = items_at(home, odd, at, eight, held, GRID.lows, BLOCK)
    high = items_at(home, odd, at, eight, held, GRID.highs, BLOCK) if GRID.high.bits else index * 0
    signs = items_at(home, odd, at, eight, held, GRID.signs, BLOCK)
    if GRID.each == 8:
        both = tl.load(book.to(tl.pointer_type(tl.int64)) + (index | high << 8))
        lower, upper = both.to(tl.int32), (both >> 32).to(tl.int32)
    else:
        words = book.to(tl.pointer_type(tl.int32))
        lower = tl.load(words + (index & 255 | (high & (1 << GRID.high.bits) - 1) << 8))
        upper = tl.load(words + (index >> 8 | high >> GRID.high.bits << 8))
    if GRID.signs.bits == 1:
        change = tl.where(signs > 0, -0x01010101, 0x01010101)
        return more(lower, change), more(upper, change)
    if GRID.signs.bits == 7:
        odd_signs = 0x96696996 - 2**32 >> ((signs ^ signs >> 5) & 31) & 1  # bit n: whether n has an odd count of bits
        signs |= odd_signs << 7
    return negated(lower, signs & 15), negated(upper, signs >> 4)


@triton.jit
def more(word, change):
    """Add a word of 1 or -1 to one of int8 that are far from the largest and least."""
    return ((word ^ (0x80808080 - 2**32)) + change) ^ (0x80808080 - 2**32)


@triton.jit
def negated(word, signs):
    """Negate bytes, each above 0, where one of four bits is set."""
    ones = signs * 0x00204081 & 0x01010101
    return (word ^ ones * 255) + ones


@triton.jit
def heads_of(
    home, odd,  # as above
    unit,  # int32 [U]: units, counted through the blocks
    held,  # bool [U, 1]
    FORM: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Words that contain the scales, [U, N] each; a form uses the first ones."""
    BLOCK: tl.constexpr = FORM.nbytes
    at, within = (unit // FORM.units * BLOCK)[:, None], (unit % FORM.units)[:, None]
    first = halves_at(home, odd, at + FORM.scale_at, held, BLOCK)
    second = first
    if FORM.steps == "bytes":
        second = halves_at(home, odd, at + (FORM.scale_at - 16) + within // 2 * 8 + 2 * PART, held, BLOCK)
    if FORM.high.run == 1:
        second = words_at(home, odd, at + FORM.high.at, held, BLOCK, False) >> 16 * PART
    third, fourth = second, second
    if FORM.scale == "F16/4":
        second = halves_at(home, odd, at + (FORM.scale_at + 4), held, BLOCK)
        first = first >> 12 & 0xF | first >> 24 & 0xF0 | second >> 4 & 0xF00 | second >> 16 & 0xF000
    if FORM.steps == "small":
        group = group_of(unit % FORM.units, FORM, PART)[:, None]
        second = integers_at(home, odd, at, group, held, FORM.small, BLOCK)
        if FORM.least is not None:
            third = integers_at(home, odd, at, group, held, FORM.least, BLOCK)
    if FORM.steps == "k":
        second = words_at(home, odd, at + 4, held, BLOCK, False)
        third = words_at(home, odd, at + 8, held, BLOCK, False)
        fourth = words_at(home, odd, at + 12, held, BLOCK, False)
    return first, second, third, fourth


@triton.jit
def group_of(unit, FORM: tl.constexpr, PART: tl.constexpr):
    """The groups of the numbers of a part of units: int32 -> int32."""
    RUN: tl.constexpr = FORM.run
    word = unit * (FORM.words // FORM.units)
    return (word // RUN * (RUN * FORM.parts) + word % RUN + RUN * PART) * 4 // FORM.group


@triton.jit
def e4m3(bits):
    """The float of 8 bits in the highest places, the others 0: int32 -> fp32."""
    number = (bits >> 4 & (0x87F00000 - 2**32)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return number + number * 7.333671700882288e35 * 0.0  # 480 is NaN: this becomes infinite there


@triton.jit
def scales_of(
    first, second, third, fourth,  # from heads_of
    tail,  # fp32 [1, N]: the rows' own scales, where they have some
    unit,  # int32 [U]
    FORM: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Steps, and offsets that are added to codes or to products with steps: fp32 [U, N] both."""
    if FORM.steps == "k":
        # The six bits of units 0 and 1 are together, those of units 2 and 3 are split in two places.
        AT: tl.constexpr = 8 * PART
        within = (unit % FORM.units)[:, None]
        step = tl.where(within >= 2, fourth & 0x0F0F0F0F | (second >> 2) & 0x30303030, second)
        least = tl.where(within >= 2, (fourth >> 4) & 0x0F0F0F0F | (third >> 2) & 0x30303030, third)
        step = half_of(first, 0) * (tiny(step >> within % 2 * 16 & (63 << AT)) * 2.0 ** (22 - AT))
        added = half_of(first, 16) * (tiny(least >> within % 2 * 16 & (63 << AT)) * 2.0 ** (22 - AT))
    else:
        if FORM.scale == "E8M0":
            exponent = first & 255
            step = tl.where(exponent > 1, (exponent - 1) << 23, (exponent + 1) << 21).to(tl.float32, bitcast=True)
        elif FORM.scale == "F32":
            step = first.to(tl.float32, bitcast=True)
        elif FORM.scale == "BF16":
            step = (first << 16).to(tl.float32, bitcast=True)
        elif FORM.scale == "E4M3":
            step = e4m3(first << (24 - 8 * (unit % FORM.units)[:, None]))
            step = (step * tail if FORM.steps == "times" else tl.div_rn(step, tail)) * 0.5  # e2m1 is doubled
        else:
            step = half_of(first, 0)
        if FORM.steps == "bytes":
            step *= (second >> (unit % FORM.units)[:, None] % 2 * 8).to(tl.int8).to(tl.float32)
        if FORM.steps == "small":
            step *= second.to(tl.float32) * FORM.small.times + FORM.small.plus
        if FORM.steps == "zero":
            added = (first >> 16).to(tl.float32)
        elif FORM.least is not None:
            added = half_of(first, 16) * third.to(tl.float32)
        elif FORM.steps == "least":
            added = half_of(first, 16)
        else:
            added = step
    return step, added


@triton.jit
def numbers_of(
    codes, others, upper,  # from codes_of
    step, added,  # from scales_of, [M, N]
    fifth,  # int32 [M, N]: fifth bits of a part's numbers in a block, where the head has them
    word,  # int32 [M]
    FORM: tl.constexpr,
    PART: tl.constexpr,
    BYTE: tl.constexpr,
):  # fmt: skip
    """The number of one part of a byte of each word, fp32 [M, N]. A scale of codes with a zero is below 2**105."""
    PARTS: tl.constexpr = FORM.parts
    # Parts whose lower bits are in the same places of different words.
    LIKE: tl.constexpr = FORM.codes.run // (4 * FORM.run) if FORM.in_halves else 1
    WHOLE: tl.constexpr = (PARTS == 1) or FORM.looked_up  # a code is a byte
    BITS: tl.constexpr = 8 if WHOLE else FORM.codes.bits
    UP: tl.constexpr = BYTE // 2 * 12  # the shift that brings bits of a word's upper half below 2**23
    PLACE: tl.constexpr = PART % (8 // BITS * LIKE) // LIKE * BITS  # in a byte
    AT: tl.constexpr = 8 * BYTE - UP + PLACE
    ONE: tl.constexpr = 2.0 ** (AT - 22 - (FORM.code == "sign"))  # the value of 1, half that of a sign's bit
    if FORM.code == "e4m3":
        number = rounded(e4m3(codes << (24 - 8 * BYTE)) * step, FORM.scale)
    elif FORM.code == "e2m1":
        bits = (codes << (28 - 8 * BYTE - 4 * PART)) >> 6 & (0x81C00000 - 2**32)
        number = (tiny(bits) + 0.0) * step  # -0 becomes 0
    else:
        SIGNED: tl.constexpr = (FORM.code == "signed") or FORM.looked_up
        CENTRE: tl.constexpr = 128 if SIGNED else (1 if FORM.code == "sign" else FORM.centre)
        if FORM.in_halves:
            HIGH: tl.constexpr = FORM.high.bits
            LEFT: tl.constexpr = PLACE + BITS - PART * HIGH  # from the upper bits' place to that above the lower ones
            lower, high = others if PART % LIKE + PART // (8 // BITS * LIKE) else codes, upper >> UP
            high = high << LEFT if LEFT > 0 else high >> -LEFT
            bits = (lower >> UP) & ((1 << BITS) - 1 << AT) | high & ((1 << HIGH) - 1 << BITS + AT)
        elif WHOLE:
            lower = others if PART else codes
            bits = (lower >> UP) & (255 << AT)
        else:
            bits = (codes >> UP) & ((1 << BITS) - 1 << AT)
        if SIGNED:
            bits = bits ^ (128 << AT)
        if FORM.high.run == 1:
            bits = bits | (fifth >> (word % FORM.words * 4)[:, None] << (AT + 4 - BYTE)) & (16 << AT)
        elif FORM.high.run == 32 and not FORM.in_halves:
            bits = bits | (upper >> (word % 32 // 8 * 2)[:, None] >> UP << (4 + 3 * PART)) & (16 << AT)
        if FORM.least is not None:
            number = tiny(bits) * (step / ONE) - added
        elif FORM.steps == "least":
            number = tiny(bits) * (step / ONE) + added
        elif FORM.steps == "zero":
            number = rounded((tiny(bits) - added * ONE) * (step / ONE), FORM.scale)
        else:
            number = (tiny(bits) - CENTRE * ONE) * (step / ONE)
    return number


@triton.jit(do_not_specialize=["num_blocks", "row_blocks"])
def decode_blocks(
    stored,  # uint8 [num_blocks, bytes of a block], and the tails of rows
    book,  # from book_of
    out,  # [num_blocks, numbers of a block]
    num_blocks,
    row_blocks,  # of a row, behind which is its tail
    BLOCKS: tl.constexpr,  # of a program
    FORM: tl.constexpr,  # an Encoding
):
    """Program p: the numbers of `BLOCKS` blocks. Blocks after the last one repeat it and are not stored."""
    BLOCK: tl.constexpr = FORM.nbytes
    WORDS: tl.constexpr = FORM.words
    RUN: tl.constexpr = FORM.run
    PARTS: tl.constexpr = FORM.parts
    UNITS: tl.constexpr = FORM.units
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    word, unit, column = tl.arange(0, WORDS), tl.arange(0, UNITS), tl.arange(0, WORDS * 4)
    at, tail = tl.minimum(block, num_blocks - 1) * BLOCK, 0.0
    if FORM.tail:
        row = tl.minimum(block, num_blocks - 1) // row_blocks
        at += row * FORM.tail
        tail = tail_of(stored, row, row_blocks, FORM)
    home, odd = stored.to(tl.pointer_type(tl.int32)) + (at // 4)[None, :], (at % 4).to(tl.int32)[None, :]
    all_words, all_units = tl.full([WORDS, 1], 1, tl.int1), tl.full([UNITS, 1], 1, tl.int1)
    words = codes_of(home, odd, book, word, all_words, FORM, False)
    valid = (block < num_blocks)[:, None]
    target = out + block[:, None] * (WORDS * 4 * PARTS)
    if RUN == 1:  # both parts of a word are stored together
        lower = part_of(home, odd, words, tail, word, unit, all_units, out, FORM, 0)
        upper = part_of(home, odd, words, tail, word, unit, all_units, out, FORM, 1)
        numbers = tl.reshape(tl.permute(tl.join(lower, upper), (0, 1, 3, 2)), (BLOCKS, WORDS * 8))
        tl.store(target + tl.arange(0, WORDS * 8)[None, :], numbers, mask=valid)
    else:
        number = column // (RUN * 4) * (RUN * 4 * PARTS) + column % (RUN * 4)
        target += number[None, :]
        for part in tl.static_range(PARTS):
            numbers = part_of(home, odd, words, tail, word, unit, all_units, out, FORM, part)
            tl.store(target + part * (RUN * 4), tl.reshape(numbers, (BLOCKS, WORDS * 4)), mask=valid)


@triton.jit
def part_of(home, odd, words, tail, word, unit, held, out, FORM: tl.constexpr, PART: tl.constexpr):
    """The numbers of a part of each word of blocks, as `out` has them: [N, M, 4]. words: from codes_of."""
    WORDS: tl.constexpr = FORM.words
    codes, others, upper = words
    first, second, third, fourth = heads_of(home, odd, unit, held, FORM, PART)
    step, added = scales_of(first, second, third, fourth, tail, unit, FORM, PART)
    a, b, c = spread(step, WORDS), spread(added, WORDS), spread(second, WORDS)
    zero = numbers_of(codes, others, upper, a, b, c, word, FORM, PART, 0)
    one = numbers_of(codes, others, upper, a, b, c, word, FORM, PART, 1)
    two = numbers_of(codes, others, upper, a, b, c, word, FORM, PART, 2)
    three = numbers_of(codes, others, upper, a, b, c, word, FORM, PART, 3)
    numbers = tl.join(tl.join(zero, two), tl.join(one, three)).to(out.dtype.element_ty)
    return tl.permute(tl.reshape(numbers, (WORDS, step.shape[1], 4)), (1, 0, 2))


@triton.jit
def tail_of(stored, row, row_blocks, FORM: tl.constexpr):
    """The scales behind the blocks of rows: fp32 [1, N]."""
    END: tl.constexpr = FORM.tail
    at = (row + 1).to(tl.int64) * (row_blocks * FORM.nbytes + END) - END
    return tl.load((stored + at).to(tl.pointer_type(tl.float32)))[None, :]
