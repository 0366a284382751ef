"""Matrices as quantised checkpoints store them, on a GPU, in Triton: their numbers from their blocks, bit for bit those
of `StoredMatrix.matrix`.

Codes come in words of 4 bytes, of 2 where a block's bytes are no multiple of 4. What a word holds is taken from it one
byte after the other, and of each byte one part after the other: the lower half, then the upper one, or 2 bits of a code
four times. Words lie in runs; the numbers of a run are those of the first part of its bytes, then those of the second.

Where a number is a product and a sum, the product is exact in fp32: steps and codes have 24 bits together at most. So
it does not matter whether a compiler makes one operation of both.
"""

# Triton reads the annotations of programs: they are not postponed.
from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from offload.formats.layout import GROUP_KINDS, Encoding
from offload.formats.stored import StoredMatrix
from offload.native.launch import launch

WARPS = 4  # of a program that decodes
_WORDS = 2048  # of codes, of such a program
_BIASED = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32}  # what is taken from a code


@dataclass(frozen=True)
class Form:
    """How a kind's blocks are read. word: bytes of a word. words: of codes in a block, and `run` of them in a run.
    parts: of a byte. units: of a block, that have scales of their own. codes_at: bytes before the first word."""

    word: int
    words: int
    run: int
    parts: int
    units: int
    codes_at: int


_FORMS = {
    "Q4_0": Form(2, 8, 8, 2, 1, 2), "Q4_1": Form(4, 4, 4, 2, 1, 4), "Q5_0": Form(2, 8, 8, 2, 1, 6),
    "Q5_1": Form(4, 4, 4, 2, 1, 8), "Q8_0": Form(2, 16, 16, 1, 1, 2), "Q4_K": Form(4, 32, 8, 2, 4, 16),
    "Q5_K": Form(4, 32, 8, 2, 4, 48), "Q6_K": Form(2, 32, 16, 4, 4, 0),
}  # fmt: skip


@cache
def form(encoding: Encoding) -> Form:
    if encoding.kind not in GROUP_KINDS:
        return _FORMS[encoding.kind]
    words = encoding.numbers * GROUP_KINDS[encoding.kind] // 32
    return Form(4, words, words, 8 // GROUP_KINDS[encoding.kind], 1, 4)


def blocks_at_once(encoding: Encoding) -> int:
    """Of a program that decodes."""
    return _WORDS // form(encoding).words


@cache
def constants(encoding: Encoding) -> dict[str, object]:
    """Of programs that read such blocks."""
    own, (kind, _, scale) = form(encoding), encoding.kind.partition("_")
    if encoding.kind not in GROUP_KINDS:
        kind, scale = encoding.kind, "F16"
    return {
        "KIND": kind, "SCALE": scale, "BIAS": _BIASED.get(kind, 0), "BLOCK": encoding.nbytes // own.word,
        "WORD": own.word, "WORDS": own.words, "RUN": own.run, "PARTS": own.parts, "UNITS": own.units,
        "CODES": own.codes_at // own.word,
    }  # fmt: skip


def decode(stored: StoredMatrix, out: Tensor) -> None:
    """Fill out, [outputs, inputs] of 16 or 32 bits, contiguous, by one launch; all are on the GPU. Rows begin at a
    multiple of 4 bytes."""
    assert out.is_contiguous()
    assert tuple(out.shape) == stored.shape
    assert stored.rows.is_contiguous()
    num_blocks, blocks = stored.rows.numel() // stored.encoding.nbytes, blocks_at_once(stored.encoding)
    if num_blocks:
        launch(
            decode_blocks, (-(-num_blocks // blocks),), (stored.rows, out, num_blocks),
            BLOCKS=blocks, **constants(stored.encoding), num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def half_of(word, at):
    """The fp16 number from bit `at` of a word on, fp32."""
    return (word >> at).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def number_of(bits, AT: tl.constexpr):
    """Bits from bit AT on, others none -> what they count, fp32, and 2**(23 - AT) more: there numbers are so far apart
    that the bits are the last ones, and no instruction has to shift or convert. AT and their number: 23 at most."""
    return (bits | ((150 - AT) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x, SCALE: tl.constexpr):
    """fp32 to the dtype of a scale and back."""
    if SCALE == "F16":
        x = x.to(tl.float16).to(tl.float32)
    if SCALE == "BF16":
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def spread(x, SIZE: tl.constexpr):
    """[M, N] -> [SIZE, N]: each row as often as makes that many."""
    often: tl.constexpr = SIZE // x.shape[0]
    wide = tl.broadcast_to(x[:, None, :], (x.shape[0], often, x.shape[1]))
    return tl.reshape(wide, (SIZE, x.shape[1]))


@triton.jit
def codes_of(
    home,  # pointers [1, N] to words: blocks
    word,  # int32 [M]: words of codes, counted through the blocks
    held,  # bool [M, N]: what is not counts as zeros
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,  # words of a block
    WORDS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Words of codes, of the rest of them and of their upper bits, [M, N] each, of which a kind uses the first ones."""
    at_block, within = (word // WORDS * BLOCK)[:, None], (word % WORDS)[:, None]
    if KIND == "Q6_K":
        source = home + at_block + within // 16 * 32 + within % 16
        codes = tl.load(source, mask=held, other=0).to(tl.int32)
        others = tl.load(source + 16, mask=held, other=0).to(tl.int32)
        upper = tl.load(home + at_block + 64 + within, mask=held, other=0).to(tl.int32)
    else:
        codes = tl.load(home + at_block + CODES + within, mask=held, other=0).to(tl.int32)
        others, upper = codes, codes
        if KIND == "Q5_K":
            upper = tl.load(home + at_block + 4 + within % 8, mask=held, other=0)
    return codes, others, upper


@triton.jit
def heads_of(
    home,  # as above
    unit,  # int32 [U]: units, counted through the blocks
    held,  # bool [B, N]: blocks that are there
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
    PART: tl.constexpr,
):
    """Words that scales are made of, of which a kind uses the first ones, [B, N] or [U, N] each. A block of several
    units is the only one."""
    block = tl.arange(0, held.shape[0])[:, None]
    if KIND == "Q6_K":
        first = tl.load(home + 104, mask=held, other=0).to(tl.int32)
        second = tl.load(home + 96 + unit[:, None] // 2 * 4 + PART, mask=held, other=0).to(tl.int32)
    else:
        first = tl.load(home + block * BLOCK, mask=held, other=0).to(tl.int32)
        second = first
    third, fourth = second, second
    if (KIND == "Q4_K") or (KIND == "Q5_K"):
        second = tl.load(home + 1, mask=held, other=0)
        third = tl.load(home + 2, mask=held, other=0)
        fourth = tl.load(home + 3, mask=held, other=0)
    if KIND == "Q5_0":
        second = tl.load(home + block * BLOCK + 1 + PART, mask=held, other=0).to(tl.int32)
    if KIND == "Q5_1":
        second = tl.load(home + block * BLOCK + 1, mask=held, other=0) >> 16 * PART
    return first, second, third, fourth


@triton.jit
def scales_of(
    first, second, third, fourth,  # from heads_of
    unit,  # int32 [U]
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Step and what is added, or taken away from codes, fp32 [U, N] both; numbers whose fifth bits are in the head."""
    if (KIND == "Q4_K") or (KIND == "Q5_K"):
        # Of the units 0 and 1 six bits each lie together, those of 2 and 3 are in two places.
        far, shift = unit[:, None] >= 2, (unit % 2 * 16)[:, None]
        AT: tl.constexpr = 8 * PART
        step = tl.where(far, fourth & 0x0F0F0F0F | (second >> 2) & 0x30303030, second & 0x3F3F3F3F) >> shift
        least = tl.where(far, (fourth >> 4) & 0x0F0F0F0F | (third >> 2) & 0x30303030, third & 0x3F3F3F3F) >> shift
        step = half_of(first, 0) * (number_of(step & (63 << AT), AT) - 2 ** (23 - AT))
        added = half_of(first, 16) * (number_of(least & (63 << AT), AT) - 2 ** (23 - AT))
    elif KIND == "Q6_K":
        step = half_of(first, 0) * (second >> (unit % 2 * 8)[:, None]).to(tl.int8).to(tl.float32)
        added = step
    else:
        if SCALE == "F32":
            step = first.to(tl.float32, bitcast=True)
        elif SCALE == "BF16":
            step = (first << 16).to(tl.float32, bitcast=True)
        else:
            step = half_of(first, 0)
        if (KIND == "INT4") or (KIND == "INT8"):
            added = (first >> 16).to(tl.float32)
        elif (KIND == "Q4_1") or (KIND == "Q5_1"):
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
    PART: tl.constexpr,
    BYTE: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Of a byte of each word, a part's number, fp32 [M, N]."""
    if KIND == "FP8":
        bits = (codes << (24 - 8 * BYTE)) >> 4 & (0x87F00000 - 2**32)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        number += number * 7.333671700882288e35 * 0.0  # 480 is none: there this is infinite
        number = rounded(number * step, SCALE)
    else:
        UP: tl.constexpr = BYTE // 2 * 12  # so far down, bits of the upper half of a word are below 2**23
        AT: tl.constexpr = 8 * BYTE - UP + (0 if PARTS == 1 else PART // (PARTS // 2) * 4)
        if KIND == "INT8":
            bits = (codes >> UP) & (255 << AT)
        elif KIND == "Q8_0":
            bits = codes & (255 << AT) ^ (128 << AT)
        elif KIND == "Q6_K":
            lower = others if PART % 2 else codes
            bits = lower & (15 << AT) | (upper << (4 - PART % 2 * 2)) & (48 << AT)
        else:
            bits = (codes >> UP) & (15 << AT)
        if KIND == "Q5_K":
            bits = bits | (upper >> (word % 32 // 8 * 2)[:, None] >> UP << (4 + 3 * PART)) & (16 << AT)
        if (KIND == "Q5_0") or (KIND == "Q5_1"):
            bits = bits | (fifth >> (word % WORDS * WORD)[:, None] << (AT + 4 - BYTE)) & (16 << AT)
        if (KIND == "Q4_1") or (KIND == "Q5_1") or (KIND == "Q4_K") or (KIND == "Q5_K"):
            # The bits are a number below the least normal one: twice multiplied by a power of two, they are the code's.
            number = bits.to(tl.float32, bitcast=True) * 2.0**127 * (step * 2.0 ** (22 - AT))
            if (KIND == "Q4_1") or (KIND == "Q5_1"):
                number += added
            else:
                number -= added
        elif (KIND == "INT4") or (KIND == "INT8"):
            number = rounded((number_of(bits, AT) - (added + 2 ** (23 - AT))) * step, SCALE)
        else:
            number = (number_of(bits, AT) - (2 ** (23 - AT) + BIAS)) * step
    return number


@triton.jit(do_not_specialize=["num_blocks"])
def decode_blocks(
    stored,  # uint8 [num_blocks, bytes of a block]
    out,  # [num_blocks, numbers of a block]
    num_blocks,
    BLOCKS: tl.constexpr,  # of a program
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    UNITS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Program p: the numbers of `BLOCKS` blocks."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = block < num_blocks
    word, unit = tl.arange(0, WORDS), tl.arange(0, UNITS)
    element: tl.constexpr = tl.int32 if WORD == 4 else tl.int16
    home = stored.to(tl.pointer_type(element)) + block[None, :] * BLOCK
    held = tl.broadcast_to(there[None, :], (WORDS, BLOCKS))
    codes, others, upper = codes_of(home, word, held, KIND, BLOCK, WORDS, CODES)
    column = tl.arange(0, WORDS * WORD)
    number = column // (RUN * WORD) * (RUN * WORD * PARTS) + column % (RUN * WORD)
    target = out + block[:, None] * (WORDS * WORD * PARTS) + number[None, :]
    for part in tl.static_range(PARTS):
        first, second, third, fourth = heads_of(home, unit, there[None, :], KIND, BLOCK, UNITS, part)
        step, added = scales_of(first, second, third, fourth, unit, KIND, SCALE, part)
        a, b, c = spread(step, WORDS), spread(added, WORDS), spread(second, WORDS)
        zero = numbers_of(codes, others, upper, a, b, c, word, part, 0, KIND, SCALE, BIAS, WORD, WORDS, PARTS)
        one = numbers_of(codes, others, upper, a, b, c, word, part, 1, KIND, SCALE, BIAS, WORD, WORDS, PARTS)
        if WORD == 4:
            two = numbers_of(codes, others, upper, a, b, c, word, part, 2, KIND, SCALE, BIAS, WORD, WORDS, PARTS)
            three = numbers_of(codes, others, upper, a, b, c, word, part, 3, KIND, SCALE, BIAS, WORD, WORDS, PARTS)
            zero, one = tl.join(zero, two), tl.join(one, three)
        numbers = tl.reshape(tl.join(zero, one), (WORDS, BLOCKS, WORD)).to(out.dtype.element_ty)
        numbers = tl.reshape(tl.permute(numbers, (1, 0, 2)), (BLOCKS, WORDS * WORD))
        tl.store(target + part * (RUN * WORD), numbers, mask=there[:, None])
