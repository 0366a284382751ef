"""Sums of the partial products of a GPU's programs that split the inputs."""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.native.launch import launch

COLUMNS = 256  # outputs of a program


def joined(partials: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of partials fp32 [splits, T, outputs], contiguous, split after split, plus bias [outputs] -> [T, outputs]
    of `dtype`."""
    num_splits, num_rows, outputs = partials.shape
    out = torch.empty(num_rows, outputs, dtype=dtype, device=partials.device)
    launch(
        join_splits,
        (num_rows, -(-outputs // COLUMNS)),
        (partials, out if bias is None else bias, out, num_splits, num_rows, outputs),
        BIAS=bias is not None,
        COLUMNS=COLUMNS,
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def join_splits(
    partials,  # fp32 [splits, T, outputs]
    bias,  # [outputs]
    out,  # [T, outputs], contiguous
    num_splits,
    num_rows,  # T
    row_stride,  # outputs
    BIAS: tl.constexpr,  # whether there is one
    COLUMNS: tl.constexpr,
):
    """Program (t, c): add up the splits of row t in their order, in block c of the outputs, and then the bias."""
    row, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < row_stride
    total = tl.zeros([COLUMNS], tl.float32)
    for split in tl.range(0, num_splits, loop_unroll_factor=4):
        source = (split * num_rows + row).to(tl.int64) * row_stride
        total += tl.load(partials + source + column, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    target = row.to(tl.int64) * row_stride
    tl.store(out + target + column, total.to(out.dtype.element_ty), mask=inside)
