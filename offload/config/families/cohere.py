"""Command R (Cohere): LayerNorm without bias, attention and feed-forward network side by side, scaled logits."""

from __future__ import annotations

from functools import partial

from offload.config.families.common import Defaults, Family, biases, decoder, without_windows
from offload.config.fields import Fields
from offload.config.model import ModelConfig, Norm
from offload.config.rope import RopeDefaults


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(
        max_positions=8192,
        eps=1e-5,
        norm_key="layer_norm_eps",
        tied=True,
        rope=RopeDefaults(theta=500000.0, neighbours=True),
    )
    config = decoder(
        source,
        "cohere",
        defaults,
        norm=partial(Norm, centred=True),
        attention=biases(source),
        block={"before_feed_forward": None, "side_by_side": True},
        logits_scale=source.number("logit_scale", default=0.0625),
    )
    return without_windows(source, config)


FAMILIES = (Family("cohere", "Command R", describe, frozenset(("logit_scale",)), "q/k norms (Command R+)"),)
