"""The number of distinct experts that the rows of a pass choose, and the bytes of weights that they read."""

from __future__ import annotations

from offload.config.block import Experts
from offload.config.model import ModelConfig

_HIT_POWER = 0.5  # hits in a cache of the least recently used, by its share of all experts (docs/memory.md)
_ALIKE = 0.75  # rows of a text choose like so many independent ones, as a power (docs/memory.md)


def independent_rows(rows: int) -> float:
    """The number of rows that choose experts independently of each other, and as many distinct ones as `rows` rows that
    follow each other in a text."""
    return float(rows**_ALIKE)


def distinct_experts(experts: Experts, rows: int) -> float:
    """The experts of a layer that `rows` rows of a text choose between them."""
    return float(experts.count * (1.0 - (1.0 - experts.used / experts.count) ** independent_rows(rows)))


def hit_rate(share: float) -> float:
    """The share of a token's experts that are among the `share` of all experts that were used last."""
    return float(min(share, 1.0) ** _HIT_POWER)


def read_bytes(layer: ModelConfig, dtype_bytes: int, rows: int) -> float:
    """Bytes of the weights of `layer.block` that `rows` rows read between them."""
    experts, num_bytes = layer.block.experts, layer.layer_weight_bytes(dtype_bytes)
    return num_bytes + (distinct_experts(experts, rows) * layer.expert_bytes(dtype_bytes) if experts else 0)


def layers_wanted_bytes(model: ModelConfig, dtype_bytes: int, rows: int) -> float:
    """Bytes of the experts of all layers that `rows` rows choose between them."""
    return sum(
        number * distinct_experts(kind.block.experts, rows) * kind.expert_bytes(dtype_bytes)
        for kind, number in model.kinds
        if kind.block.experts
    )


def layers_read_bytes(model: ModelConfig, dtype_bytes: int, rows: int) -> float:
    """Bytes of the weights of all layers that `rows` rows read between them."""
    return sum(number * read_bytes(kind, dtype_bytes, rows) for kind, number in model.kinds)
