"""The fields of a model in a GGUF file whose layers have recurrent states."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.states import CONVOLVED, STATEFUL
from offload.config.families.windows import FULL
from offload.config.gguf_fields import Metadata
from offload.config.gguf_layers import KV_HEADS, Fields

_RECURRENT = "attention.recurrent_layers"
STATES = frozenset((
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size", _RECURRENT,
    "full_attention_interval", "rope.dimension_sections", "nextn_predict_layers",
))  # fmt: skip

CONVOLUTIONS = frozenset((KV_HEADS,))


def lfm2(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of LFM2. Layers without KV heads have a convolution."""
    kv_heads = values.values(KV_HEADS)
    attending = [each for each in kv_heads if each]
    if len(kv_heads) != values.integer("block_count") or len({*attending}) != 1:
        values.refuse(KV_HEADS, "a list of as many as layers, the same in all that attend, and 0 in the others")
    return {
        "num_key_value_heads": attending[0],
        "layer_types": [FULL if each else CONVOLVED for each in kv_heads],
        "conv_L_cache": values.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def qwen35(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Qwen3.5. The sections of its positions are of pictures: those of a text are all the same."""
    heads, inner = values.integer("ssm.time_step_rank"), values.integer("ssm.inner_size")
    if inner % heads:
        values.refuse("ssm.inner_size", f"a multiple of ssm.time_step_rank, {heads}")
    types = _stateful_types(values)
    return {
        "attention_bias": values.has("attn_q.bias", types.index(FULL) if FULL in types else 0),
        "layer_types": types,
        "linear_num_key_heads": values.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": values.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": values.integer("ssm.conv_kernel"),
        "mtp_num_hidden_layers": len(values.head_layers()),
        "mtp_use_dedicated_embeddings": values.head_has("embed_tokens") or values.head_has("shared_head_head"),
    }


def _stateful_types(values: Metadata) -> list[str]:
    """The types of all layers but the next-token head's: with a state as the file lists them, or else all but every
    n-th."""
    head = values.head_layers()
    if _RECURRENT in values.data:
        stateful = [bool(each) for each in values.values(_RECURRENT)]
        if len(stateful) != head.stop or any(stateful[head.start :]):
            values.refuse(_RECURRENT, f"a list of {head.stop}, one for each layer, and false for a next-token head's")
    else:
        step = values.integer("full_attention_interval", default=4)
        stateful = [(layer + 1) % step != 0 for layer in range(head.start)]
    return [STATEFUL if each else FULL for each in stateful[: head.start]]
