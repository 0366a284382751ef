"""Norms of rows, from their description and their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from offload.config.norm import Norm


@dataclass(frozen=True)
class NormWeights:
    """A norm with its weights. weight, bias: [size] each, in the rows' dtype or fp32. weight: the factor of a row,
    including the 1 that `Norm.plus_one` adds."""

    norm: Norm
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the normed rows, by torch's operators."""
        rows = x.to(self.weight.dtype)
        if self.norm.centred:
            return layer_norm(rows, self.weight.shape, self.weight, self.bias, self.norm.eps).to(x.dtype)
        return rms_norm(rows, self.weight.shape, self.weight, self.norm.eps).to(x.dtype)


def normed_heads(x: Tensor, norm: NormWeights | None, size: int) -> Tensor:
    """x [T, H * D] -> x, normed in parts of `size` numbers each; 0: each row as a whole. A longer weight has its own
    numbers for each part."""
    if norm is None or size in (0, len(norm.weight)):
        return x if norm is None else norm(x.unflatten(1, (-1, len(norm.weight)))).flatten(1)
    assert norm.bias is None
    plain = replace(norm, weight=torch.ones(size, dtype=torch.float32, device=x.device))
    return plain(x.float().unflatten(1, (-1, size))).flatten(1).mul_(norm.weight).to(x.dtype)


def norm_over(x: Tensor, norm: NormWeights, squares: Tensor, count: int) -> Tensor:
    """RMS norm of the part x [T, n] of rows with `count` numbers. squares: [T, 1] fp32, the rows' sums of squares."""
    rows = x.float() * (squares / count + norm.norm.eps).rsqrt()
    return rows.to(norm.weight.dtype).mul_(norm.weight).to(x.dtype)


def dtype_of(norm: Norm, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the norm's weights in a model of `dtype`."""
    return torch.float32 if norm.fp32 else dtype


def add_normed(x: Tensor, part: Tensor, norm: NormWeights | None, factor: float) -> None:
    """The residual addition x += factor * norm(part), in place."""
    part = part if norm is None else norm(part)
    x += part if factor == 1 else part * factor
