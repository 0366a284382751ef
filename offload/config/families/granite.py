"""Granite (IBM): Llama's form with four multipliers."""

from __future__ import annotations

from typing import Any

from offload.config.families.common import Defaults, Family, biases, decoder
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    return without_windows(source, described(source, "granite"))


def described(source: Fields, family: str, **others: Any) -> ModelConfig:
    """A model with Granite's multipliers. others: see `decoder`."""
    return decoder(
        source,
        family,
        Defaults(),
        attention=biases(source) | {"scale": source.number("attention_multiplier", default=1.0)},
        feed_forward={"bias": source.flag("mlp_bias", False)},
        block={"scale": source.number("residual_multiplier", default=1.0)},
        embedding_scale=source.number("embedding_multiplier", default=1.0),
        logits_scale=1 / source.number("logits_scaling", default=1.0),
        **others,
    )


READS = frozenset(("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"))
FAMILIES = (Family("granite", "Granite 3, 4.1 and 4.2, dense", describe, READS),)
