"""Qwen1.5 and Qwen2 mixtures of experts (Alibaba): Qwen2's attention, a softmax router, and beside the experts one that
every row runs through, with a gate."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder
from offload.config.families.experts import NORMED, READS, read_experts, with_experts
from offload.config.families.qwen3_moe import dense_layers
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.fields import Fields

_SHARED = "shared_expert_intermediate_size"
_NAMES = TensorNames(experts=ExpertNames(network="mlp.shared_expert."))


def describe(source: Fields) -> ModelConfig:
    if source.flag("use_sliding_window", False):
        source.refuse("use_sliding_window", "false in qwen2_moe")
    defaults, attention = Defaults(max_positions=32768, kv_heads=16), {"bias": source.flag("qkv_bias", True)}
    unlimited = source.changed({"sliding_window": None})
    config = without_windows(unlimited, decoder(source, "qwen2_moe", defaults, attention=attention, names=_NAMES))
    experts = read_experts(source, config, renormalised=source.flag(NORMED, False), gates_network=True)
    beside = source.integer(_SHARED, 1 << 22)
    return with_experts(config, experts, beside=beside, dense=dense_layers(source, config.num_layers))


FAMILIES = (
    Family(
        "qwen2_moe",
        "Qwen 1.5 MoE A2.7B, Qwen 2 57B-A14B: mixtures of experts",
        describe,
        READS | {NORMED, _SHARED, "qkv_bias", "decoder_sparse_step", "mlp_only_layers"},
    ),
)
