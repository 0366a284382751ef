"""OLMo 3 (Ai2): OLMo 2 with a window in three layers of four, and YaRN in the fourth only."""

from __future__ import annotations

from offload.config.families import olmo2
from offload.config.families.common import Defaults, Family
from offload.config.families.windows import FULL, WINDOWED, all_but_every, rope_of_type, windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.rope import RopeDefaults, read_rope
from offload.fields import Fields

_ROPE = RopeDefaults(theta=500000.0)
_WINDOW, _PATTERN = 4096, 4  # defaults


def describe(source: Fields) -> ModelConfig:
    config = olmo2.described(rope_of_type(source, FULL, "rope_theta"), "olmo3", Defaults(eps=1e-5, rope=_ROPE))
    own = rope_of_type(source, WINDOWED)
    rope = read_rope(own, max_positions=config.max_positions, head_dim=config.head_dim, defaults=_ROPE)
    window = source.data.get("sliding_window", _WINDOW)
    layers = windowed_layers(source, window, lambda: all_but_every(source, _PATTERN))
    return with_windows(source, config, window, layers, rope=rope)


FAMILIES = (Family("olmo3", "OLMo 3", describe),)
