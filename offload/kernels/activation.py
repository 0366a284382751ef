"""Activations of a feed-forward network's inner rows, by torch's operators."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from offload.config.networks import CLAMPED_LIMIT, CLAMPED_SLOPE, Activation


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x, in its dtype. clamped_silu: g / (1 + exp(-CLAMPED_SLOPE g)) of g = min(x, CLAMPED_LIMIT),
    as gpt-oss has it."""
    if activation == "silu":
        return silu(x)
    if activation == "clamped_silu":
        gate = x.clamp(max=CLAMPED_LIMIT).float()
        return (gate / (1 + (-CLAMPED_SLOPE * gate).exp())).to(x.dtype)
    return gelu(x, approximate="tanh") if activation == "gelu_tanh" else relu(x).square_()


def gated(x: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of x [T, 2 * size], whose rows have gate before up -> [T, size], rounded to its dtype after
    the activation and after the product. clamped_silu: up is clamped to CLAMPED_LIMIT on either side, and 1 is
    added."""
    gate, up = x.chunk(2, -1)
    if activation == "clamped_silu":
        up = up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT).add_(1)
    return activated(gate, activation).mul_(up)
