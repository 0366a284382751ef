"""Qwen3-Next and Qwen3-Coder-Next (Alibaba): the layers of Qwen3.5's mixtures of experts, whose projections of states
are in two tensors, with the rows of each key head together."""

from __future__ import annotations

from offload.config.families import qwen3_5, qwen3_5_moe
from offload.config.families.common import Defaults, Family
from offload.config.families.experts import NORMED
from offload.config.model import ModelConfig
from offload.config.names import RecurrenceNames
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_DEFAULTS = Defaults(
    kv_heads=2, head_dim=256, derives_head_dim=False, max_positions=32768, rope=RopeDefaults(partial=0.25)
)
_QKVZ, _BA = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
_STATES = RecurrenceNames(parts=(*(_QKVZ,) * 4, *(_BA,) * 2), grouped=(_QKVZ, _BA))
_HEADS = "num_nextn_predict_layers"


def describe(source: Fields) -> ModelConfig:
    """A config does not say whether there is a next-token head, unless it has the field of its layers: the tensors
    do."""
    renormalised = source.flag(NORMED, True)
    config = qwen3_5_moe.described(source, "qwen3_next", defaults=_DEFAULTS, states=_STATES, renormalised=renormalised)
    return qwen3_5.with_next_token(source, config, _HEADS, 1)


FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3-Next 80B-A3B, Qwen3-Coder-Next: mixtures of experts",
        describe,
        qwen3_5_moe.READS | {NORMED},
    ),
)
