"""Operations on rows of several residual streams (`config.streams`), by torch's operators.

Letters: T rows, C streams side by side in a row, each of `hidden` numbers. Each operation rounds to the dtype of its
rows, as by transformers, and a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from offload.kernels.exponentials import sigmoid, silu
from offload.kernels.norms import NormWeights, normed_heads


def normed(x: Tensor, norm: NormWeights, count: int) -> Tensor:
    """x [T, C * hidden] -> x, each of the `count` streams normed by itself. norm: weights [C * hidden], in fp32."""
    return normed_heads(x, norm, x.shape[1] // count)


def gates(low: Tensor, rank: int, count: int) -> tuple[Tensor, Tensor]:
    """silu(low / count) of the first `rank` numbers of low [T, rank + n], and 2 sigmoid(low / count) of the others."""
    low = low / count
    inner, factors = low[:, :rank].float(), low[:, rank:].float()
    return silu(inner).to(low.dtype), 2 * sigmoid(factors).to(low.dtype)


def mean(mixes: Tensor, rows: Tensor, count: int) -> Tensor:
    """The mean over the streams of sigmoid(mixes) * rows, both [T, C * hidden] -> [T, hidden], summed in fp32."""
    mixed = sigmoid(mixes.float()).to(rows.dtype) * rows
    streams = mixed.unflatten(1, (count, -1)).float().unbind(1)
    total: Tensor = streams[0]
    for each in streams[1:]:
        total += each
    return (total / count).to(rows.dtype)


def inject(x: Tensor, part: Tensor, factors: Tensor) -> None:
    """Add a part's output [T, hidden] to each stream of x [T, C * hidden], times the stream's factor [T, C], in
    place."""
    streams = x.unflatten(1, (factors.shape[1], -1))
    streams += part[:, None] * factors[:, :, None]


@dataclass(frozen=True)
class StreamKernels:
    """Who computes each operation on rows of streams: the functions of this module, or a device's own."""

    normed: Callable[[Tensor, NormWeights, int], Tensor] = normed
    gates: Callable[[Tensor, int, int], tuple[Tensor, Tensor]] = gates
    mean: Callable[[Tensor, Tensor, int], Tensor] = mean
    inject: Callable[[Tensor, Tensor, Tensor], None] = inject


BY_TORCH = StreamKernels()
