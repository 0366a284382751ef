"""Gemma 3 (Google): Gemma's norms before and after each part and of queries and keys; five layers of six have a window
and positions of their own."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, epsilon, sizes, with_rope
from offload.config.families.gemma2 import NORM, sandwiched, score_scale
from offload.config.families.windows import (
    FULL,
    PERIOD,
    WINDOWED,
    all_but_every,
    rope_of_type,
    windowed_layers,
    with_windows,
)
from offload.config.model import ModelConfig
from offload.config.rope import RopeDefaults, read_rope
from offload.fields import Fields

_LOCAL, _LOCAL_BASE = RopeDefaults(theta=10000.0), "rope_local_base_freq"
_WINDOW, _PATTERN = 4096, 6  # defaults


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(
        max_positions=131072, kv_heads=4, head_dim=256, derives_head_dim=False, tied=True,
        rope=RopeDefaults(theta=1000000.0),
    )  # fmt: skip
    full = rope_of_type(source, FULL, "rope_theta")
    norm = NORM(epsilon(source, defaults))
    config = sandwiched(full, "gemma3_text", defaults, attention={"qk_norm": norm, "scale": score_scale(source)})
    if config.rope.kind == "linear":  # max_position_embeddings is the stretched length
        config = with_rope(config, original_max_positions=max(int(config.max_positions / config.rope.factor), 1))
    own = rope_of_type(source, WINDOWED, _LOCAL_BASE)
    rope = read_rope(own, max_positions=config.max_positions, head_dim=config.head_dim, defaults=_LOCAL)
    window = source.data.get("sliding_window", _WINDOW)
    layers = windowed_layers(source, window, lambda: all_but_every(source, _PATTERN))
    return with_windows(source, config, window, layers, rope=rope)


_READS = frozenset((PERIOD, f"_{PERIOD}", _LOCAL_BASE, "query_pre_attn_scalar", "hidden_act"))
FAMILIES = (
    Family("gemma3_text", "Gemma 3; text of `gemma3`", describe, _READS, sizes=sizes(262208, 2304, 9216, 26, 8)),
)
