"""Llama (Meta), whose form many other families share."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, biases, decoder, sizes
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    config = decoder(
        source,
        "llama",
        Defaults(),
        attention=biases(source),
        feed_forward={"bias": source.flag("mlp_bias", False)},
    )
    return without_windows(source, config)


_ABOUT = "Llama 1 to 3.3, Yarn-Llama-2, SmolLM2, TinyLlama, and what has their form"
FAMILIES = (Family("llama", _ABOUT, describe, sizes=sizes(32000, 4096, 11008, 32, 32)),)
