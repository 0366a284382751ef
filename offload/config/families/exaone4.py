"""EXAONE 4 (LG): OLMo 2's norms, q/k norms of each head. With windows, the layers without one have no positions."""

from __future__ import annotations

from offload.config.block import Norm
from offload.config.families.common import NAMES_AFTER, Defaults, Family, decoder, epsilon, norms_after
from offload.config.families.windows import PERIOD, all_but_every, others, windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.fields import Fields

_WINDOW, _PATTERN = 4096, 4  # defaults: every fourth layer has no window


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(kv_heads=32, eps=1e-5)
    norm, window = Norm(epsilon(source, defaults)), source.data.get("sliding_window", _WINDOW)
    layers = windowed_layers(source, window, lambda: [] if window is None else all_but_every(source, _PATTERN))
    config = decoder(
        source,
        "exaone4",
        defaults,
        attention={"qk_norm": norm},
        block=norms_after(norm),
        names=NAMES_AFTER,
        without_positions=[] if window is None else others(source, layers),
    )
    return with_windows(source, config, window, layers)


FAMILIES = (Family("exaone4", "EXAONE 4", describe, frozenset((PERIOD,))),)
