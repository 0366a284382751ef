"""Functions of numbers by torch's operators, with bits that depend on the number alone. Torch's own round the last
numbers of a tensor differently: bits would depend on its size."""

from __future__ import annotations

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / grown(x)


def silu(x: Tensor) -> Tensor:
    return x / grown(x)


def softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0).add_(x.abs().neg_().exp_().log1p_())


def grown(x: Tensor) -> Tensor:
    """1 + e^-x."""
    return x.neg().exp_().add_(1)
