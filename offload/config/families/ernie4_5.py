"""ERNIE 4.5 (Baidu), its dense models: neighbouring numbers of a head are rotated together."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, biases, decoder
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.rope import RopeDefaults
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    return described(source, "ernie4_5", kv_heads=2, head_dim=128)


def described(source: Fields, family: str, *, kv_heads: int, head_dim: int | None) -> ModelConfig:
    """The model of a config, without experts. kv_heads, head_dim: defaults."""
    defaults = Defaults(
        max_positions=131072, kv_heads=kv_heads, head_dim=head_dim, floors_head_dim=True, eps=1e-5, tied=True,
        rope=RopeDefaults(theta=500000.0, neighbours=True),
    )  # fmt: skip
    config = decoder(
        source,
        family,
        defaults,
        attention=biases(source, "use_bias"),
        feed_forward={"bias": source.flag("use_bias", False)},
    )
    return without_windows(source, config)


FAMILIES = (Family("ernie4_5", "ERNIE 4.5, dense", describe),)
