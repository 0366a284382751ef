"""OLMo Hybrid (Ai2): three layers of four have a recurrent state (gated delta rule) and norms before their parts, the
others are OLMo 2's, mostly without positions."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families.common import NAMES_AFTER, Defaults, Family, biases, decoder, epsilon, norms_after
from offload.config.families.states import read_delta_rule, stateful_layers, with_states
from offload.config.model import ModelConfig
from offload.config.names import RecurrenceNames
from offload.config.norm import Norm
from offload.fields import Fields

_PERIOD = 4  # every so many layers one attends
_NEGATIVE = "linear_allow_neg_eigval"  # steps up to 2
_LAYER = "linear_attn."
_STATES = RecurrenceNames(
    parts=tuple(f"{_LAYER}{letter}_proj" for letter in "qkvgba"),
    taps=tuple(f"{_LAYER}{letter}_conv1d" for letter in "qkv"),
    out=f"{_LAYER}o_proj",
    norm=f"{_LAYER}o_norm",
)
_NAMES = replace(
    NAMES_AFTER,
    before_attention="attention_layer_norm",
    before_feed_forward="feedforward_layer_norm",
    recurrence=_STATES,
)


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(max_positions=65536)
    norm, rope = Norm(epsilon(source, defaults)), source.data.get("rope_parameters") or {}
    has_positions = isinstance(rope, dict) and rope.get("rope_theta") is not None
    without = () if has_positions else range(source.integer("num_hidden_layers", 1 << 12))
    bare = source if has_positions else source.changed({"rope_parameters": None})
    config = decoder(
        bare, "olmo_hybrid", defaults, attention=biases(source) | {"qk_norm": norm, "norms_whole": True},
        block=norms_after(norm), names=_NAMES, without_positions=without,
    )  # fmt: skip
    key_dim = source.integer("linear_key_head_dim", 1 << 12, default=int(0.75 * config.hidden_size / config.num_heads))
    delta = read_delta_rule(
        source, key_heads=config.num_heads, heads=config.num_heads, key_dim=key_dim, value_dim=2 * key_dim,
        norm=Norm(1e-5, fp32=True), steps=2.0 if source.flag(_NEGATIVE, True) else 1.0,
    )  # fmt: skip
    before = {"before_attention": norm, "after_attention": None, "before_feed_forward": norm}
    layers = stateful_layers(source, "full_attention_interval", _PERIOD)
    return with_states(config, delta, layers, **before, after_feed_forward=None)


FAMILIES = (Family("olmo_hybrid", "OLMo Hybrid", describe),)
