"""The windowed layers of a model, as its config.json gives them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from offload.config.block import Block
from offload.config.model import ModelConfig
from offload.config.rope import Rope
from offload.fields import Fields

FULL, WINDOWED = "full_attention", "sliding_attention"
INDEXED = "indexed_attention"  # whose rows attend to what an index chooses
PERIOD = "sliding_window_pattern"  # a field: its value n means that every n-th layer has no window


def layer_types(source: Fields, window: object) -> list[str] | None:
    """The types of all layers; None if the config does not name them."""
    found = source.data.get("layer_types")
    if not found:
        return None
    layers = source.integer("num_hidden_layers", 1 << 12)
    if not isinstance(found, list) or len(found) < layers or any(kind not in (FULL, WINDOWED) for kind in found):
        source.refuse("layer_types", f"a list of {FULL} and {WINDOWED}, one for each of {layers} layers")
    if WINDOWED in found and window is None:
        source.refuse("layer_types", f"{FULL} in every layer where there is no sliding_window")
    return found[:layers]


def windowed_layers(source: Fields, window: object, unnamed: Callable[[], Collection[int]]) -> list[int]:
    """The numbers of the layers with the window. unnamed: gives them if the config names none."""
    types = layer_types(source, window)
    if types is None:
        layers = sorted(unnamed())
        return source.refuse("sliding_window", "a number of tokens") if layers and window is None else layers
    return [layer for layer, kind in enumerate(types) if kind == WINDOWED]


def all_but_every(source: Fields, default: int) -> list[int]:
    """All layers but every n-th, where the field PERIOD gives n."""
    step = source.integer(PERIOD, 1 << 12, default=default)
    return others(source, range(step - 1, source.integer("num_hidden_layers", 1 << 12), step))


def with_windows(
    source: Fields, config: ModelConfig, window: object, layers: Collection[int], *, rope: Rope | None = None
) -> ModelConfig:
    """`config` with the window in `layers`, unless no context exceeds it. rope: rotary positions of these layers, if
    different from the others'. Raises ModelError."""
    if not layers:
        return config
    if type(window) is not int or window < 1:
        source.refuse("sliding_window", "a number of tokens over 0, or null")
    known = None if window >= config.context_limit else window

    def changed(block: Block) -> Block:
        attention = block.attention
        return replace(block, mixer=replace(attention, window=known, rope=rope or attention.rope))

    blocks = (changed(block) if layer in layers else block for layer, block in enumerate(config.blocks))
    return replace(config, blocks=tuple(blocks))


def with_one_window(source: Fields, config: ModelConfig, *, default: int | None = None) -> ModelConfig:
    """`config`, whose family has one window for all layers. default: the window if the config has none."""
    window = source.data.get("sliding_window", default)
    layer_types(source, window)
    return with_windows(source, config, window, [] if window is None else range(config.num_layers))


def without_windows(source: Fields, config: ModelConfig) -> ModelConfig:
    """`config`, whose family has no windows. Raises ModelError if the config has one that a context exceeds."""
    window = source.data.get("sliding_window")
    layer_types(source, window)
    if window is not None and (type(window) is not int or window < config.context_limit):
        source.refuse("sliding_window", f"null, or at least the context of {config.context_limit} tokens")
    return config


def rope_of_type(source: Fields, kind: str, theta_key: str = "") -> Fields:
    """`source` with the rotary positions of one layer type: its entry in `rope_parameters`, or in older configs
    `rope_scaling`, for full attention. theta_key: the field of the base in older configs."""
    by_type = source.data.get("rope_parameters") or {}
    if not isinstance(by_type, Mapping) or by_type.keys() - {FULL, WINDOWED}:
        source.refuse("rope_parameters", f"an object of {FULL} and {WINDOWED}")
    settings = {"rope_theta": source.data.get(theta_key)}
    for found in (by_type.get(kind), source.data.get("rope_scaling") if kind == FULL else None):
        if found is not None and not isinstance(found, Mapping):
            source.refuse("rope_parameters", "objects, and rope_scaling too")
        settings |= found or {}
    return source.changed({"rope_parameters": settings, "rope_scaling": None, "rope_theta": None})


def others(source: Fields, layers: Collection[int]) -> list[int]:
    """All layers except `layers`."""
    return [layer for layer in range(source.integer("num_hidden_layers", 1 << 12)) if layer not in layers]
