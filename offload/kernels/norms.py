"""Norms of rows: a description and its vectors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from offload.config.model import Norm


@dataclass(frozen=True)
class NormWeights:
    """weight, bias: [size] each. weight: what a row is multiplied by, with the 1 that `Norm.plus_one` adds."""

    norm: Norm
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same, by torch's operators."""
        if self.norm.centred:
            return layer_norm(x, self.weight.shape, self.weight, self.bias, self.norm.eps)
        return rms_norm(x, self.weight.shape, self.weight, self.norm.eps)


def add_normed(x: Tensor, part: Tensor, norm: NormWeights | None, factor: float) -> None:
    """x += factor * norm(part), in place."""
    part = part if norm is None else norm(part)
    x += part if factor == 1 else part * factor
