"""Gemma 2 (Google): Gemma's norms before and after each part, capped scores and logits, windows in every other
layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from offload.config.families.common import Defaults, Family, biases, decoder, epsilon
from offload.config.families.windows import windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.norm import Norm
from offload.fields import Fields

NORM = partial(Norm, plus_one=True, fp32=True)
SANDWICH = TensorNames(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
_WINDOW, _SCALAR, _SCORES, _LOGITS = 4096, 256, 50.0, 30.0  # defaults
_CAPS = "attn_logit_softcapping", "final_logit_softcapping"


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(max_positions=8192, kv_heads=4, head_dim=256, derives_head_dim=False, tied=True)
    scores, logits = (_cap(source, key, default) for key, default in zip(_CAPS, (_SCORES, _LOGITS), strict=True))
    config = sandwiched(
        source, "gemma2", defaults, attention={"scale": score_scale(source), "cap": scores}, logits_cap=logits
    )
    window = source.data.get("sliding_window", _WINDOW)
    layers = windowed_layers(source, window, lambda: range(0, config.num_layers, 2))
    return with_windows(source, config, window, layers)


def sandwiched(
    source: Fields,
    family: str,
    defaults: Defaults,
    *,
    attention: Mapping[str, Any],
    norm: Callable[[float], Norm] = NORM,
    block: Mapping[str, Any] | None = None,
    **model: Any,
) -> ModelConfig:
    """A model with norms before and after each part. attention, block: further fields of these descriptions; the biases
    of attention are read here."""
    source.choice("hidden_activation", ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    if source.data.get("use_bidirectional_attention"):
        source.refuse("use_bidirectional_attention", "absent or false")
    after = norm(epsilon(source, defaults))
    return decoder(
        source,
        family,
        defaults,
        norm=norm,
        attention={**biases(source), **attention},
        feed_forward={"activation": "gelu_tanh"},
        block={"after_attention": after, "after_feed_forward": after, **(block or {})},
        embedding_scale=source.integer("hidden_size", 1 << 20) ** 0.5,
        rounds_embedding_scale=True,
        names=SANDWICH,
        **model,
    )


def score_scale(source: Fields) -> float:
    """The factor on products of queries and keys."""
    return 1 / math.sqrt(source.number("query_pre_attn_scalar", default=_SCALAR))


def _cap(source: Fields, key: str, default: float) -> float | None:
    """The cap under `key`; null means none."""
    return None if source.data.get(key, default) is None else source.number(key, default=default)


_READS = frozenset((*_CAPS, "query_pre_attn_scalar", "hidden_act", "sliding_window_size"))
FAMILIES = (Family("gemma2", "Gemma 2", describe, _READS),)
