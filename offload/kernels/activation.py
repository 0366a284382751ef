"""Activations of a feed-forward network's inner rows, by torch's operators."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from offload.config.block import Activation


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x, in its dtype."""
    if activation == "silu":
        return silu(x)
    return gelu(x, approximate="tanh") if activation == "gelu_tanh" else relu(x).square_()


def gated(x: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of x [T, 2 * size], whose rows have gate before up -> [T, size], rounded to its dtype after
    the activation and after the product."""
    gate, up = x.chunk(2, -1)
    return activated(gate, activation).mul_(up)
