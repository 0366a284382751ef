"""Hunyuan (Tencent), its dense models: queries and keys are normed after they are rotated; a stretched base."""

from __future__ import annotations

from offload.config.block import Norm
from offload.config.families.common import Defaults, Family, biases, decoder, epsilon, with_rope
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_ALPHA = "alpha"  # NTK scaling by a constant: the base times alpha^(D / (D - 2))
_DEFAULTS = Defaults(eps=1e-5, derives_head_dim=False, rope=RopeDefaults(keys=frozenset((_ALPHA,))))
_SWITCHES = ("use_qk_norm", "use_rotary_pos_emb")  # which transformers does not read: both are always on


def describe(source: Fields) -> ModelConfig:
    for switch in _SWITCHES:
        if not source.flag(switch, True):
            source.refuse(switch, "absent or true")
    norm = Norm(epsilon(source, _DEFAULTS))
    config = decoder(
        source,
        "hunyuan_v1_dense",
        _DEFAULTS,
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


FAMILIES = (Family("hunyuan_v1_dense", "Hunyuan, dense", describe, frozenset(_SWITCHES)),)
