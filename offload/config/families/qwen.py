"""Qwen2 (Alibaba): q/k/v biases. Qwen3: queries and keys are normed instead. Both also as the text of models that see
pictures, whose positions have sections."""

from __future__ import annotations

from functools import partial

from offload.config.families.common import Defaults, Family, biases, decoder, epsilon, sizes
from offload.config.families.windows import windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.config.rope import SECTION_KEYS, SECTIONED, RopeDefaults
from offload.fields import Fields

_WINDOW = 4096  # default
_QWEN2 = Defaults(max_positions=32768, kv_heads=32, floors_head_dim=True)
_QWEN2_VL = Defaults(
    max_positions=32768, kv_heads=8, eps=1e-5,
    rope=RopeDefaults(theta=1e6, keys=SECTION_KEYS, kinds=(SECTIONED,)),
)  # fmt: skip
_QWEN3 = Defaults(max_positions=32768, kv_heads=32, head_dim=128, derives_head_dim=False)
_QWEN3_VL = Defaults(
    max_positions=128000, kv_heads=32, head_dim=128, derives_head_dim=False,
    rope=RopeDefaults(theta=5e5, keys=SECTION_KEYS),
)  # fmt: skip


def describe_qwen2(source: Fields, family: str, defaults: Defaults, first_window: int) -> ModelConfig:
    """first_window: the default of `max_window_layers`."""
    return _with_windows(source, decoder(source, family, defaults, attention={"bias": True}), first_window)


def describe_qwen3(source: Fields) -> ModelConfig:
    return _with_windows(source, _qwen3(source, "qwen3", _QWEN3), 28)


def describe_qwen3_vl(source: Fields) -> ModelConfig:
    return _qwen3(source, "qwen3_vl_text", _QWEN3_VL)


def _qwen3(source: Fields, family: str, defaults: Defaults) -> ModelConfig:
    norm = Norm(epsilon(source, defaults))
    return decoder(source, family, defaults, attention=biases(source) | {"qk_norm": norm})


def _with_windows(source: Fields, config: ModelConfig, first_window: int) -> ModelConfig:
    """`config` with its window, which applies only under `use_sliding_window`, to the layers from `max_window_layers`
    on."""
    window = source.data.get("sliding_window", _WINDOW) if source.flag("use_sliding_window", False) else None
    first = source.data.get("max_window_layers", first_window)
    if type(first) is not int:
        source.refuse("max_window_layers", "an integer")
    layers = windowed_layers(source, window, lambda: range(max(first, 0), 0 if window is None else config.num_layers))
    return with_windows(source, config, window, layers)


def _qwen2_vl(family: str, wrapper: str) -> Family:
    describe = partial(describe_qwen2, family=family, defaults=_QWEN2_VL, first_window=80)
    return Family(family, f"text of `{wrapper}`", describe, sizes=sizes(152064, 8192, 29568, 80, 64))


FAMILIES = (
    Family(
        "qwen2",
        "Qwen 2 and 2.5, Qwen2.5-Coder, QwQ",
        partial(describe_qwen2, family="qwen2", defaults=_QWEN2, first_window=28),
        sizes=sizes(151936, 4096, 22016, 32, 32),
    ),
    Family("qwen3", "Qwen 3, dense", describe_qwen3),
    _qwen2_vl("qwen2_vl_text", "qwen2_vl"),
    _qwen2_vl("qwen2_5_vl_text", "qwen2_5_vl"),
    Family("qwen3_vl_text", "text of `qwen3_vl`", describe_qwen3_vl, sizes=sizes(151936, 4096, 22016, 32, 32)),
)
