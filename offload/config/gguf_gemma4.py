"""The fields of Gemma 4 in GGUF files, dense and with experts, from their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.config.families.windows import FULL, WINDOWED
from offload.config.gguf_experts import EXPERTS, experts
from offload.config.gguf_fields import Metadata
from offload.config.gguf_header import Items
from offload.config.gguf_layers import INNER, KV_HEADS, PATTERN, WINDOW, WINDOWS, Fields, layer_types, number
from offload.config.gguf_rope import rotated_share
from offload.config.rope import PROPORTIONAL
from offload.fields import MOST_SIZE, whole

_COUNT, _CAP = "expert_count", "final_logit_softcapping"
_EVERY = 6  # layers, of which one has no window where a file lists none
_SHARED, _INPUT = "attention.shared_kv_layers", "embedding_length_per_layer_input"
GEMMA4 = EXPERTS | WINDOWS | {KV_HEADS, INNER, _CAP, _SHARED, _INPUT}


def gemma4(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Gemma 4. Layers without a window have heads and rotary positions of their own, and values that are the
    keys if the first of them has no projection of values."""
    window, types = values.integer(WINDOW), layer_types(values, common, _EVERY)
    if types[-1] != FULL:
        values.refuse(PATTERN, "false for the last layer")
    heads = _head_dims(values, int(number(common, "head_dim")))
    kv_heads = _kv_heads(values, types, int(number(common, "num_attention_heads")))
    mixture = {"enable_moe_block": True, **experts(values, used="top_k_experts")} if values.optional(_COUNT) else {}
    full = {"head_dim": heads[FULL], "num_key_value_heads": kv_heads[FULL]}
    shared = values.get(_SHARED, whole(0, len(types) - 1), 0)
    return {
        "hidden_size_per_layer_input": values.get(_INPUT, whole(0, MOST_SIZE), 0),
        "vocab_size_per_layer_input": common["vocab_size"],
        "num_kv_shared_layers": shared,
        **_inner_sizes(values, shared),
        "head_dim": heads[WINDOWED],
        "num_key_value_heads": kv_heads.get(WINDOWED, kv_heads[FULL]),
        "per_layer_config": {str(layer): full for layer, kind in enumerate(types) if kind == FULL},
        "attention_k_eq_v": not values.has("attn_v.weight", types.index(FULL)),
        "sliding_window": window,
        "layer_types": types,
        "rope_parameters": _ropes(values, common, heads[FULL]),
        _CAP: values.optional(_CAP),
        **mixture,
    }


def _inner_sizes(values: Metadata, shared: int) -> Fields:
    """The sizes of feed-forward networks: one for all layers, or in the `shared` last ones twice that of the others."""
    if not isinstance(values.data.get(INNER), Items):
        return {"intermediate_size": values.integer(INNER)}
    sizes = values.values(INNER)
    first, own = sizes[0], {*sizes[: len(sizes) - shared]}
    wide = {*sizes[len(sizes) - shared :]} == {2 * first} if isinstance(first, int) else False
    if {*sizes} != {first} and not (wide and own == {first}):
        values.refuse(INNER, f"the same in all layers, or twice that in the last {shared}, which share caches")
    return {"intermediate_size": first, "use_double_wide_mlp": wide}


def _head_dims(values: Metadata, full: int) -> dict[str, int]:
    """The sizes of heads by the type of their layer, which are rotated whole as far as metadata say."""
    windowed = values.integer("attention.key_length_swa", default=full)
    for key, size in (
        ("attention.value_length_swa", windowed), ("rope.dimension_count_swa", windowed), ("rope.dimension_count", full)
    ):  # fmt: skip
        if values.integer(key, default=size) != size:
            values.refuse(key, f"the size of these layers' heads, {size}")
    return {FULL: full, WINDOWED: windowed}


def _kv_heads(values: Metadata, types: Sequence[str], heads: int) -> dict[str, object]:
    """The number of KV heads by the type of their layer."""
    if not isinstance(values.data.get(KV_HEADS), Items):
        return dict.fromkeys(types, values.integer(KV_HEADS, default=heads))
    counts, found = values.values(KV_HEADS), dict[str, object]()
    if len(counts) != len(types):
        values.refuse(KV_HEADS, f"a number, or a list of {len(types)}, one for each layer")
    for kind, count in zip(types, counts, strict=True):
        if found.setdefault(kind, count) != count:
            values.refuse(KV_HEADS, "the same in all layers with a window, and in all others")
    return found


def _ropes(values: Metadata, common: Mapping[str, object], head_dim: int) -> Fields:
    """Rotary positions by the type of their layer. head_dim: of layers without a window."""
    rope = common["rope_parameters"]
    assert isinstance(rope, Mapping)
    if rope["rope_type"] != "default":
        values.refuse("rope.scaling.type", "absent or none: scaled positions of Gemma 4 are not implemented")
    theta, share = rope["rope_theta"], rotated_share(values, head_dim)
    local = values.number("rope.freq_base_swa", 10000.0)
    return {
        FULL: {"rope_type": PROPORTIONAL, "rope_theta": theta, "partial_rotary_factor": share},
        WINDOWED: {"rope_type": "default", "rope_theta": local},
    }
