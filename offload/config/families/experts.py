"""The fields of families whose layers have mixtures of experts."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from offload.config.block import Block, Experts, FeedForward
from offload.config.model import ModelConfig
from offload.fields import Fields

MOST_EXPERTS = 1 << 12
READS = frozenset(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"))


def with_experts(source: Fields, config: ModelConfig, dense: Container[int] = ()) -> ModelConfig:
    """`config` with experts in place of the feed-forward networks of all layers but the `dense` ones, by number."""
    key = "num_local_experts" if source.data.get("num_experts") is None else "num_experts"
    count, size = source.integer(key, MOST_EXPERTS), source.integer("moe_intermediate_size", 1 << 22)
    used, renormalised = source.integer("num_experts_per_tok", count), source.flag("norm_topk_prob", False)

    def change(block: Block) -> Block:
        experts = Experts(replace(block.feed_forward, size=size), count, used, renormalised)
        return replace(block, feed_forward=FeedForward(0), experts=experts)

    made = {block: change(block) for block in set(config.blocks)}
    blocks = tuple(block if at in dense else made[block] for at, block in enumerate(config.blocks))
    return replace(config, blocks=blocks)
