"""Command R (Cohere): LayerNorm without bias, attention and feed-forward network side by side, scaled logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from offload.config.families.common import Defaults, Family, biases, decoder, epsilon
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    return without_windows(source, described(source, "cohere"))


def described(source: Fields, family: str, *, without_positions: Sequence[int] = ()) -> ModelConfig:
    """The model of a config, without rotary positions in the layers `without_positions`."""
    defaults = Defaults(
        max_positions=8192,
        eps=1e-5,
        norm_key="layer_norm_eps",
        tied=True,
        rope=RopeDefaults(theta=500000.0, neighbours=True),
    )
    norm, has_norms = Norm(epsilon(source, defaults), centred=True), source.flag("use_qk_norm", False)
    return decoder(
        source,
        family,
        defaults,
        norm=partial(Norm, centred=True),
        attention=biases(source) | ({"qk_norm": norm, "weighs_heads": True} if has_norms else {}),
        block={"before_feed_forward": None, "side_by_side": True},
        logits_scale=source.number("logit_scale", default=0.0625),
        without_positions=without_positions,
    )


FAMILIES = (Family("cohere", "Command R and R+", describe, frozenset(("logit_scale", "use_qk_norm"))),)
