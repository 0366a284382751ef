"""Gemma (Google), the first: norms by 1 + weight in fp32, embeddings times the root of their size, GELU."""

from __future__ import annotations

from functools import partial

from offload.config.families.common import Defaults, Family, biases, decoder
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    source.choice("hidden_act", ("gelu", "gelu_pytorch_tanh"), default="gelu_pytorch_tanh")  # both are the latter
    if source.data.get("use_bidirectional_attention"):
        source.refuse("use_bidirectional_attention", "absent or false")
    config = decoder(
        source,
        "gemma",
        Defaults(max_positions=8192, kv_heads=16, head_dim=256, derives_head_dim=False, tied=True),
        norm=partial(Norm, plus_one=True, fp32=True),
        attention=biases(source),
        feed_forward={"activation": "gelu_tanh"},
        embedding_scale=source.integer("hidden_size", 1 << 20) ** 0.5,
        rounds_embedding_scale=True,
    )
    return without_windows(source, config)


FAMILIES = (Family("gemma", "Gemma 1, CodeGemma", describe, frozenset(("hidden_act",))),)
