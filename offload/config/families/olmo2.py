"""OLMo 2 (Ai2): norms after attention and feed-forward network, none before; q and k normed over all heads."""

from __future__ import annotations

from offload.config.families.common import NAMES_AFTER, Defaults, Family, biases, decoder, epsilon, norms_after
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    return without_windows(source, described(source, "olmo2", Defaults(eps=1e-5)))


def described(source: Fields, family: str, defaults: Defaults) -> ModelConfig:
    """The model of a config, with identical layers."""
    norm = Norm(epsilon(source, defaults))
    return decoder(
        source,
        family,
        defaults,
        attention=biases(source) | {"qk_norm": norm, "norms_whole": True},
        block=norms_after(norm),
        names=NAMES_AFTER,
    )


FAMILIES = (Family("olmo2", "OLMo 2", describe),)
