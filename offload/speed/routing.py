"""The number of distinct experts that the rows of a pass choose, and the bytes of weights that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

from offload.config.model import ModelConfig
from offload.config.networks import Experts

BANK = 32  # experts of a prefill that are used together as they arrive in staging slots
_NEARLY_ALL = 0.9  # of a layer's experts: from there on they are fetched before its router has chosen
_ALIKE = 0.7  # rows of a text choose like so many independent ones, as a power (docs/memory.md)


def independent_rows(rows: float) -> float:
    """The number of rows that choose experts independently of each other, and as many distinct ones as `rows` rows that
    follow each other in a text."""
    return float(rows**_ALIKE)


def distinct_experts(experts: Experts, rows: float) -> float:
    """The experts of a layer that `rows` rows of a text choose between them."""
    return float(experts.count * (1.0 - (1.0 - experts.used / experts.count) ** independent_rows(rows)))


def wants_nearly_all(experts: Experts, rows: float) -> bool:
    """Whether `rows` rows of a text choose so many of a layer's experts that few are fetched in vain if all are."""
    return distinct_experts(experts, rows) >= _NEARLY_ALL * experts.count


def over_groups(num_rows: int, at_once: int, of_rows: Callable[[int], float]) -> float:
    """The sum of `of_rows` over groups of `at_once` rows, as a prefill's run through experts, and over the rest."""
    whole, rest = divmod(num_rows, at_once)
    return whole * of_rows(at_once) + (of_rows(rest) if rest else 0.0)


def hit_rate(experts: Experts, slots: int, rows: int) -> float:
    """The share of the experts wanted by a pass of `rows` rows that are in one of a layer's `slots` slots; 1 if all
    experts have a slot.

    Slots are taken to have the experts of the rows before the pass: of as many rows as choose `slots` distinct experts,
    and of at least `rows`. A miss is an expert that the pass's rows add to the distinct experts of the rows before. If
    the pass wants more experts than there are slots, the share is multiplied by slots / wanted experts.
    """
    wanted = distinct_experts(experts, rows)
    held = min(slots, experts.count)
    if held == experts.count:
        return 1.0
    before = max(_rows_of(experts, held), rows)
    found = 1.0 - (distinct_experts(experts, before + rows) - distinct_experts(experts, before)) / wanted
    return found * min(held / wanted, 1.0)


def _rows_of(experts: Experts, distinct: int) -> float:
    """The number of rows of a text that choose so many distinct experts of a layer, fewer than all."""
    independent = log(1.0 - distinct / experts.count) / log(1.0 - experts.used / experts.count)
    return float(independent ** (1.0 / _ALIKE))


def read_bytes(layer: ModelConfig, dtype_bytes: int, rows: int) -> float:
    """Bytes of the weights of `layer.block` that `rows` rows read between them."""
    experts, num_bytes = layer.block.experts, layer.layer_weight_bytes(dtype_bytes)
    return num_bytes + (distinct_experts(experts, rows) * layer.expert_bytes(dtype_bytes) if experts else 0)


def layers_wanted_bytes(model: ModelConfig, dtype_bytes: int, rows: int, slots: int = 0) -> float:
    """Bytes of the experts of all layers that `rows` rows choose between them and that are in none of the `slots` slots
    of each layer."""
    return sum(
        number
        * distinct_experts(kind.block.experts, rows)
        * (1.0 - (hit_rate(kind.block.experts, slots, rows) if slots else 0.0))
        * kind.expert_bytes(dtype_bytes)
        for kind, number in model.kinds
        if kind.block.experts
    )


def cpu_layers(model: ModelConfig, number: int) -> Sequence[int]:
    """The layers whose experts the CPU runs: the last `number` of those that have experts."""
    own = [layer for layer, block in enumerate(model.blocks) if block.experts is not None]
    return own[len(own) - number :] if number else ()


def layers_read_bytes(model: ModelConfig, dtype_bytes: int, rows: int) -> float:
    """Bytes of the weights of all layers that `rows` rows read between them."""
    return sum(number * read_bytes(kind, dtype_bytes, rows) for kind, number in model.kinds)
