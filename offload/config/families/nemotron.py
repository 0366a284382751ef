"""Nemotron and Minitron (NVIDIA): LayerNorm by 1 + weight, relu squared without a gate, half of a head rotated."""

from __future__ import annotations

from functools import partial

from offload.config.families.common import Defaults, Family, biases, decoder
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    source.choice("hidden_act", ("relu2",), default="relu2")
    config = decoder(
        source,
        "nemotron",
        Defaults(
            max_positions=4096, eps=1e-5, norm_key="norm_eps", floors_head_dim=True, rope=RopeDefaults(partial=0.5)
        ),
        norm=partial(Norm, centred=True, plus_one=True, bias=True),
        attention=biases(source),
        feed_forward={"activation": "relu_squared", "gated": False, "bias": source.flag("mlp_bias", False)},
    )
    percent = source.data.get("rope_percent")  # of older checkpoints, read by other programs
    if percent is not None and config.head_dim * source.number("rope_percent") != (
        config.rope.rotated or config.head_dim
    ):
        source.refuse("rope_percent", "the same as partial_rotary_factor, 0.5 where that is absent")
    return without_windows(source, config)


FAMILIES = (
    Family(
        "nemotron",
        "Nemotron and Minitron",
        describe,
        frozenset(("partial_rotary_factor", "rope_percent", "hidden_act")),
    ),
)
