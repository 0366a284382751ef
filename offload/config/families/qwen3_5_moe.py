"""Qwen3.5 and 3.6 (Alibaba), mixtures of experts: layers of Qwen3.5 with experts in place of the feed-forward network,
and beside them one that every row runs through, with a gate. The next-token head, whose layer has as many experts as
any other, is left alone."""

from __future__ import annotations

from dataclasses import replace

from offload.config.block import ExpertNames
from offload.config.families import qwen3_5
from offload.config.families.common import Family, sizes
from offload.config.families.experts import READS, read_experts, with_experts
from offload.config.model import ModelConfig
from offload.fields import Fields

_SHARED = "shared_expert_intermediate_size"


def describe(source: Fields) -> ModelConfig:
    beside = source.integer(_SHARED, 1 << 22)
    config = qwen3_5.described(Fields({**source.data, "intermediate_size": beside}, source.where), "qwen3_5_moe_text")
    names = replace(config.names, experts=ExpertNames(network="mlp.shared_expert."))
    experts = read_experts(source, config, gates_network=True)
    return with_experts(replace(config, names=names), experts, beside=beside)


_SIZES = sizes(248320, 2048, 512, 40, 16) | {
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, _SHARED: 512,
}  # fmt: skip
FAMILIES = (
    Family(
        "qwen3_5_moe_text",
        "Qwen 3.5 and 3.6 35B-A3B and larger: mixtures of experts; text of `qwen3_5_moe`",
        describe,
        qwen3_5.READS | READS | {_SHARED},
        sizes=_SIZES,
    ),
)
