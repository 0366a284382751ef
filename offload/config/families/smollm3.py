"""SmolLM3 (Hugging Face): Llama's form, in which every fourth layer has no positions."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, biases, decoder
from offload.config.families.windows import windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_INTERVAL = 4


def describe(source: Fields) -> ModelConfig:
    layers = source.integer("num_hidden_layers", 1 << 12)
    config = decoder(
        source,
        "smollm3",
        Defaults(max_positions=32768, kv_heads=4, tied=True, rope=RopeDefaults(theta=2000000.0)),
        attention=biases(source),
        feed_forward={"bias": source.flag("mlp_bias", False)},
        without_positions=_without_positions(source, layers),
    )
    window = source.data.get("sliding_window") if source.flag("use_sliding_window", False) else None
    bare = [] if window is None else _without_positions(source, layers)
    return with_windows(source, config, window, windowed_layers(source, window, lambda: bare))


def _without_positions(source: Fields, layers: int) -> list[int]:
    """The layers without positions: `no_rope_layers` has 1 for a layer that rotates, and 0 for one that does not."""
    rotates = source.data.get("no_rope_layers")
    if rotates is None:
        interval = source.integer("no_rope_layer_interval", 1 << 12, default=_INTERVAL)
        return list(range(interval - 1, layers, interval))
    if not isinstance(rotates, list) or len(rotates) < layers or any(each not in (0, 1) for each in rotates):
        source.refuse("no_rope_layers", f"a list of 0 and 1, one for each of {layers} layers")
    return [layer for layer in range(layers) if not rotates[layer]]


FAMILIES = (Family("smollm3", "SmolLM3", describe, frozenset(("no_rope_layers", "no_rope_layer_interval"))),)
