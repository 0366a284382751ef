"""The weights of a mean over residual streams, which a part of a layer reads, or the head."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.streams import Streams
from offload.kernels.norms import NormWeights
from offload.weights.linear import Linear


@dataclass(frozen=True)
class StreamWeights:
    """The weights of a mean over streams, see `Streams`. norm: [count * hidden], of each stream. low: [rank + count,
    count * hidden], `down` and `inject`, or `down` alone of the last mean. up: [count * hidden, rank]."""

    streams: Streams
    norm: NormWeights
    low: Linear
    up: Linear
