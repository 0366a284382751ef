"""Qwen3 mixtures of experts (Alibaba): Qwen3's attention, and a softmax router before feed-forward networks. Also as
the text of models that see pictures, whose positions have sections."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families.common import Defaults, Family, biases, decoder, epsilon, sizes
from offload.config.families.experts import NORMED, READS, read_experts, with_experts
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames
from offload.config.norm import Norm
from offload.config.rope import SECTION_KEYS, RopeDefaults
from offload.fields import Fields, list_of, whole

_QWEN3 = Defaults(max_positions=32768, kv_heads=4)
_VL = Defaults(max_positions=128000, kv_heads=16, rope=RopeDefaults(theta=5e5, keys=SECTION_KEYS))
_OMNI = Defaults(max_positions=32768, kv_heads=4, rope=RopeDefaults(theta=1e6, keys=SECTION_KEYS))


def describe(source: Fields) -> ModelConfig:
    return _described(source, "qwen3_moe", _QWEN3, renormalised=source.flag(NORMED, False))


def describe_vl(source: Fields) -> ModelConfig:
    """Stacks of its experts are by inputs, and weights of those in use always add up to 1."""
    config = _described(source, "qwen3_vl_moe_text", _VL, renormalised=True)
    return replace(config, names=replace(config.names, experts=ExpertNames(by_inputs=True)))


def describe_omni(source: Fields) -> ModelConfig:
    return _described(source, "qwen3_omni_moe_text", _OMNI, renormalised=source.flag(NORMED, True))


def _described(source: Fields, family: str, defaults: Defaults, *, renormalised: bool) -> ModelConfig:
    if source.flag("use_sliding_window", False):
        source.refuse("use_sliding_window", f"false in {family}")
    norm = Norm(epsilon(source, defaults))
    config = decoder(source, family, defaults, attention=biases(source) | {"qk_norm": norm})
    experts = read_experts(source, config, renormalised=renormalised)
    return with_experts(config, experts, dense=dense_layers(source, config.num_layers))


def dense_layers(source: Fields, num_layers: int) -> frozenset[int]:
    """The layers without experts: those that `mlp_only_layers` names, and all but each `decoder_sparse_step`-th one."""
    step = source.integer("decoder_sparse_step", num_layers, default=1)
    named = source.data.get("mlp_only_layers") or []
    if not list_of(whole(0, num_layers - 1)).fits(named):
        source.refuse("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    return frozenset((*named, *(layer for layer in range(num_layers) if (layer + 1) % step)))


_READS = READS | {NORMED, "decoder_sparse_step", "mlp_only_layers"}
_VL_SIZES = sizes(151936, 2048, 5632, 24, 16) | {
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
}  # fmt: skip
_OMNI_SIZES = sizes(3584, 2048, 18944, 28, 28) | {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
FAMILIES = (
    Family("qwen3_moe", "Qwen 3 30B-A3B, 235B-A22B, Qwen3-Coder: mixtures of experts", describe, _READS),
    Family("qwen3_vl_moe_text", "text of `qwen3_vl_moe`", describe_vl, _READS, sizes=_VL_SIZES),
    Family("qwen3_omni_moe_text", "text of `qwen3_omni_moe`", describe_omni, _READS, sizes=_OMNI_SIZES),
)
