"""Products of rows with weights in 4 or 6 bits on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.codes import GROUP, TILE, Codes
from offload.kernels.gpu import code_programs as programs
from offload.kernels.gpu.attention import launch

ROWS = 16  # of a program: the least that tensor cores take
TILES = 8  # of a program: the more, the less often rows are read
GROUPS = 2  # at a time: a word of each input is one of 16, the least that tensor cores take
STAGES = 3  # two of which are on their way
WARPS = 4
COLUMNS = 256  # outputs that are joined at a time
_PROGRAMS = 512  # of a product: four for each multiprocessor of a large GPU, so that all of its memory is asked
_LEAST_GROUPS = 8  # of a split: below that more is written than saved


def product(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    """x [T, inputs] of 16 bits, times the matrix rounded to its dtype and transposed, plus bias [outputs] -> [T,
    outputs]. Sums are fp32; the order in which they are made depends on the matrix's shape alone, so a row's bits do
    not depend on the rows beside it. Scratch: fp32 [splits, T, outputs]."""
    (outputs, inputs), num_rows = codes.shape, len(x)
    if x.dtype.itemsize != 2:
        raise ValueError(f"rows are {x.dtype}; a GPU multiplies quantised weights with bf16 and fp16")
    x, num_groups = x.contiguous(), inputs // GROUP
    groups_each = split_groups(outputs, inputs)
    num_splits = -(-num_groups // groups_each)
    partials = torch.empty(num_splits, num_rows, outputs, device=x.device)
    launch(
        programs.multiply_codes,
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
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    launch(
        programs.join_splits,
        (num_rows, -(-outputs // COLUMNS)),
        (partials, out if bias is None else bias, out, num_splits, num_rows, outputs // TILE),
        BIAS=bias is not None,
        COLUMNS=COLUMNS,
        num_warps=1,
    )
    return out


def split_groups(outputs: int, inputs: int) -> int:
    """Groups of inputs that a program sums up: with few outputs the inputs are split, so that there are programs enough
    for a GPU. A multiple of GROUPS; the last split may have fewer. Of the shape alone: the order of sums depends on
    it."""
    num_groups, columns = inputs // GROUP, -(-outputs // (TILES * TILE))
    most = max(num_groups * columns // _PROGRAMS, _LEAST_GROUPS)
    num_splits = -(-num_groups // most)
    return -(-num_groups // (num_splits * GROUPS)) * GROUPS
