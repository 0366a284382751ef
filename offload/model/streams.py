"""The mean over residual streams that a part of a layer reads in a pass (`config.streams`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from offload.kernels.streams import BY_TORCH, StreamKernels
from offload.weights.linear import Linear
from offload.weights.streams import StreamWeights

Multiply = Callable[[Tensor, Linear], Tensor]


class Read(NamedTuple):
    """The rows that a part reads, [T, hidden], and the factors of its output for each stream, [T, count]; of the last
    mean [T, 0]."""

    rows: Tensor
    factors: Tensor


def mean_of(x: Tensor, weights: StreamWeights, multiply: Multiply, kernels: StreamKernels = BY_TORCH) -> Read:
    """The mean over streams x [T, count * hidden]. multiply: rows by a matrix."""
    own = weights.streams
    normed = kernels.normed(x, weights.norm, own.count)
    inner, factors = kernels.gates(multiply(normed, weights.low), own.rank, own.count)
    return Read(kernels.mean(multiply(inner, weights.up), normed, own.count), factors)
