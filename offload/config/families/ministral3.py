"""Ministral 3 and Devstral 2 (Mistral AI): queries grow with their position. Checkpoints have the model_type
`mistral3`, which wraps it (wrappers.py)."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder, with_rope
from offload.config.families.windows import with_one_window
from offload.config.model import ModelConfig
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_GROWTH = "llama_4_scaling_beta"
_ROPE = RopeDefaults(keys=frozenset((_GROWTH, "max_position_embeddings")))
_SETTINGS = {  # defaults
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0, "mscale": 1.0, _GROWTH: 0.1,
}  # fmt: skip


def describe(source: Fields) -> ModelConfig:
    settings = source.data.get("rope_parameters") or source.data.get("rope_scaling") or _SETTINGS
    if settings is _SETTINGS:
        source = source.changed({"rope_parameters": _SETTINGS})
    defaults = Defaults(max_positions=262144, kv_heads=8, head_dim=128, floors_head_dim=True, eps=1e-5, rope=_ROPE)
    config = decoder(source, "ministral3", defaults)
    named = source.inner("rope_parameters", settings if isinstance(settings, dict) else {})
    original = named.integer("original_max_position_embeddings", 1 << 30)
    grown = with_rope(config, growth=named.number(_GROWTH), original_max_positions=original)
    return with_one_window(source, grown)


FAMILIES = (Family("ministral3", "Ministral 3, Devstral 2; text of `mistral3`", describe),)
