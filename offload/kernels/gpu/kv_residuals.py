"""Pages of keys and values on a GPU from their codes and their residuals. See `offload.kernels.kv_residuals`."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.gpu import attention, kv_residual_programs
from offload.kernels.kv_codes import GROUP
from offload.kernels.kv_residuals import PageShape
from offload.plan.sizing import kv_code_bytes

_AT_A_TIME = 2048  # numbers of a program
_OF_THREAD = 8  # of these: 16 bytes of them are stored at once


def restore_pages(
    tile: Tensor,
    slot: Tensor,
    flags: Tensor,
    starts: Tensor,
    codes: Tensor,
    first_group: int,
    shape: PageShape,
) -> None:
    """See `offload.kernels.kv_residuals.restore_tile`: one launch. codes: in order "matrices"."""
    assert tile.is_contiguous()
    assert slot.is_contiguous()
    assert tile.shape == slot.shape == (2, tile.shape[1], shape.num_kv_heads, shape.page_tokens, shape.head_dim)
    assert starts.stride(1) == 1
    assert codes.stride()[1:] == (kv_code_bytes(shape.head_dim), 1)
    attention.launch(
        kv_residual_programs.restore_pages,
        (shape.num_groups, len(flags), 2),
        (
            slot.view(torch.uint8), tile.view(torch.int16), flags, starts, codes, starts.stride(0), tile.shape[1],
            codes.stride(0), first_group,
        ),
        PAGE=shape.page_tokens,
        **constants(shape.head_dim),
    )  # fmt: skip


def constants(head_dim: int) -> dict[str, int]:
    """Of programs that take a group each."""
    padded = 1 << (head_dim - 1).bit_length()
    step = min(_AT_A_TIME // padded, GROUP)
    warps = step * padded // (32 * _OF_THREAD)
    return {"DIM": head_dim, "DIM_PADDED": padded, "STEP": step, "num_warps": warps}
