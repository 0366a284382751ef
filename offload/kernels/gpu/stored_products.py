"""Products of a few rows with matrices as quantised checkpoints store them on a GPU, in Triton: blocks are read as they
are, and their numbers made in registers. See `offload.formats.stored_gpu`."""

# Triton reads the annotations of programs: they are not postponed.
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.layout import Encoding
from offload.formats.stored import StoredMatrix
from offload.formats.stored_gpu import codes_of, constants, form, heads_of, numbers_of, scales_of, spread
from offload.kernels.gpu.splits import joined
from offload.native.launch import launch

MOST_ROWS = 64  # that are multiplied with blocks: with more of them numbers are made once and kept
ROWS = (16, 32)  # of a program: the least that tensor cores take, and with more rows twice that
_PROGRAMS = 512  # of a product: four for each multiprocessor of a large GPU, so that all of its memory is asked
_LEAST_INPUTS = 512  # of a split: below that more is written than saved


@dataclass(frozen=True)
class Tiling:
    """Of a program. words: of codes of an output at a time. stages: all but one of which are on their way."""

    outputs: int = 64
    words: int = 32
    warps: int = 4
    stages: int = 3

    def blocks(self, encoding: Encoding) -> int:
        """At a time."""
        return self.words // form(encoding).words


def tiling_of(encoding: Encoding) -> Tiling:
    return Tiling()


def product(x: Tensor, stored: StoredMatrix, bias: Tensor | None, tiling: Tiling | None = None) -> Tensor:
    """x [T, inputs] of 16 bits, times the matrix rounded to its dtype and transposed, plus bias [outputs] -> [T,
    outputs]. Sums are fp32; the order in which they are made depends on the matrix's shape and encoding alone, so a
    row's bits do not depend on the rows beside it. The matrix begins at a multiple of 4 bytes, and x of 8.
    Scratch: fp32 [splits, T, outputs]."""
    (outputs, inputs), num_rows, encoding = stored.shape, len(x), stored.encoding
    if x.dtype.itemsize != 2:
        raise ValueError(f"rows are {x.dtype}; a GPU multiplies stored matrices with bf16 and fp16")
    assert stored.rows.is_contiguous()
    tiling = tiling or tiling_of(encoding)
    x, num_blocks = x.contiguous(), inputs // encoding.numbers
    blocks_each = split_blocks(outputs, inputs, encoding, tiling)
    num_splits = -(-num_blocks // blocks_each)
    partials = torch.empty(num_splits, num_rows, outputs, device=x.device)
    rows = ROWS[num_rows > ROWS[0]]
    launch(
        multiply_stored,
        (-(-num_rows // rows), -(-outputs // tiling.outputs), num_splits),
        (x, stored.rows, partials, num_rows, outputs, num_blocks, blocks_each),
        ROWS=rows,
        OUTPUTS=tiling.outputs,
        BLOCKS=tiling.blocks(encoding),
        WIDEN=not x.is_cuda,
        **constants(encoding),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return joined(partials, bias, x.dtype)


def split_blocks(outputs: int, inputs: int, encoding: Encoding, tiling: Tiling) -> int:
    """Blocks of a row that a program sums up: with few outputs rows of blocks are split, so that there are programs
    enough for a GPU. A multiple of those at a time; the last split may have fewer. Of the shape alone: the order of
    sums depends on it."""
    num_blocks, columns = inputs // encoding.numbers, -(-outputs // tiling.outputs)
    most = max(num_blocks * columns // _PROGRAMS, _LEAST_INPUTS // encoding.numbers)
    num_splits, at_once = -(-num_blocks // most), tiling.blocks(encoding)
    return -(-num_blocks // (num_splits * at_once)) * at_once


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_blocks", "blocks_each"])
def multiply_stored(
    rows,  # [T, inputs] of 16 bits, contiguous
    stored,  # uint8 [num_outputs, num_blocks, bytes of a block]
    partials,  # fp32 [splits, T, num_outputs]: the sum over the blocks of each split
    num_rows,  # T
    num_outputs,
    num_blocks,  # of an output
    blocks_each,  # of a split, a multiple of BLOCKS
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,  # at a time
    WIDEN: tl.constexpr,  # products of fp32: the interpreter knows no bf16
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
    """Program (b, c, s): block b of the rows times column c of `OUTPUTS` outputs, over the blocks of split s in their
    order. A product takes a part of a byte of all words at a time, so its inputs are those that lie there."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    SIZE: tl.constexpr = BLOCKS * WORDS
    word, unit, block = tl.arange(0, SIZE), tl.arange(0, BLOCKS * UNITS), tl.arange(0, BLOCKS)
    real, there = row < num_rows, output < num_outputs
    element: tl.constexpr = tl.int32 if WORD == 4 else tl.int16
    several: tl.constexpr = tl.int64 if WORD == 4 else tl.int32
    home = stored.to(tl.pointer_type(element)) + (output.to(tl.int64) * num_blocks * BLOCK)[None, :]
    # Inputs, as many as a word has bytes at a time.
    inputs = rows.to(tl.pointer_type(several)) + (row.to(tl.int64) * num_blocks * (WORDS * PARTS))[:, None]
    at_input = word // RUN * (RUN * PARTS) + word % RUN
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first_block = split * blocks_each
    last = tl.minimum(first_block + blocks_each, num_blocks)
    for begun in tl.range(first_block, last, BLOCKS):
        # What is past the last block counts as zeros.
        near = begun + word // WORDS < last
        source = home + begun * BLOCK
        codes, others, upper = codes_of(source, word, near[:, None] & there[None, :], KIND, BLOCK, WORDS, CODES)
        held = (begun + block < last)[:, None] & there[None, :]
        for part in tl.static_range(PARTS):
            first, second, third, fourth = heads_of(source, unit, held, KIND, BLOCK, UNITS, part)
            step, added = scales_of(first, second, third, fourth, unit, KIND, SCALE, part)
            step, added, fifth = spread(step, SIZE), spread(added, SIZE), spread(second, SIZE)
            place = inputs + begun * (WORDS * PARTS) + (at_input + part * RUN)[None, :]
            both = tl.load(place, mask=real[:, None] & near[None, :], other=0)
            for each in tl.static_range(WORD):
                x = (both >> 16 * each).to(tl.int16).to(rows.dtype.element_ty, bitcast=True)
                weight = numbers_of(
                    codes, others, upper, step, added, fifth, word, part, each, KIND, SCALE, BIAS, WORD, WORDS, PARTS
                ).to(rows.dtype.element_ty)
                if WIDEN:
                    x, weight = x.to(tl.float32), weight.to(tl.float32)
                total = tl.dot(x, weight, total, input_precision="ieee")
    target = (split * num_rows + row).to(tl.int64) * num_outputs
    tl.store(partials + target[:, None] + output[None, :], total, mask=real[:, None] & there[None, :])
