"""Products of a few rows with matrices in the encodings of quantised checkpoints on a GPU, in Triton: blocks are read
in their stored form and decoded in registers. See `offload.formats.stored_gpu`."""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.encodings import Encoding
from offload.formats.stored import StoredMatrix
from offload.formats.stored_codes_gpu import book_of, codes_of, in_two
from offload.formats.stored_gpu import heads_of, numbers_of, scales_of, spread, tail_of
from offload.kernels.gpu.splits import joined
from offload.native.launch import launch

MOST_ROWS = 64  # of a product with stored blocks; for more rows the matrix is decoded once
ROWS = (16, 32)  # of a program: the minimum of tensor cores, and twice that for more rows
_PROGRAMS = 512  # of a product: four for each multiprocessor of a large GPU, to use its full memory bandwidth
_LEAST_INPUTS = 512  # of a split: smaller splits write more than they save


def product(x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
    """The product of x [T, inputs] of 16 bits with the transposed matrix, rounded to x's dtype, plus bias [outputs] ->
    [T, outputs]. Sums are fp32; their order depends on the matrix's shape and encoding alone, so a row's bits do not
    depend on the rows beside it. x must begin at a multiple of 8 bytes. Scratch memory: fp32 [splits, T, outputs]."""
    (outputs, inputs), num_rows, encoding = stored.shape, len(x), stored.encoding
    if x.dtype.itemsize != 2:
        raise ValueError(f"rows are {x.dtype}; a GPU multiplies stored matrices with bf16 and fp16")
    stored, tiling = stored.aligned(), encoding.tiling
    x, num_blocks = x.contiguous(), inputs // encoding.numbers
    blocks_each = split_blocks(outputs, inputs, encoding)
    num_splits = -(-num_blocks // blocks_each)
    partials = torch.empty(num_splits, num_rows, outputs, device=x.device)
    rows = ROWS[num_rows > ROWS[0]]
    launch(
        multiply_stored,
        (-(-num_rows // rows), -(-outputs // (2 * tiling.outputs)) * 2, num_splits),
        (x, stored.rows, book_of(stored), partials, num_rows, outputs, num_blocks, blocks_each),
        ROWS=rows,
        OUTPUTS=tiling.outputs,
        BLOCKS=tiling.blocks(encoding),
        WIDEN=not x.is_cuda,
        FORM=encoding,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return joined(partials, bias, x.dtype)


def split_blocks(outputs: int, inputs: int, encoding: Encoding) -> int:
    """The number of blocks of a matrix row that a program sums. With few outputs rows are split, so that there are
    enough programs for a GPU. A multiple of `Tiling.blocks`; the last split may have fewer. It depends on the
    shape and encoding alone, since it determines the order of sums."""
    num_blocks, columns = inputs // encoding.numbers, -(-outputs // encoding.tiling.outputs)
    most = max(num_blocks * columns // _PROGRAMS, _LEAST_INPUTS // encoding.numbers)
    num_splits, at_once = -(-num_blocks // most), encoding.tiling.blocks(encoding)
    return -(-num_blocks // (num_splits * at_once)) * at_once


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_blocks", "blocks_each"])
def multiply_stored(
    rows,  # [T, inputs] of 16 bits, contiguous
    stored,  # uint8 [num_outputs, bytes of num_blocks blocks and of a tail]
    book,  # from book_of
    partials,  # fp32 [splits, T, num_outputs]: the sum over the blocks of each split
    num_rows,  # T
    num_outputs,
    num_blocks,  # of an output
    blocks_each,  # of a split, a multiple of BLOCKS
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,  # at a time
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
    FORM: tl.constexpr,  # an Encoding
):
    """Program (b, c, s): block b of the rows times column c of `OUTPUTS` outputs, over the blocks of split s in their
    order. Outputs after the last one are not stored."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, split = tl.program_id(1), tl.program_id(2)
    real = row < num_rows
    first_block = split * blocks_each
    last = tl.minimum(first_block + blocks_each, num_blocks)
    total, output = sum_blocks(
        rows, row, real, stored, book, column, num_outputs, num_blocks, first_block, last,
        ROWS, OUTPUTS, BLOCKS, WIDEN, FORM,
    )  # fmt: skip
    valid = output < num_outputs
    target = (split * num_rows + row).to(tl.int64) * num_outputs
    tl.store(partials + target[:, None] + output[None, :], total, mask=real[:, None] & valid[None, :])


@triton.jit
def sum_blocks(
    rows,  # [any, inputs] of 16 bits, contiguous, at a multiple of 8 bytes
    row,  # int32 [ROWS]: of them
    real,  # bool [ROWS]: other rows are not read
    stored,  # uint8 [num_outputs, bytes of num_blocks blocks and of a tail], at a multiple of 4 bytes
    book,  # from book_of
    column,  # of `OUTPUTS` outputs; there must be an even number of columns
    num_outputs,
    num_blocks,  # of an output
    first_block,
    last,  # the block after the last one
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,  # at a time
    WIDEN: tl.constexpr,
    FORM: tl.constexpr,  # an Encoding
):
    """The products of rows with the outputs of a column over some blocks, in their order, fp32 [ROWS, OUTPUTS]; and
    these outputs, int32 [OUTPUTS]. Each `dot` takes the inputs of one part of a byte in all words. Outputs after the
    last one repeat the column's first."""
    BLOCK: tl.constexpr = FORM.nbytes
    WORDS: tl.constexpr = FORM.words
    RUN: tl.constexpr = FORM.run
    PARTS: tl.constexpr = FORM.parts
    UNITS: tl.constexpr = FORM.units
    SIZE: tl.constexpr = BLOCKS * WORDS
    word, unit = tl.arange(0, SIZE), tl.arange(0, BLOCKS * UNITS)
    # Where blocks are whole halves of words, every other row may begin inside a word: a program has rows of one kind.
    ALIKE: tl.constexpr = (BLOCK % 4 == 2) and (FORM.high.run != 1)
    TURNED: tl.constexpr = ALIKE and (FORM.codes.run > 1)
    turns = 1 + num_blocks % 2 if ALIKE else 1
    first_output = column // turns * turns * OUTPUTS + column % turns
    output = first_output + turns * tl.arange(0, OUTPUTS)
    valid = output < num_outputs
    row_of = tl.where(valid, output, first_output)
    at = row_of.to(tl.int64) * (num_blocks * BLOCK + FORM.tail)
    home, before = stored.to(tl.pointer_type(tl.int32)) + (at // 4)[None, :], (at % 4).to(tl.int32)[None, :]
    if ALIKE:
        before = column % turns * num_blocks * BLOCK % 4
    tail = tail_of(stored, row_of, num_blocks, FORM) if FORM.tail else 0.0
    # Pointers to inputs, four at a time, as many as a word has bytes, or two at a time.
    fours = rows.to(tl.pointer_type(tl.int64)) + (row.to(tl.int64) * num_blocks * (WORDS * PARTS))[:, None]
    twos = rows.to(tl.pointer_type(tl.int32)) + (row.to(tl.int64) * num_blocks * (WORDS * PARTS * 2))[:, None]
    at_four = word // RUN * (RUN * PARTS) + word % RUN
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    last = tl.where(first_output < num_outputs, last, first_block)
    near, near_units = tl.full([SIZE], 1, tl.int1), tl.full([BLOCKS * UNITS], 1, tl.int1)
    for begun in tl.range(first_block, last, BLOCKS):
        # Blocks past the last one count as zeros.
        if BLOCKS > 1:
            near, near_units = begun + word // WORDS < last, begun + unit // UNITS < last
        source, odd = home + begun * BLOCK // 4, before
        if BLOCK * BLOCKS % 4:
            source, odd = home + (before + begun * BLOCK) // 4, (before + begun * BLOCK) % 4
        codes, others, upper = codes_of(source, odd, book, word, near[:, None], FORM, TURNED)
        for part in tl.static_range(PARTS):
            first, second, third, fourth = heads_of(source, odd, unit, near_units[:, None], FORM, part)
            step, added = scales_of(first, second, third, fourth, tail, unit, FORM, part)
            step, added, fifth = spread(step, SIZE), spread(added, SIZE), spread(second, SIZE)
            held, at_input = real[:, None] & near[None, :], begun * (WORDS * PARTS) + (at_four + part * RUN)[None, :]
            if TURNED:
                # Whether a word's first half is the later one.
                late = tl.where(in_two(odd, word // WORDS * BLOCK + FORM.codes.at), 0, 1)
                early = tl.load(twos + 2 * at_input + late[None, :], mask=held, other=0)
                later = tl.load(twos + 2 * at_input + 1 - late[None, :], mask=held, other=0)
            else:
                early = tl.load(fours + at_input, mask=held, other=0)
                later = early >> 32
            for byte in tl.static_range(4):
                x = ((later if byte > 1 else early) >> (16 * (byte % 2))).to(tl.int16)
                x = x.to(rows.dtype.element_ty, bitcast=True)
                weight = numbers_of(codes, others, upper, step, added, fifth, word, FORM, part, byte)
                weight = weight.to(rows.dtype.element_ty)
                if WIDEN:
                    x, weight = x.to(tl.float32), weight.to(tl.float32)
                total = tl.dot(x, weight, total, input_precision="ieee")
    return total, output
