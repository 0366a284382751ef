"""Seed-OSS (ByteDance): Llama's form, its biases by two flags."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    config = decoder(
        source,
        "seed_oss",
        Defaults(max_positions=524288, kv_heads=8, head_dim=128, floors_head_dim=True),
        attention={
            "bias": source.flag("attention_bias", True),
            "out_bias": source.flag("attention_out_bias", False),
        },
        feed_forward={"bias": source.flag("mlp_bias", False)},
    )
    return without_windows(source, config)


FAMILIES = (Family("seed_oss", "Seed-OSS", describe),)
