"""EXAONE 4 (LG): OLMo 2's norms, q/k norms of each head. With windows, the layers without one have no positions."""

from __future__ import annotations

from typing import Any

from offload.config.families.common import NAMES_AFTER, Defaults, Family, decoder, epsilon, norms_after
from offload.config.families.windows import PERIOD, all_but_every, windowed_layers, with_windows
from offload.config.families.windows import others as beyond
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.fields import Fields

_WINDOW, _PATTERN = 4096, 4  # defaults: every fourth layer has no window


_DEFAULTS = Defaults(kv_heads=32, eps=1e-5)


def describe(source: Fields) -> ModelConfig:
    return described(source, "exaone4", block=norms_after(Norm(epsilon(source, _DEFAULTS))), names=NAMES_AFTER)


def described(source: Fields, family: str, **others: Any) -> ModelConfig:
    """The model of a config, without experts. others: arguments of `decoder`."""
    window = source.data.get("sliding_window", _WINDOW)
    layers = windowed_layers(source, window, lambda: [] if window is None else all_but_every(source, _PATTERN))
    config = decoder(
        source,
        family,
        _DEFAULTS,
        attention={"qk_norm": Norm(epsilon(source, _DEFAULTS))},
        without_positions=[] if window is None else beyond(source, layers),
        **others,
    )
    return with_windows(source, config, window, layers)


FAMILIES = (Family("exaone4", "EXAONE 4", describe, frozenset((PERIOD,))),)
