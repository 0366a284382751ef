"""Qwen2 (Alibaba): q/k/v biases. Qwen3: queries and keys are normed instead."""

from __future__ import annotations

from offload.config.block import Norm
from offload.config.families.common import Defaults, Family, biases, decoder, epsilon, sizes
from offload.config.families.windows import windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.fields import Fields

_WINDOW, _FIRST_WINDOW_LAYER = 4096, 28  # defaults


def describe_qwen2(source: Fields) -> ModelConfig:
    defaults = Defaults(max_positions=32768, kv_heads=32, floors_head_dim=True)
    return _with_windows(source, decoder(source, "qwen2", defaults, attention={"bias": True}))


def describe_qwen3(source: Fields) -> ModelConfig:
    defaults = Defaults(max_positions=32768, kv_heads=32, head_dim=128, derives_head_dim=False)
    norm = Norm(epsilon(source, defaults))
    config = decoder(source, "qwen3", defaults, attention=biases(source) | {"qk_norm": norm})
    return _with_windows(source, config)


def _with_windows(source: Fields, config: ModelConfig) -> ModelConfig:
    """`config` with its window, which applies only under `use_sliding_window`, to the layers from `max_window_layers`
    on."""
    window = source.data.get("sliding_window", _WINDOW) if source.flag("use_sliding_window", False) else None
    first = source.data.get("max_window_layers", _FIRST_WINDOW_LAYER)
    if type(first) is not int:
        source.refuse("max_window_layers", "an integer")
    layers = windowed_layers(source, window, lambda: range(max(first, 0), 0 if window is None else config.num_layers))
    return with_windows(source, config, window, layers)


FAMILIES = (
    Family("qwen2", "Qwen 2 and 2.5, Qwen2.5-Coder, QwQ", describe_qwen2, sizes=sizes(151936, 4096, 22016, 32, 32)),
    Family("qwen3", "Qwen 3, dense", describe_qwen3),
)
