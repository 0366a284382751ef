"""Products of rows with weights in 4 or 6 bits on a GPU, in Triton.

A block of 16 outputs and a group of 64 inputs is stored in words of four bytes (native/codes.h): a word of step
and low for each output, then [8, 16 outputs] words of the upper 4 bits of eight codes. Bits 8 * i and on of word j hold
input 4 * j + i of the group, four bits further there is input 32 + 4 * j + i. Of 6 bits the lower 2 follow as [8, 16
outputs] halves of words in the same order: bits 4 * i and on hold input 4 * j + i, two bits further is the other.
"""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.quantised import GROUP, TILE, Codes
from offload.kernels.gpu.splits import joined
from offload.native.launch import launch

ROWS = 16  # of a program: the minimum of tensor cores
TILES = 8  # of a program: with more tiles, rows are read less often
GROUPS = 2  # at a time: their words give 16 inputs of one place, the minimum of tensor cores
STAGES = 3  # of the pipeline: two are being loaded
WARPS = 4
_PROGRAMS = 512  # of a product: four for each multiprocessor of a large GPU, to use its full memory bandwidth
_LEAST_GROUPS = 8  # of a split: smaller splits write more than they save


def product(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    """The product of x [T, inputs] of 16 bits with the transposed matrix, rounded to x's dtype, plus bias [outputs] ->
    [T, outputs]. Sums are fp32; their order depends on the matrix's shape alone, so a row's bits do not depend on the
    rows beside it. Scratch memory: fp32 [splits, T, outputs]."""
    (outputs, inputs), num_rows = codes.shape, len(x)
    if x.dtype.itemsize != 2:
        raise ValueError(f"rows are {x.dtype}; a GPU multiplies quantised weights with bf16 and fp16")
    x, num_groups = x.contiguous(), inputs // GROUP
    groups_each = split_groups(outputs, inputs)
    num_splits = -(-num_groups // groups_each)
    partials = torch.empty(num_splits, num_rows, outputs, device=x.device)
    launch(
        multiply_codes,
        (-(-num_rows // ROWS), -(-outputs // (TILES * TILE)), num_splits),
        (x, codes.blocks, partials, num_rows, outputs // TILE, num_groups, groups_each),
        ROWS=ROWS,
        TILES=TILES,
        GROUPS=GROUPS,
        BITS=codes.bits,
        WIDEN=not x.is_cuda,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return joined(partials, bias, x.dtype)


def split_groups(outputs: int, inputs: int) -> int:
    """The number of groups of inputs that a program sums. With few outputs the inputs are split, so that there are
    enough programs for a GPU. A multiple of GROUPS; the last split may have fewer. It depends on the shape alone, since
    it determines the order of sums."""
    num_groups, columns = inputs // GROUP, -(-outputs // (TILES * TILE))
    most = max(num_groups * columns // _PROGRAMS, _LEAST_GROUPS)
    num_splits = -(-num_groups // most)
    return -(-num_groups // (num_splits * GROUPS)) * GROUPS


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_groups", "groups_each"])
def multiply_codes(
    rows,  # [T, inputs] of 16 bits, contiguous
    blocks,  # uint8 [num_tiles, num_groups, bytes of a block]
    partials,  # fp32 [splits, T, 16 * num_tiles]: the sum over the groups of each split
    num_rows,  # T
    num_tiles,  # of 16 outputs
    num_groups,  # of 64 inputs
    groups_each,  # of a split, a multiple of GROUPS
    ROWS: tl.constexpr,
    TILES: tl.constexpr,  # at a time
    GROUPS: tl.constexpr,  # at a time
    BITS: tl.constexpr,  # of a code, 4 or 6
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (b, c, s): block b of the rows times column c of `TILES` tiles, over the groups of split s in their
    order. The eight codes of a word are used in turn, so each product has the inputs of one place in all words."""
    block, column, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    OUTPUTS: tl.constexpr = 16 * TILES
    WORDS: tl.constexpr = 8 * GROUPS
    BLOCK: tl.constexpr = 16 + 32 * BITS  # words
    row = block * ROWS + tl.arange(0, ROWS)
    output = column * OUTPUTS + tl.arange(0, OUTPUTS)
    group, word = tl.arange(0, GROUPS), tl.arange(0, WORDS)
    real, valid = row < num_rows, output < 16 * num_tiles
    home = blocks.to(tl.pointer_type(tl.int32))
    fours = rows.to(tl.pointer_type(tl.int64))
    at_tile = (output // 16).to(tl.int64) * (num_groups * BLOCK)
    at_output = at_tile + output % 16
    at_word = (word // 8) * BLOCK + 16 + (word % 8) * 16
    at_twos = (word // 8) * (2 * BLOCK) + 288 + (word % 8) * 16
    at_row = row.to(tl.int64) * (num_groups * 16)
    at_four = (word // 8) * 16 + word % 8
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first = split * groups_each
    last = tl.minimum(first + groups_each, num_groups)
    for begun in tl.range(first, last, GROUPS):
        # Groups past the last one count as zeros.
        source = home + begun * BLOCK + at_output[None, :]
        held = valid[None, :] & (begun + group < last)[:, None]
        scale = tl.load(source + group[:, None] * BLOCK, mask=held, other=0)
        held = valid[None, :] & (begun + word // 8 < last)[:, None]
        words = tl.load(source + at_word[:, None], mask=held, other=0)
        if BITS == 6:
            source = (
                blocks.to(tl.pointer_type(tl.int16)) + 2 * (begun * BLOCK + at_tile)[None, :] + (output % 16)[None, :]
            )
            twos = tl.load(source + at_twos[:, None], mask=held, other=0).to(tl.int32)
        scale = tl.reshape(tl.broadcast_to(scale[:, None, :], (GROUPS, 8, OUTPUTS)), (WORDS, OUTPUTS))
        step = (scale << 16).to(tl.float32, bitcast=True)
        low = (scale >> 16 << 16).to(tl.float32, bitcast=True)
        held = real[:, None] & (begun + word // 8 < last)[None, :]
        for half in tl.static_range(2):
            place = at_row[:, None] + (begun * 16 + half * 8 + at_four)[None, :]
            four = tl.load(fours + place, mask=held, other=0)
            for each in tl.static_range(4):
                x = (four >> 16 * each).to(tl.int16).to(rows.dtype.element_ty, bitcast=True)
                code = (words >> (8 * each + 4 * half)) & 15
                if BITS == 6:
                    code = code << 2 | ((twos >> (4 * each + 2 * half)) & 3)
                weight = tl.fma(code.to(tl.float32), step, low).to(rows.dtype.element_ty)
                if WIDEN:
                    x, weight = x.to(tl.float32), weight.to(tl.float32)
                total = tl.dot(x, weight, total, input_precision="ieee")
    target = (split * num_rows + row).to(tl.int64) * (16 * num_tiles)
    tl.store(partials + target[:, None] + output[None, :], total, mask=real[:, None] & valid[None, :])
