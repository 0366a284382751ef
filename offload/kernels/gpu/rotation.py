"""The rotation of new queries and keys on a GPU, and the writing of keys and values to a run's places, by one launch.

Results round as `rope.rotate` does, product by product and sum by sum. Places are read on the GPU, so a graph may
contain the launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.kernels.gpu.rotation_programs import rotate_rows
from offload.kernels.places import RowPlaces
from offload.kernels.runs import Rows, Run
from offload.native.launch import launch

_ANYWHERE = 2**31 - 1  # no position is larger


def rotated(rows: Rows, places: RowPlaces, lasts: Sequence[int | None], run: Run | None = None) -> list[Tensor]:
    """The rotated and weighted queries, [T, H, D] for each of `lasts`: at most to that position, None: to their own.
    There may be two. run: gets the rows' keys, rotated and weighted, and their values, where its places are theirs."""
    (num_rows, heads, dim), kv_heads = rows.q.shape, rows.k.shape[1]
    rope, dtype = rows.scoring.rope, rows.q.dtype
    queries = torch.empty(len(lasts), num_rows, heads, dim, dtype=dtype, device=rows.q.device)
    nothing = queries  # in place of a tensor that there is none of
    growth = nothing if rope.growth is None else rope.growth.to(dtype)
    keys, values, strides = nothing, nothing, (0,) * 5
    if run is not None:
        keys, values = run.pages
        strides = len(keys), keys.shape[2], *keys.stride()[:3]
    ends = [_ANYWHERE if last is None else last for last in (*lasts, None, None)]
    launch(
        rotate_rows,
        (num_rows, len(lasts) * heads + (0 if run is None else kv_heads)),
        (
            rows.q, rows.k, rows.v, rope.cos.to(dtype), rope.sin.to(dtype), growth,
            *(rows.scoring.weights or (nothing, nothing)), places.positions, places.slots,
            nothing if places.bounds is None else places.bounds, queries, keys, values,
            rows.q.stride(0), rows.k.stride(0), rows.v.stride(0), *strides,
            0 if run is None else run.first, *ends[:2],
        ),
        QUERIES=len(lasts), HEADS=heads, DIM=dim, DIM_PADDED=1 << (dim - 1).bit_length(), TABLE=rope.cos.shape[1],
        GROWN=rope.growth is not None, WEIGHED=rows.scoring.weights is not None, JOINED=rows.scoring.joined,
        BOUNDED=places.bounds is not None, RING=run is not None and run.ring,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return list(queries)
