"""Gemma 4 (Google): norms before and after each part and of queries, keys and values, a factor on each layer's rows;
five layers of six have a window, the others larger heads whose values may be the keys. Sparse models have experts
beside the feed-forward network, with norms of their own, and a router with its own norm. In small models the last
layers share keys and values of earlier ones, and each layer has an input from a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offload.config.block import Block
from offload.config.families.common import Defaults, Family, epsilon, sizes
from offload.config.families.experts import read_experts, with_experts
from offload.config.families.gemma2 import SANDWICH, sandwiched
from offload.config.families.windows import FULL, WINDOWED, others, rope_of_type, windowed_layers
from offload.config.layer_table import LayerTable
from offload.config.mixers import Attention
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames
from offload.config.norm import Norm
from offload.config.rope import PROPORTIONAL, RopeDefaults, read_rope
from offload.fields import Fields

_PERIOD, _HEAD_DIM = 6, 512  # defaults; head_dim in layers without a window
_ROPES = {
    WINDOWED: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_CAP, _SAME, _HEADS = "final_logit_softcapping", "attention_k_eq_v", "per_layer_config"
_SHARED, _WIDE = "num_kv_shared_layers", "use_double_wide_mlp"
_INPUT, _INPUT_SIZE, _TOKENS = "hidden_size_per_layer_input", 256, "vocab_size_per_layer_input"
_KEYS = ("head_dim", "num_key_value_heads")  # fields that a layer may override
_SPARSE, _EXPERTS = "enable_moe_block", ("num_experts", "top_k_experts", "moe_intermediate_size")
_NAMES = ExpertNames("router.proj", "experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")
_SPARSE_NAMES = replace(
    SANDWICH, experts=_NAMES, before_experts="pre_feedforward_layernorm_2",
    after_experts="post_feedforward_layernorm_2", after_network="post_feedforward_layernorm_1",
)  # fmt: skip


def describe(source: Fields) -> ModelConfig:
    """The model of a config. Layers of small models share caches, and have inputs of their own."""
    config = _describe(source, "gemma4_text", window=512, max_positions=131072)
    config = _with_experts(source, config) if source.flag(_SPARSE, False) else config
    return _with_inputs(source, _with_shared_caches(source, config))


def _with_inputs(source: Fields, config: ModelConfig) -> ModelConfig:
    """`config` with inputs of all layers from a table, unless they have none."""
    if source.data.get(_INPUT, _INPUT_SIZE) == 0:
        return config
    size, norm = source.integer(_INPUT, 1 << 16, default=_INPUT_SIZE), config.norm
    if source.integer(_TOKENS, 1 << 24, default=_SIZES["vocab_size"]) != config.vocab_size:
        source.refuse(_TOKENS, f"vocab_size, {config.vocab_size}")
    config = config.mapped(lambda block: replace(block, input_size=size, after_input=norm))
    return replace(config, layer_table=LayerTable(size, norm))


def _with_shared_caches(source: Fields, config: ModelConfig) -> ModelConfig:
    """`config` whose last layers share the keys and values of earlier ones. Their feed-forward networks may be twice as
    wide."""
    if source.data.get(_SHARED, 0) == 0:
        return config
    first = config.num_layers - source.integer(_SHARED, config.num_layers - 1)
    kinds = [block.attention.window for block in config.blocks]
    if {*kinds[first:]} - {*kinds[:first]}:
        source.refuse(_SHARED, "layers behind one of each of their types")
    width = 2 if source.flag(_WIDE, False) else 1

    def shared(block: Block) -> Block:
        inner = replace(block.feed_forward, size=width * block.feed_forward.size)
        return replace(block, mixer=replace(block.attention, shares=True), feed_forward=inner)

    blocks = config.blocks[:first] + tuple(map(shared, config.blocks[first:]))
    unused = tuple(f"layers.{layer}.self_attn.[kv]_*" for layer in range(first, config.num_layers))
    return replace(config, blocks=blocks, names=replace(config.names, unused=unused))


def _with_experts(source: Fields, config: ModelConfig) -> ModelConfig:
    """`config` with experts beside the feed-forward network of every layer."""
    norm, scale = config.norm, config.hidden_size**-0.5
    experts = read_experts(source, config, counts=_EXPERTS[:1], used=_EXPERTS[1], scaled=True, score_scale=scale)
    return with_experts(
        replace(config, names=_SPARSE_NAMES), experts, beside=config.intermediate_size,
        before_router=replace(norm, fp32=True), before_experts=norm, after_experts=norm, after_network=norm,
    )  # fmt: skip


def describe_unified(source: Fields) -> ModelConfig:
    for key in (_INPUT, _SHARED):
        if source.data.get(key):
            source.refuse(key, "0: it changes the arithmetic, and this program does not implement it")
    return _describe(source, "gemma4_unified_text", window=1024, max_positions=262144)


def _describe(source: Fields, family: str, *, window: int, max_positions: int) -> ModelConfig:
    defaults = Defaults(max_positions=max_positions, kv_heads=4, head_dim=256, derives_head_dim=False, tied=True)
    ropes = source.data.get("rope_parameters") or _ROPES
    if isinstance(ropes, Mapping) and not {*_ROPES} <= ropes.keys():
        source.refuse("rope_parameters", f"an object of {FULL} and {WINDOWED}")
    if source.data.get("use_bidirectional_attention") == "vision":  # of images, which are not supported
        source = source.changed({"use_bidirectional_attention": None})
    source = source.changed({"rope_parameters": ropes})
    norm = Norm(epsilon(source, defaults))
    config = sandwiched(
        rope_of_type(source, WINDOWED), family, defaults, norm=Norm, block={"multiplied": True},
        attention={"qk_norm": norm, "v_norm": replace(norm, weightless=True), "scale": 1.0},
        logits_cap=None if source.data.get(_CAP) is None else source.number(_CAP),
    )  # fmt: skip
    last, tokens = config.num_layers - 1, source.integer("sliding_window", 1 << 30, default=window)
    layers = windowed_layers(source, tokens, lambda: others(source, range(_PERIOD - 1, last, _PERIOD)))
    return _with_windows(source, config, tokens, {*layers} - {last})


def _with_windows(source: Fields, config: ModelConfig, window: int, layers: set[int]) -> ModelConfig:
    """`config` with the window in `layers`, and other heads and positions in the others."""
    common = config.block
    windowed = replace(common, mixer=replace(common.attention, window=window))
    full = replace(common, mixer=_full(source, config, layers))
    blocks: list[Block] = [windowed if layer in layers else full for layer in range(config.num_layers)]
    return replace(config, blocks=tuple(blocks))


def _full(source: Fields, config: ModelConfig, layers: set[int]) -> Attention:
    """The attention of layers without a window. layers: the layers with a window."""
    same = source.flag(_SAME, False)
    by_layer = _HEADS in source.data
    head_dim, kv_heads = _heads_by_layer(source, config, layers) if by_layer else _heads(source, config, same=same)
    if head_dim % 2:
        source.refuse(_HEADS if by_layer else "global_head_dim", f"even for rotary positions, {head_dim} is odd")
    if config.num_heads % kv_heads:
        key = _HEADS if by_layer else "num_global_key_value_heads"
        source.refuse(key, f"KV heads that divide num_attention_heads {config.num_heads}, {kv_heads} do not")
    rope = read_rope(
        rope_of_type(source, FULL), max_positions=config.max_positions, head_dim=head_dim,
        defaults=RopeDefaults(theta=1000000.0, kinds=(PROPORTIONAL,)),
    )  # fmt: skip
    own = replace(config.block.attention, head_dim=head_dim, num_kv_heads=kv_heads, rope=rope)
    return replace(own, values_are_keys=same)


def _heads(source: Fields, config: ModelConfig, *, same: bool) -> tuple[int, int]:
    """The (head_dim, KV heads) of layers without a window, from their own fields."""
    named = same and source.data.get("num_global_key_value_heads") is not None
    kv_heads = source.integer("num_global_key_value_heads", config.num_heads) if named else config.num_kv_heads
    return source.integer("global_head_dim", 1 << 12, default=_HEAD_DIM), kv_heads


def _heads_by_layer(source: Fields, config: ModelConfig, layers: set[int]) -> tuple[int, int]:
    """The (head_dim, KV heads) of layers without a window, from the map that transformers writes: layer number, perhaps
    with leading zeros, -> head_dim and KV heads."""
    found = source.data[_HEADS] or {}
    full = [layer for layer in range(config.num_layers) if layer not in layers]
    if not isinstance(found, Mapping) or not all(str(key).isdecimal() for key in found):
        source.refuse(_HEADS, "an object by the numbers of layers")
    own = {int(key): each or {} for key, each in found.items()}
    if len(own) < len(found) or own.keys() - {*full}:
        source.refuse(_HEADS, f"of layers without a window, {', '.join(map(str, full))}, each once")
    first, *others = (own.get(layer, {}) for layer in full)
    if not isinstance(first, Mapping) or first.keys() - {*_KEYS} or any(each != first for each in others):
        source.refuse(_HEADS, f"{' and '.join(_KEYS)}, the same of layers {', '.join(map(str, full))}")
    heads = source.inner(_HEADS, first)
    head_dim = heads.integer("head_dim", 1 << 12, default=config.head_dim)
    return head_dim, heads.integer("num_key_value_heads", config.num_heads, default=config.num_kv_heads)


_READS = frozenset((_CAP, _SAME, _HEADS, "global_head_dim", "num_global_key_value_heads", "hidden_act"))
_SIZES = sizes(262144, 2304, 9216, 30, 8)
_ABOUT = "Gemma 4 E2B, E4B, 26B-A4B, 31B; text of `gemma4`"
FAMILIES = (
    Family("gemma4_text", _ABOUT, describe, _READS | {_SPARSE, *_EXPERTS, _SHARED, _WIDE, _INPUT, _TOKENS}, "", _SIZES),
    Family("gemma4_unified_text", "Gemma 4 12B; text of `gemma4_unified`", describe_unified, _READS, "", _SIZES),
)
