"""Muse Glimmer (Meta): norms before and after each part, gated heads, capped logits; three layers of four have a
window, and only they have positions."""

from __future__ import annotations

from functools import partial

from offload.config.families.common import Defaults, Family, decoder, epsilon, sizes
from offload.config.families.gemma2 import NORM, SANDWICH
from offload.config.families.windows import windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.fields import Fields

_WINDOW, _PERIOD = 2048, 4  # defaults
_SCALE, _FACTOR, _CAP, _POST_EPS = "qk_scale_factor", "output_multiplier", "final_logit_softcapping", "post_norm_eps"
_THETAS = "layer_rope_theta"


def describe(source: Fields) -> ModelConfig:
    source.choice("hidden_activation", ("silu",), default="silu")
    if source.data.get("attention_bias"):
        source.refuse("attention_bias", "absent or false")
    defaults = Defaults(
        max_positions=131072, kv_heads=2, head_dim=128, derives_head_dim=False, eps=1e-5,
    )  # fmt: skip
    eps, head_dim = epsilon(source, defaults), source.integer("head_dim", 1 << 12, default=defaults.head_dim)
    before, after = NORM(eps), NORM(source.number(_POST_EPS, default=1e-8, most=1.0))
    config = decoder(
        source,
        "muse_glimmer_text",
        defaults,
        norm=partial(Norm, fp32=True),
        attention={
            "qk_norm": Norm(eps, weightless=True), "gate": True,
            "scale": source.number(_SCALE, default=3.87) / head_dim**0.5,
        },
        block={
            "before_attention": before, "after_attention": after, "before_feed_forward": before,
            "after_feed_forward": after,
        },
        without_positions=_without_positions(source),
        embedding_norm=Norm(eps, weightless=True),
        logits_scale=source.number(_FACTOR, default=0.19611613513818404),
        logits_cap=source.number(_CAP, default=20.0),
        names=SANDWICH,
    )  # fmt: skip
    window, last = source.data.get("sliding_window", _WINDOW), config.num_layers - 1
    layers = windowed_layers(source, window, lambda: [at for at in range(last) if (last - at) % _PERIOD])
    return with_windows(source, config, window, layers)


def _without_positions(source: Fields) -> list[int]:
    """The layers without positions: their base is 0. Other bases in the list are not read."""
    layers, bases = source.integer("num_hidden_layers", 1 << 12), source.data.get(_THETAS)
    if bases is None:
        return list(range(layers - 1, -1, -_PERIOD))
    if not isinstance(bases, list) or len(bases) < layers or not all(type(base) in (int, float) for base in bases):
        source.refuse(_THETAS, f"a list of numbers, one for each of {layers} layers")
    return [layer for layer in range(layers) if not bases[layer]]


_READS = frozenset((_SCALE, _FACTOR, _CAP, _POST_EPS, _THETAS))
_SIZES = sizes(202048, 6656, 19968, 52, 32)
FAMILIES = (Family("muse_glimmer_text", "text of `muse_glimmer`", describe, _READS, sizes=_SIZES),)
