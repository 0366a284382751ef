"""Norms of rows: a description and its vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from offload.config.model import Attention, Norm


@dataclass(frozen=True)
class NormWeights:
    """weight, bias: [size] each, of the rows' dtype or fp32. weight: what a row is multiplied by, with the 1 that
    `Norm.plus_one` adds."""

    norm: Norm
    weight: Tensor
    bias: Tensor | None = None

    def now(self, attention: Attention) -> NormWeights:
        """Of queries or keys, before they are rotated: without the weight where that comes after it."""
        return replace(self, weight=torch.ones_like(self.weight)) if attention.weighs_rotated else self

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same, by torch's operators."""
        rows = x.to(self.weight.dtype)
        if self.norm.centred:
            return layer_norm(rows, self.weight.shape, self.weight, self.bias, self.norm.eps).to(x.dtype)
        return rms_norm(rows, self.weight.shape, self.weight, self.norm.eps).to(x.dtype)


def add_normed(x: Tensor, part: Tensor, norm: NormWeights | None, factor: float) -> None:
    """x += factor * norm(part), in place."""
    part = part if norm is None else norm(part)
    x += part if factor == 1 else part * factor
