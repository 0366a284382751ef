"""Llama (Meta), whose form many others have."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, biases, decoder, without_windows
from offload.config.fields import Fields
from offload.config.model import ModelConfig


def describe(source: Fields) -> ModelConfig:
    config = decoder(
        source,
        "llama",
        Defaults(),
        attention=biases(source),
        feed_forward={"bias": source.flag("mlp_bias", False)},
    )
    return without_windows(source, config)


FAMILIES = (Family("llama", "Llama 1 to 3.3, Yarn-Llama-2, SmolLM2, TinyLlama, and what has their form", describe),)
