"""Mistral Small 4: latent attention whose queries grow with their position, and a mixture of experts beside one that
every row runs through. Checkpoints have the model_type `mistral3`, which wraps it (wrappers.py)."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, with_rope
from offload.config.families.experts import FACTOR, NORMED, READS, SIGMOIDS, read_experts, with_groups
from offload.config.families.glm4_moe import COUNTS, DENSE, HEADS, SHARED, with_head
from offload.config.families.latent import LATENT, latent_decoder
from offload.config.model import ModelConfig
from offload.config.rope import RopeDefaults
from offload.fields import Fields, whole

_GROWTH, _PARTIAL = "llama_4_scaling_beta", "partial_rotary_factor"
_ROPE = RopeDefaults(keys=frozenset((_GROWTH, "max_position_embeddings")))
_SETTINGS = {  # defaults
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, _GROWTH: 0.1,
}  # fmt: skip


def describe(source: Fields) -> ModelConfig:
    settings = source.data.get("rope_parameters") or source.data.get("rope_scaling") or _SETTINGS
    named = source.inner("rope_parameters", settings if isinstance(settings, dict) else {})
    whole_heads = {"rope_parameters": {**named.data, _PARTIAL: None}, "rope_scaling": None}
    config = latent_decoder(source.changed(whole_heads), "mistral4", Defaults(max_positions=1 << 20, rope=_ROPE))
    latent = config.block.attention.latent
    assert latent is not None
    share = latent.rotated / latent.query_dim
    if int(latent.query_dim * named.number(_PARTIAL, default=share, most=1.0)) != latent.rotated:
        named.refuse(_PARTIAL, f"{share:g}, the share of qk_rope_head_dim in a head")
    original = named.integer("original_max_position_embeddings", 1 << 30)
    grown = with_rope(config, growth=named.number(_GROWTH), original_max_positions=original)
    experts = read_experts(
        source, config, counts=COUNTS, renormalised=source.flag(NORMED, True),
        factor=source.number(FACTOR, default=1.0), rounded="shares",
    )  # fmt: skip
    alone = source.changed(dict.fromkeys(HEADS, 0))
    return with_head(alone, grown, with_groups(source, experts), dense=range(source.get(DENSE, whole(0), 0)))


FAMILIES = (
    Family(
        "mistral4",
        "Mistral Small 4; text of `mistral3`",
        describe,
        READS | SIGMOIDS | LATENT | {*COUNTS, SHARED, DENSE, *HEADS},
    ),
)
