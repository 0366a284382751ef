"""Residual streams in a pass: what a part of a layer reads of them, and what it adds to them (`config.streams`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from offload.kernels.exponentials import sigmoid, silu
from offload.weights.linear import Linear
from offload.weights.streams import StreamWeights

Multiply = Callable[[Tensor, Linear], Tensor]


class Read(NamedTuple):
    """The rows that a part reads, [T, hidden], and the factors of its output for each stream, [T, count]; of the last
    mean [T, 0]."""

    rows: Tensor
    factors: Tensor


def mean_of(x: Tensor, weights: StreamWeights, multiply: Multiply) -> Read:
    """The mean over streams x [T, count * hidden]. multiply: rows by a matrix. Rounded to the dtype of x after each
    operation, as by transformers."""
    streams, dtype = weights.streams, x.dtype
    normed = weights.normed(x)
    low = multiply(normed, weights.low) / streams.count
    inner = silu(low[:, : streams.rank].float()).to(dtype)
    mixes = sigmoid(multiply(inner, weights.up).float()).to(dtype)
    first, *others = (mixes * normed).unflatten(1, (streams.count, -1)).float().unbind(1)
    for each in others:
        first += each
    return Read((first / streams.count).to(dtype), 2 * sigmoid(low[:, streams.rank :].float()).to(dtype))


def inject(x: Tensor, part: Tensor, factors: Tensor) -> None:
    """Add a part's output [T, hidden] to each stream of x [T, count * hidden], times the stream's factor [T, count], in
    place."""
    streams = x.unflatten(1, (factors.shape[1], -1))
    streams += part[:, None] * factors[:, :, None]
