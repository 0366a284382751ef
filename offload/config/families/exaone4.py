"""EXAONE 4 (LG): OLMo 2's norms, q/k norms of each head. With windows, the layers without one know no positions."""

from __future__ import annotations

from offload.config.families.common import (
    NAMES_AFTER,
    Defaults,
    Family,
    decoder,
    epsilon,
    layer_types,
    norms_after,
    refuse_window,
)
from offload.config.fields import Fields
from offload.config.model import ModelConfig, Norm

_WINDOW, _PATTERN = 4096, 4  # where a config says nothing: every fourth layer has no window


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(kv_heads=32, eps=1e-5)
    norm, window = Norm(epsilon(source, defaults)), source.data.get("sliding_window", _WINDOW)
    types = layer_types(source, window) or _types(source, windowed=window is not None)
    config = decoder(
        source,
        "exaone4",
        defaults,
        attention={"qk_norm": norm},
        block=norms_after(norm),
        names=NAMES_AFTER,
        without_positions=[] if window is None else [at for at, kind in enumerate(types) if kind == "full_attention"],
    )
    refuse_window(source, config, window, windowed="sliding_attention" in types)
    return config


def _types(source: Fields, *, windowed: bool) -> list[str]:
    """Of all layers, where the config does not name them."""
    pattern = source.integer("sliding_window_pattern", 1 << 12, default=_PATTERN) if windowed else 1
    layers = range(1, 1 + source.integer("num_hidden_layers", 1 << 12))
    return ["sliding_attention" if number % pattern else "full_attention" for number in layers]


_READS = frozenset(("sliding_window_pattern",))
FAMILIES = (Family("exaone4", "EXAONE 4 1.2B", describe, _READS, "windows (32B)"),)
