"""Decoding of stored matrices on a GPU, in Triton, bit for bit as `StoredMatrix.matrix`.

Codes are read in words of 4 bytes. The parts of a word are extracted one after the other: the lower halves of its
bytes, then the upper ones. For codes in two planes of which one has half the bits of the other, all parts share a word
of that one. Words are grouped in runs: the numbers of a run are the first parts of all its bytes, then the second
parts.

Codes are converted to numbers without a conversion or a shift. The masked bits, reinterpreted in place as fp32, are a
subnormal number; times 2**127 it is the code times a power of two, which is compensated in the step. If a number is a
product plus a sum, the product is exact in fp32, as steps and codes have 24 bits together at most: so it does not
matter whether the compiler fuses both operations. The bits of e2m1, put where fp32 has its last two of the exponent and
its first of the mantissa, are a float 2**-126 times as large. Numbers of other codes are looked up, and are then read
as int8; see `stored_codes_gpu`.
"""

# Triton reads the annotations of programs: they are not postponed.
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.encodings import Encoding
from offload.formats.stored import StoredMatrix
from offload.formats.stored_codes_gpu import book_of, codes_of, halves_at, integers_at, words_at
from offload.native.launch import launch

WARPS = 4  # of a program that decodes
_WORDS = 4096  # words times parts per program, but one part counts as two, and two that are stored together as four


def blocks_at_once(encoding: Encoding) -> int:
    """The number of blocks per decoding program."""
    return _WORDS // (4 if encoding.run == 1 else max(encoding.parts, 2)) // encoding.words


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
