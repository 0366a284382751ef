"""The fields of families whose layers have mixtures of experts."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from offload.config.block import Block
from offload.config.model import ModelConfig
from offload.config.networks import MOST_GROUPS, Experts
from offload.fields import Fields

MOST_EXPERTS = 1 << 12
READS = frozenset(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"))
GROUPS = ("n_group", "topk_group")
FACTOR, NORMED = "routed_scaling_factor", "norm_topk_prob"
SIGMOIDS = frozenset((*GROUPS, FACTOR, NORMED))
MLP_TYPES = "mlp_layer_types"


def read_experts(
    source: Fields,
    config: ModelConfig,
    *,
    counts: Sequence[str] = ("num_experts", "num_local_experts"),
    used: str = "num_experts_per_tok",
    **others: Any,
) -> Experts:
    """The mixture of experts of all layers that have one, networks like the one of `config`. counts: the names that the
    field of their number may have. used: the field of those that a row runs through. others: fields of `Experts`."""
    key = next((key for key in counts if source.data.get(key) is not None), counts[0])
    count, size = source.integer(key, MOST_EXPERTS), source.integer("moe_intermediate_size", 1 << 22)
    return Experts(replace(config.block.feed_forward, size=size), count, source.integer(used, count), **others)


def read_sigmoids(source: Fields, config: ModelConfig, *, factor: float = 1.0, **others: Any) -> Experts:
    """The mixture of experts of DeepSeek V3's form: sigmoids, a bias of ranks, and groups of experts. factor: of their
    weights, if the config has none. others: see `read_experts`."""
    experts = read_experts(
        source, config, renormalised=source.flag(NORMED, True), scoring="sigmoid",
        factor=source.number(FACTOR, default=factor), bias="ranks", **others,
    )  # fmt: skip
    return with_groups(source, experts)


def with_groups(source: Fields, experts: Experts, **others: Any) -> Experts:
    """`experts` in groups of which some are used, if the source has such. others: fields of `Experts` then."""
    groups = source.integer(GROUPS[0], MOST_GROUPS, default=1)
    used = source.integer(GROUPS[1], groups, default=1)
    if used == groups:
        return experts
    if experts.count % groups or experts.count < 2 * groups:
        source.refuse(GROUPS[0], f"a divisor of the number of experts, {experts.count}, two or more in each group")
    if used * experts.count // groups < experts.used:
        source.refuse(GROUPS[1], f"groups that have the {experts.used} experts of a token together")
    return replace(experts, groups=groups, groups_used=used, **others)


def with_experts(
    config: ModelConfig, experts: Experts, *, beside: int = 0, dense: Container[int] = (), **block: Any
) -> ModelConfig:
    """`config` with `experts` in all layers but the `dense` ones, by number, in place of the feed-forward network or
    beside one with `beside` inner rows. block: further fields of these layers."""

    def change(own: Block) -> Block:
        return replace(own, feed_forward=replace(own.feed_forward, size=beside), experts=experts, **block)

    made = {own: change(own) for own in set(config.blocks)}
    blocks = tuple(own if at in dense else made[own] for at, own in enumerate(config.blocks))
    return replace(config, blocks=blocks)


def dense_layers(source: Fields, num_layers: int, first: int) -> frozenset[int]:
    """The layers without experts: as a list names the kind of each layer, else the `first` ones."""
    if not (types := source.data.get(MLP_TYPES)):
        return frozenset(range(min(first, num_layers)))
    if not isinstance(types, list) or len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
        source.refuse(MLP_TYPES, f'a list of {num_layers}, "dense" or "sparse" for each layer')
    return frozenset(layer for layer, kind in enumerate(types) if kind == "dense")
