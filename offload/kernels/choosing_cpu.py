"""The choice of blocks by the CPU's kernels (native/choosing.h), see `kernels.choosing`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from offload.kernels.products import Step, structure_of, widened_floats
from offload.native.interface import DTYPES, Choosing, Library

ROWS = 64  # that the keys are read once for


def choose(q: Tensor, pooled: Tensor, visible: Tensor, most: int, *, kernels: Library) -> Tensor:
    """See `kernels.choosing.choose`. D_i is even. The keys that no row may see are not read. Memory: the scores of 64
    rows."""
    num_rows, num_heads, dim = q.shape
    assert q.is_contiguous()
    assert pooled.is_contiguous()
    assert dim % 2 == 0
    chosen = torch.empty(num_rows, min(most, len(pooled)), dtype=torch.int32)
    visible = visible.int().contiguous()
    keys = pooled[: int(visible.max())]
    widened = torch.empty(widened_floats(min(num_rows, ROWS) * num_heads, dim))
    scores = torch.empty(min(num_rows, ROWS), len(keys))
    for first in range(0, num_rows, ROWS):
        queries, made = q[first : first + ROWS].flatten(0, 1), chosen[first : first + ROWS]
        step = Step(queries, keys, None, scores)  # of which the kernel takes rows and matrix alone
        structure = Choosing(
            structure_of(step, (widened, widened)), scores.data_ptr(), visible[first:].data_ptr(), made.data_ptr(),
            len(made), num_heads, chosen.shape[1],
        )  # fmt: skip
        kernels.library.choose(DTYPES[q.dtype], ctypes.byref(structure), torch.get_num_threads())
    return chosen
