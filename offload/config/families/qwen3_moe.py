"""Qwen3 mixtures of experts (Alibaba): Qwen3's attention, and a softmax router before feed-forward networks."""

from __future__ import annotations

from offload.config.block import Norm
from offload.config.families.common import Defaults, Family, biases, decoder, epsilon
from offload.config.families.experts import READS, read_experts, with_experts
from offload.config.model import ModelConfig
from offload.fields import Fields, list_of, whole


def describe(source: Fields) -> ModelConfig:
    if source.flag("use_sliding_window", False):
        source.refuse("use_sliding_window", "false in qwen3_moe")
    defaults = Defaults(max_positions=32768, kv_heads=4)
    norm = Norm(epsilon(source, defaults))
    config = decoder(source, "qwen3_moe", defaults, attention=biases(source) | {"qk_norm": norm})
    experts = read_experts(source, config, renormalised=source.flag("norm_topk_prob", False))
    return with_experts(config, experts, dense=dense_layers(source, config.num_layers))


def dense_layers(source: Fields, num_layers: int) -> frozenset[int]:
    """The layers without experts: those that `mlp_only_layers` names, and all but each `decoder_sparse_step`-th one."""
    step = source.integer("decoder_sparse_step", num_layers, default=1)
    named = source.data.get("mlp_only_layers") or []
    if not list_of(whole(0, num_layers - 1)).fits(named):
        source.refuse("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    return frozenset((*named, *(layer for layer in range(num_layers) if (layer + 1) % step)))


FAMILIES = (
    Family(
        "qwen3_moe",
        "Qwen 3 30B-A3B, 235B-A22B, Qwen3-Coder: mixtures of experts",
        describe,
        reads=READS | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"},
    ),
)
