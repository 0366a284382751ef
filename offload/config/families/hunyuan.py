"""Hunyuan (Tencent): queries and keys are normed after they are rotated; a stretched base. Dense, or experts beside a
network that every row runs through."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families.common import Defaults, Family, biases, decoder, epsilon, with_rope
from offload.config.families.experts import FACTOR, READS, read_experts, with_experts
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_ALPHA = "alpha"  # NTK scaling by a constant: the base times alpha^(D / (D - 2))
_DEFAULTS = Defaults(eps=1e-5, derives_head_dim=False, rope=RopeDefaults(keys=frozenset((_ALPHA,))))
_USED, _SIZE, _SHARED = "moe_topk", "moe_intermediate_size", "num_shared_expert"
_EXPERTS = ExpertNames(router="mlp.gate.wg", network="mlp.shared_mlp.")
_SWITCHES = ("use_qk_norm", "use_rotary_pos_emb")  # which transformers does not read: both are always on


def describe(source: Fields) -> ModelConfig:
    return _described(source, "hunyuan_v1_dense", _DEFAULTS)


def describe_moe(source: Fields) -> ModelConfig:
    """transformers gives experts and network `intermediate_size` inner rows, and reads neither list of sizes."""
    config = _described(source, "hunyuan_v1_moe", replace(_DEFAULTS, derives_head_dim=True))
    size = config.intermediate_size
    if source.data.get(FACTOR) and source.number(FACTOR) != 1:
        source.refuse(FACTOR, "absent or 1.0: transformers reads none")
    for key, wanted in ((_SIZE, size), (_SHARED, 1)):
        if source.data.get(key) is not None and _of_all_layers(source, key, config.num_layers) != wanted:
            source.refuse(key, f"{wanted} in all layers")
    used = _of_all_layers(source, _USED, config.num_layers)
    sized = source.changed({_SIZE: size, _USED: used})
    experts = read_experts(sized, config, used=_USED)
    names = replace(config.names, experts=_EXPERTS)
    return with_experts(replace(config, names=names), experts, beside=size)


def _of_all_layers(source: Fields, key: str, num_layers: int) -> int:
    """A number, or the one that a list has for each layer."""
    value = source.data.get(key)
    if not isinstance(value, list):
        return source.integer(key, 1 << 22)
    if len(value) != num_layers or len({*map(str, value)}) != 1 or not isinstance(value[0], int):
        source.refuse(key, f"a number, or a list of {num_layers} equal ones")
    return value[0]


def _described(source: Fields, family: str, defaults: Defaults) -> ModelConfig:
    for switch in _SWITCHES:
        if not source.flag(switch, True):
            source.refuse(switch, "absent or true")
    norm = Norm(epsilon(source, defaults))
    config = decoder(
        source,
        family,
        defaults,
        attention=biases(source) | {"qk_norm": norm, "weighs_rotated": True},
        names=TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    )
    return without_windows(source, _unscaled(_stretched(source, config)))


def _unscaled(config: ModelConfig) -> ModelConfig:
    """`config` without YaRN's factor on cos and sin: the norm after the rotation cancels it."""
    return with_rope(config, attention_factor=1.0) if config.rope.kind == "yarn" else config


def _stretched(source: Fields, config: ModelConfig) -> ModelConfig:
    """`config` with a stretched base: with an alpha, "dynamic" scaling does not depend on the length."""
    settings = source.data.get("rope_parameters") or source.data.get("rope_scaling") or {}
    named, dim = Fields(settings if isinstance(settings, dict) else {}, source.where), config.head_dim
    if config.rope.kind != "dynamic" or not named.data.get(_ALPHA):
        return config
    theta = config.rope.theta * named.number(_ALPHA) ** (dim / (dim - 2))
    return with_rope(config, kind="default", factor=1.0, theta=theta)


FAMILIES = (
    Family("hunyuan_v1_dense", "Hunyuan, dense", describe, frozenset(_SWITCHES)),
    Family(
        "hunyuan_v1_moe",
        "Hunyuan A13B: mixture of experts",
        describe_moe,
        READS | {*_SWITCHES, _USED, _SHARED, FACTOR, "use_mixed_mlp_moe"},
    ),
)
