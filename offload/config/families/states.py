"""Fields of families whose layers have a recurrent state in place of attention."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from offload.config.families.windows import FULL, INDEXED, WINDOWED
from offload.config.mixers import MOST_TAPS, DeltaRule, Mamba2, Recurrence, ShortConvolution
from offload.config.model import ModelConfig
from offload.config.names import RecurrenceNames
from offload.config.norm import Norm
from offload.fields import Fields

STATEFUL, CONVOLVED = "linear_attention", "conv"
_LIMITS = "time_step_limit"
_CHANNEL_SIZES = {"num_heads": 32, "head_dim": 128}  # fields, and their defaults


def read_delta_rule(
    source: Fields, *, key_heads: int, heads: int, key_dim: int, value_dim: int, norm: Norm, **others: Any
) -> DeltaRule:
    """The delta rule of all layers with a state. Numbers: the family's defaults. others: fields of `DeltaRule`."""
    found = DeltaRule(
        source.integer("linear_num_key_heads", 1 << 12, default=key_heads),
        source.integer("linear_num_value_heads", 1 << 12, default=heads),
        source.integer("linear_key_head_dim", 1 << 12, default=key_dim),
        source.integer("linear_value_head_dim", 1 << 12, default=value_dim),
        source.integer("linear_conv_kernel_dim", MOST_TAPS, default=4),
        norm,
        **others,
    )
    if found.num_heads % found.num_key_heads:
        source.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads {found.num_key_heads}")
    if found.width < 2:
        source.refuse("linear_conv_kernel_dim", "2 or more")
    return found


def read_channel_rule(source: Fields, *, low_rank: bool, norm: Norm, least: float | None = None) -> DeltaRule:
    """The delta rule of all layers with a state, in which each channel of a key decays by itself (Kimi Delta
    Attention). low_rank: gates and times are of the heads' size first. least: see `DeltaRule`."""
    heads, dim = (source.integer(f"linear_{what}", 1 << 12, default=given) for what, given in _CHANNEL_SIZES.items())
    for kind in ("key", "value"):
        for field, size in ((f"linear_num_{kind}_heads", heads), (f"linear_{kind}_head_dim", dim)):
            if source.data.get(field) not in (None, size):
                source.refuse(field, f"absent, or {size} as of all heads")
    return read_delta_rule(
        source, key_heads=heads, heads=heads, key_dim=dim, value_dim=dim, norm=norm, gate="sigmoid",
        by_channel=True, least=least, low_rank=dim if low_rank else 0,
    )  # fmt: skip


def channel_names(prefix: str, *, low_rank: bool) -> RecurrenceNames:
    """The tensor names of such a delta rule."""
    low = "_a" if low_rank else ""
    parts = ("q", "k", "v", f"g{low}", "b", f"f{low}")
    return RecurrenceNames(
        parts=tuple(f"{prefix}{part}_proj" for part in parts),
        taps=tuple(f"{prefix}{letter}_conv1d" for letter in "qkv"),
        out=f"{prefix}o_proj", norm=f"{prefix}o_norm", decay=f"{prefix}A_log", time_bias=f"{prefix}dt_bias",
        gates_b=f"{prefix}g_b_proj", times_b=f"{prefix}f_b_proj",
    )  # fmt: skip


def read_short_convolution(source: Fields, *, width: int) -> ShortConvolution:
    """The short convolution of all layers that have one. width: the family's default."""
    bias, taps = source.flag("conv_bias", False), source.integer("conv_L_cache", MOST_TAPS, default=width)
    if taps < 2:
        source.refuse("conv_L_cache", "2 or more")
    return ShortConvolution(source.integer("hidden_size", 1 << 20), taps, bias, bias, bias)


def read_mamba(
    source: Fields,
    *,
    heads: tuple[str, int],
    head_dim: tuple[str, int],
    groups: tuple[str, int],
    state: tuple[str, int],
    width: tuple[str, int],
    taps_bias: str,
    **others: Any,
) -> Mamba2:
    """The Mamba-2 of all layers with a state. Pairs: a field and the family's default. taps_bias: the field of the
    convolution's bias. others: fields of `Mamba2`."""

    def number(field: tuple[str, int], most: int = 1 << 12) -> int:
        return source.integer(field[0], most, default=field[1])

    found = Mamba2(
        number(groups), number(heads), number(state), number(head_dim), number(width, MOST_TAPS),
        taps_bias=source.flag(taps_bias, True), **others,
    )  # fmt: skip
    if found.num_heads % found.num_key_heads:
        source.refuse(groups[0], f"a divisor of {heads[0]} {found.num_heads}")
    if found.width < 2:
        source.refuse(width[0], "2 or more")
    return found


def no_limits(source: Fields) -> None:
    """Raises ModelError for limits of time steps, but for what transformers writes where there are none."""
    limits = source.data.get(_LIMITS)
    if limits is not None and limits not in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        source.refuse(_LIMITS, "absent or [0.0, Infinity]: time steps are not limited")


def mamba_names(prefix: str) -> RecurrenceNames:
    """The tensor names of a Mamba-2: its projection has gates, values, keys, queries and times."""
    return RecurrenceNames(
        parts=(f"{prefix}in_proj",) * 5, taps=(f"{prefix}conv1d",) * 3, out=f"{prefix}out_proj", norm=f"{prefix}norm",
        decay=f"{prefix}A_log", time_bias=f"{prefix}dt_bias", skip=f"{prefix}D", order=(3, 2, 1, 0, 4),
    )  # fmt: skip


def stateful_layers(source: Fields, period_key: str, period: int) -> list[int]:
    """The numbers of the layers with a state: as listed, or all but every n-th, where the field `period_key` gives
    n."""

    def unnamed(layer: int) -> str:
        return STATEFUL if (layer + 1) % source.integer(period_key, 1 << 12, default=period) else FULL

    kinds = layer_kinds(source, (FULL, STATEFUL), unnamed)
    return [layer for layer, kind in enumerate(kinds) if kind == STATEFUL]


def layer_kinds(source: Fields, known: Collection[str], unnamed: Callable[[int], str]) -> list[str]:
    """The kind of each layer, of those that are known. unnamed: gives it where the config does not list them."""
    count, kinds = source.integer("num_hidden_layers", 1 << 12), source.data.get("layer_types")
    if kinds is None:
        kinds = [unnamed(layer) for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) < count or any(kind not in known for kind in kinds):
        source.refuse("layer_types", f"a list of {' and '.join(known)}, one for each of {count} layers")
    attends = {FULL, INDEXED, WINDOWED}.intersection(kinds[:count])
    return kinds[:count] if attends else source.refuse("layer_types", f"{FULL} in one layer at least")


def with_states(config: ModelConfig, recurrence: Recurrence, layers: Collection[int], **block: Any) -> ModelConfig:
    """`config` with the recurrence in `layers`. block: further fields of their blocks."""
    blocks = (
        replace(each, mixer=recurrence, **block) if layer in layers else each
        for layer, each in enumerate(config.blocks)
    )
    return replace(config, blocks=tuple(blocks))
