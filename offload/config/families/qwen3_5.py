"""Qwen3.5, 3.6 and 3.8 (Alibaba), dense: three layers of four have a recurrent state (gated delta rule), the others
gated attention of which a quarter of each head rotates."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families.common import Defaults, Family, biases, decoder, epsilon, sizes
from offload.config.families.gemma2 import NORM
from offload.config.families.states import read_delta_rule, stateful_layers, with_states
from offload.config.model import ModelConfig
from offload.config.names import RecurrenceNames, TensorNames
from offload.config.norm import Norm
from offload.config.rope import SECTION_KEYS, RopeDefaults
from offload.fields import Fields, whole

_PERIOD = 4  # default: every so many layers one attends
_GATE, _HEADS = "attn_output_gate", "mtp_num_hidden_layers"
_DEFAULTS = Defaults(
    kv_heads=4, head_dim=256, derives_head_dim=False, max_positions=32768,
    rope=RopeDefaults(partial=0.25, keys=SECTION_KEYS),
)  # fmt: skip


def describe(source: Fields) -> ModelConfig:
    return with_next_token(source, described(source, "qwen3_5_text"))


def described(
    source: Fields, family: str, defaults: Defaults = _DEFAULTS, states: RecurrenceNames = TensorNames.recurrence
) -> ModelConfig:
    """The model of a config without its next-token head. states: the tensor names of its states."""
    if not source.flag(_GATE, True):
        source.refuse(_GATE, "absent or true")
    eps = epsilon(source, defaults)
    norm = NORM(eps)
    config = decoder(
        source, family, defaults, norm=NORM, attention=biases(source) | {"qk_norm": norm, "gate": True},
        names=TensorNames(gate=TensorNames().queries, recurrence=states),
    )  # fmt: skip
    delta = read_delta_rule(source, key_heads=16, heads=32, key_dim=128, value_dim=128, norm=Norm(eps, fp32=True))
    return with_states(config, delta, stateful_layers(source, "full_attention_interval", _PERIOD))


def with_next_token(source: Fields, config: ModelConfig, key: str = _HEADS, default: int = 0) -> ModelConfig:
    """`config` with its next-token head, whose layer is one that attends. Without one where there is none, or where it
    needs a table of embeddings of its own. key: the field of its number of layers."""
    own_table = source.flag("mtp_use_dedicated_embeddings", False)
    layers = source.get(key, whole(0, 64), default)
    attends = config.blocks[config.attending[0]]
    return replace(config, next_token=attends if layers == 1 and not own_table else None)


READS = frozenset(("partial_rotary_factor", _GATE))
_SIZES = sizes(248320, 4096, 12288, 32, 16)
FAMILIES = (Family("qwen3_5_text", "Qwen 3.5 to 3.8, dense; text of `qwen3_5`", describe, READS, sizes=_SIZES),)
