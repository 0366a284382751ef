"""AFM (Arcee): Llama's form with relu squared and no gate."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, biases, decoder
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    source.choice("hidden_act", ("relu2",), default="relu2")
    config = decoder(
        source,
        "arcee",
        Defaults(max_positions=4096, eps=1e-5),
        attention=biases(source),
        feed_forward={"activation": "relu_squared", "gated": False, "bias": source.flag("mlp_bias", False)},
    )
    return without_windows(source, config)


FAMILIES = (Family("arcee", "AFM 4.5B", describe, frozenset(("hidden_act",))),)
