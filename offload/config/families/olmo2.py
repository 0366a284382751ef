"""OLMo 2 (Ai2): norms after attention and feed-forward network, none before; q and k normed over all heads."""

from __future__ import annotations

from offload.config.families.common import (
    NAMES_AFTER,
    Defaults,
    Family,
    biases,
    decoder,
    epsilon,
    norms_after,
    without_windows,
)
from offload.config.fields import Fields
from offload.config.model import ModelConfig, Norm


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(eps=1e-5)
    norm = Norm(epsilon(source, defaults))
    config = decoder(
        source,
        "olmo2",
        defaults,
        attention=biases(source) | {"qk_norm": norm, "norms_whole": True},
        block=norms_after(norm),
        names=NAMES_AFTER,
    )
    return without_windows(source, config)


FAMILIES = (Family("olmo2", "OLMo 2", describe, refuses="several ranks"),)
