"""LFM3 (Liquid AI): of four layers two have a gated short convolution, one a window and one attention to all tokens, of
which half of a head rotates; norms before and after each part, and a gate of each head."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families.common import Defaults, Family, decoder, epsilon
from offload.config.families.lfm2 import NAMES
from offload.config.families.states import CONVOLVED, layer_kinds, read_short_convolution, with_states
from offload.config.families.windows import FULL, WINDOWED, rope_of_type, with_windows
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.config.rope import PROPORTIONAL, RopeDefaults, read_rope
from offload.fields import Fields

_DEFAULTS = Defaults(
    max_positions=128000, kv_heads=4, head_dim=128, eps=1e-5, norm_key="norm_eps", tied=True,
    rope=RopeDefaults(theta=1000000.0, kinds=(PROPORTIONAL,)),
)  # fmt: skip
_WINDOW = 256
_SANDWICH, _GATE = "use_sandwich_norm", "use_attention_gate"
_ROPES = {
    FULL: {"rope_type": PROPORTIONAL, "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    WINDOWED: {"rope_type": "default", "rope_theta": 10000.0},
}
_NAMES = replace(NAMES, after_attention="post_operator_norm", after_feed_forward="post_ffn_norm")


def describe(source: Fields) -> ModelConfig:
    if source.data.get("rope_parameters") is None:
        source = source.changed({"rope_parameters": _ROPES})
    norm, gated, bias = Norm(epsilon(source, _DEFAULTS)), source.flag(_GATE, True), source.flag("attention_bias", False)
    if gated and bias:
        source.refuse("attention_bias", f"absent or false with {_GATE}: the gates of heads have no biases")
    after = norm if source.flag(_SANDWICH, True) else None
    full, windowed = (rope_of_type(source, kind) for kind in (FULL, WINDOWED))
    config = decoder(
        full, "lfm3", _DEFAULTS,
        attention={"qk_norm": norm, "bias": bias, "out_bias": bias, "gate": gated, "gates_heads": gated},
        block={"after_attention": after, "after_feed_forward": after}, names=_NAMES,
    )  # fmt: skip
    kinds = layer_kinds(source, (FULL, WINDOWED, CONVOLVED), _unnamed)
    of_kind = {kind: [at for at, each in enumerate(kinds) if each == kind] for kind in (WINDOWED, CONVOLVED)}
    rope = read_rope(windowed, max_positions=config.max_positions, head_dim=config.head_dim)
    window = source.data.get("sliding_window", _WINDOW)
    config = with_windows(source, config, window, of_kind[WINDOWED], rope=rope)
    return with_states(config, read_short_convolution(source, width=7), of_kind[CONVOLVED])


def _unnamed(layer: int) -> str:
    """The kind of a layer where the config lists none."""
    if layer % 4 == 2:
        return FULL
    return WINDOWED if layer % 4 == 0 and layer > 0 else CONVOLVED


FAMILIES = (Family("lfm3", "LFM3 1.7B, as a folder", describe),)
