"""Qwen3.5, 3.6 and 3.8 (Alibaba), mixtures of experts: Qwen3.5's layers with experts in place of the feed-forward
network, and beside them one that every row runs through, with a gate. So has the layer of the next-token head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload.config.families import qwen3_5
from offload.config.families.common import Family, sizes
from offload.config.families.experts import READS as _MIXTURE
from offload.config.families.experts import read_experts, with_experts
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames
from offload.fields import Fields

_SHARED, _DENSE, _STEP = "shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step"


def describe(source: Fields) -> ModelConfig:
    return qwen3_5.with_next_token(source, described(source, "qwen3_5_moe_text"))


def described(source: Fields, family: str, *, renormalised: bool = True, **others: Any) -> ModelConfig:
    """The model of a config without its next-token head. others: of `qwen3_5.described`."""
    if source.data.get(_DENSE):
        source.refuse(_DENSE, "absent or empty: every layer has experts")
    source.integer(_STEP, 1, default=1)
    beside = source.integer(_SHARED, 1 << 22)
    sized = source.changed({"intermediate_size": beside})
    config = qwen3_5.described(sized, family, **others)
    names = replace(config.names, experts=ExpertNames(network="mlp.shared_expert."))
    experts = read_experts(source, config, gates_network=True, renormalised=renormalised)
    return with_experts(replace(config, names=names), experts, beside=beside)


READS = qwen3_5.READS | _MIXTURE | {_SHARED, _STEP}
_SIZES = sizes(248320, 2048, 512, 40, 16) | {
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, _SHARED: 512,
}  # fmt: skip
FAMILIES = (
    Family(
        "qwen3_5_moe_text",
        "Qwen 3.5 to 3.8, mixtures of experts (35B-A3B, ...); text of `qwen3_5_moe`",
        describe,
        READS,
        sizes=_SIZES,
    ),
)
