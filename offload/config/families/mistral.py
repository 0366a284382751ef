"""Mistral: Llama's form without biases."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder, sizes
from offload.config.families.windows import with_one_window
from offload.config.model import ModelConfig
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(max_positions=131072, kv_heads=8, floors_head_dim=True)
    return with_one_window(source, decoder(source, "mistral", defaults), default=4096)


_ABOUT = "Mistral 7B, Mistral Nemo, Mistral Small, Codestral"
FAMILIES = (Family("mistral", _ABOUT, describe, sizes=sizes(32000, 4096, 14336, 32, 32)),)
