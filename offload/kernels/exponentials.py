"""Activations made of e^x, by torch's operators, with bits that do not depend on the size of a tensor: torch's own
functions of these names round the last numbers of a tensor differently."""

from __future__ import annotations

from torch import Tensor


def grown(x: Tensor) -> Tensor:
    """1 + e^-x."""
    return x.neg().exp_().add_(1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return 1 / grown(x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)."""
    return x / grown(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return x.clamp(min=0).add_(x.abs().neg_().exp_().log1p_())
