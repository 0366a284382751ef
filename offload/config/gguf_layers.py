"""The layers of a model in a GGUF file: the fields of their attention and their windows, from its metadata."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.windows import FULL, WINDOWED
from offload.config.gguf_fields import Metadata
from offload.config.gguf_header import Items
from offload.fields import whole

Fields = dict[str, object]
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
WINDOWS = frozenset((WINDOW, PATTERN))
SECTIONS = frozenset(("rope.dimension_sections", "n_deepstack_layers"))  # of pictures alone: a text needs neither
HEADS, KV_HEADS, INNER = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
LATENT_RANK = "attention.kv_lora_rank"


def attention_bias(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {"attention_bias": values.has("attn_q.bias")}


def heads_of(values: Metadata) -> list[int]:
    """The number of query heads of each layer."""
    count, kind = values.head_layers().start, whole(1, 1 << 14)
    if not isinstance(values.data.get(HEADS), Items):
        return [values.integer(HEADS)] * count
    found = [each for each in values.values(HEADS) if isinstance(each, int) and kind.fits(each)]
    return found if len(found) == count else values.refuse(HEADS, f"a number, or a list of {count}, one for each layer")


def layer_types(values: Metadata, common: Mapping[str, object], period: int, *, full_first: bool = False) -> list[str]:
    """The types of all layers: windowed as the file lists them, or else all but every `period`-th, which are the first
    of `period` layers if `full_first`, else the last; none without a window."""
    count, named = int(number(common, "num_hidden_layers")), values.data.get(PATTERN)
    if values.optional(WINDOW) is None:
        return [FULL] * count
    if isinstance(named, Items):
        windowed = [bool(each) for each in values.values(PATTERN)]
        if len(windowed) != count:
            values.refuse(PATTERN, f"a list of {count}, one for each layer")
    else:
        step = values.integer(PATTERN, default=period)
        windowed = [(layer + (not full_first)) % step != 0 for layer in range(count)]
    return [WINDOWED if each else FULL for each in windowed]


def number(common: Mapping[str, object], field: str) -> float:
    value = common[field]
    assert isinstance(value, (int, float))
    return value
