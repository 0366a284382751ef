"""The layers of a model in a GGUF file: the fields of their attention and their windows, from its metadata."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.windows import FULL, WINDOWED
from offload.config.gguf_fields import Metadata
from offload.config.gguf_header import Items

Fields = dict[str, object]
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
WINDOWS = frozenset((WINDOW, PATTERN))
SECTIONS = frozenset(("rope.dimension_sections", "n_deepstack_layers"))  # of pictures alone: a text needs neither
KV_HEADS, INNER, LATENT_RANK = "attention.head_count_kv", "feed_forward_length", "attention.kv_lora_rank"


def attention_bias(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {"attention_bias": values.has("attn_q.bias")}


def layer_types(values: Metadata, common: Mapping[str, object], period: int) -> list[str]:
    """The types of all layers: windowed as the file lists them, or else all but every `period`-th; none without a
    window."""
    count, named = int(number(common, "num_hidden_layers")), values.data.get(PATTERN)
    if values.optional(WINDOW) is None:
        return [FULL] * count
    if isinstance(named, Items):
        windowed = [bool(each) for each in values.values(PATTERN)]
        if len(windowed) != count:
            values.refuse(PATTERN, f"a list of {count}, one for each layer")
    else:
        step = values.integer(PATTERN, default=period)
        windowed = [(layer + 1) % step != 0 for layer in range(count)]
    return [WINDOWED if each else FULL for each in windowed]


def number(common: Mapping[str, object], field: str) -> float:
    value = common[field]
    assert isinstance(value, (int, float))
    return value
