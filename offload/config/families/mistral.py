"""Mistral: Llama's form without biases."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder, without_windows
from offload.config.fields import Fields
from offload.config.model import ModelConfig


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(max_positions=131072, kv_heads=8, floors_head_dim=True)
    return without_windows(source, decoder(source, "mistral", defaults), default=4096)


FAMILIES = (Family("mistral", "Mistral 7B, Mistral Nemo, Mistral Small, Codestral", describe),)
