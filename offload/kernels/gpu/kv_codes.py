"""The making of keys and values in 4 bits on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.gpu import attention, kv_programs

_WARPS = 4


def encode(rows: Tensor, blocks: Tensor, wanted: Tensor | None) -> None:
    """See `offload.kernels.kv_codes.encode`. blocks: uint8 [L, H_kv, groups, bytes]."""
    num_layers, num_heads, num_groups, _ = blocks.shape
    assert wanted is None or (wanted.shape == blocks.shape[:3] and wanted.is_contiguous())
    dim = rows.shape[4]
    attention.launch(
        kv_programs.encode_groups,
        (num_groups, num_heads, num_layers),
        (
            rows, blocks, blocks.view(torch.int32), blocks if wanted is None else wanted,
            *rows.stride()[:3], *blocks.stride()[:2],
        ),
        CHOSEN=wanted is not None,
        DIM=dim,
        DIM_PADDED=1 << (dim - 1).bit_length(),
        num_warps=_WARPS,
    )  # fmt: skip
