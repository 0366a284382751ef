"""Command R7B and Command A (Cohere): Command R, with a window in three layers of four; only those layers have
positions."""

from __future__ import annotations

from offload.config.families import cohere
from offload.config.families.common import Family
from offload.config.families.windows import PERIOD, all_but_every, others, windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.fields import Fields

_WINDOW, _PATTERN = 4096, 4  # defaults


def describe(source: Fields) -> ModelConfig:
    window = source.data.get("sliding_window", _WINDOW)
    layers = windowed_layers(source, window, lambda: all_but_every(source, _PATTERN))
    own = Fields({name: value for name, value in source.data.items() if name != "head_dim"}, source.where)  # not read
    config = cohere.described(own, "cohere2", without_positions=others(source, layers))
    return with_windows(source, config, window, layers)


FAMILIES = (Family("cohere2", "Command R7B, Command A", describe, frozenset(("logit_scale", PERIOD))),)
