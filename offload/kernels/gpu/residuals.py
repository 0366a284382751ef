"""Weights on a GPU from their codes and their residuals. See `offload.kernels.residuals`."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.codes import Codes
from offload.kernels.gpu import attention
from offload.kernels.gpu.residual_programs import restore_weights

WARPS = 4


def restore(content: Tensor, escapes: int, codes: Codes, out: Tensor) -> None:
    """Fill out, bf16 [outputs, inputs], by one launch; all are on the GPU."""
    num_tiles, num_groups, _ = codes.blocks.shape
    arguments = content, codes.blocks, out.view(torch.int16), num_groups, escapes
    attention.launch(restore_weights, (num_groups, num_tiles), arguments, BITS=codes.bits, num_warps=WARPS)
