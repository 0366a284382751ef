"""Activations made of e^x, by torch's operators, with bits that do not depend on the size of a tensor: torch's own
functions of these names round the last numbers of a tensor differently."""

from __future__ import annotations

from torch import Tensor

_ALONE = 2048  # numbers of e^x that torch computes on one thread of a CPU
_FEW = 8 * _ALONE  # up to which waking the other threads takes longer than they save


def grown(x: Tensor) -> Tensor:
    """1 + e^-x."""
    found = x.neg()
    few = found.is_cpu and _ALONE < found.numel() <= _FEW and found.is_contiguous()
    for part in found.view(-1).split(_ALONE) if few else (found,):
        part.exp_()
    return found.add_(1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return grown(x).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)."""
    return x / grown(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return x.clamp(min=0).add_(x.abs().neg_().exp_().log1p_())
