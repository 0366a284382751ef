"""Falcon-H1 (TII): in each layer a recurrent state (Mamba-2) beside attention, and multipliers, by which weights are
multiplied as they are read, as llama.cpp's converter has it."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families.common import Defaults, Family, decoder, epsilon
from offload.config.families.states import mamba_names, no_limits, read_mamba
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.norm import Norm
from offload.fields import NUMBER, Fields, list_of

_DEFAULTS = Defaults(max_positions=8192, kv_heads=8, eps=1e-5)
_IN, _OUT, _KEY = "attention_in_multiplier", "attention_out_multiplier", "key_multiplier"
_STATES_IN, _STATES_OUT, _STATES = "ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers"
_NETWORK, _EMBEDDING, _HEAD = "mlp_multipliers", "embedding_multiplier", "lm_head_multiplier"
_BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
_INNER, _HEADS, _HEAD_DIM = "mamba_d_ssm", "mamba_n_heads", "mamba_d_head"
_NORMED, _FIRST = "mamba_rms_norm", "mamba_norm_before_gate"
_NAMES = TensorNames(
    before_feed_forward="pre_ff_layernorm",
    final_norm="final_layernorm",
    dense="feed_forward.",
    recurrence=mamba_names("mamba."),
)


def describe(source: Fields) -> ModelConfig:
    for key in _BIASES:
        if source.flag(key, False):
            source.refuse(key, "absent or false: multipliers are not those of biases")
    no_limits(source)
    config = decoder(
        source, "falcon_h1", _DEFAULTS, names=_NAMES, embedding_scale=source.number(_EMBEDDING, default=1.0),
        logits_scale=source.number(_HEAD, default=1.0),
    )  # fmt: skip
    inner, heads = source.data.get(_INNER), source.integer(_HEADS, 1 << 12, default=128)
    width = source.integer("mamba_expand", 64, default=2) * config.hidden_size if inner is None else None
    width = source.integer(_INNER, 1 << 22, default=1024) if width is None else width
    named = source.changed({_HEAD_DIM: width // heads}) if source.data.get(_HEAD_DIM) in (None, "auto") else source
    norm = Norm(epsilon(source, _DEFAULTS), fp32=True) if source.flag(_NORMED, False) else None
    if norm is not None and source.flag(_FIRST, True):
        source.refuse(_FIRST, f"false where {_NORMED} is true: the gate comes before the norm")
    mamba = read_mamba(
        named, heads=(_HEADS, 128), head_dim=(_HEAD_DIM, 64), groups=("mamba_n_groups", 1),
        state=("mamba_d_state", 256), width=("mamba_d_conv", 4), taps_bias="mamba_conv_bias", norm=norm,
    )  # fmt: skip
    return config.mapped(lambda block: replace(block, beside=mamba, factors=_factors(source)))


def _factors(source: Fields) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The factors of the parts of each operator."""

    def several(key: str, count: int) -> list[float]:
        found = source.get(key, list_of(NUMBER, f"{count} numbers"), [1.0] * count)
        return list(found) if len(found) == count else source.refuse(key, f"{count} numbers")

    def one(key: str) -> float:
        return source.number(key, default=1.0)

    gates, values, keys, queries, times = (one(_STATES_IN) * each for each in several(_STATES, 5))
    gate, down = several(_NETWORK, 2)
    made = {
        "qkv": (one(_IN), one(_IN) * one(_KEY), one(_IN)),
        "o": (one(_OUT),),
        "states_in": (queries, keys, values, gates, times),
        "states_out": (one(_STATES_OUT),),
        "gate_up": (gate, 1.0),
        "down": (down,),
    }
    return tuple((name, each) for name, each in made.items() if {*each} != {1.0})


_READS = frozenset((
    *(_IN, _OUT, _KEY, _STATES_IN, _STATES_OUT, _STATES, _NETWORK, _EMBEDDING, _HEAD),
    "mlp_expansion_factor",
))  # fmt: skip
FAMILIES = (Family("falcon_h1", "Falcon-H1: states (Mamba-2) beside attention", describe, _READS),)
