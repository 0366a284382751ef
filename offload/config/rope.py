"""Rotary position settings of a config: base, scaling, rotated part of a head. kernels/rope has the frequencies."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from offload.fields import Fields, list_of, number

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
SECTIONED = "mrope"  # default positions with sections, in the configs of vision models
# Sections of a head rotate by positions of their own: of pictures by time, row and column; of text all are equal.
SECTION_KEYS = frozenset(("mrope_section", "mrope_interleaved", "interleaved"))
PROPORTIONAL = "proportional"  # only some pairs rotate, with the frequencies of a fully rotated head
_KNOWN_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "truncate", "partial_rotary_factor",
    "finetuned",  # Yarn-Llama-2: the weights were trained with this scaling; no formula changes
}  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """Rotary positions, scaled as its `kind` says. Only the fields that the kind uses are set; the rest keep defaults.

    rotated: number of leading elements of a head that are rotated; None: all. neighbours: elements 2i and 2i + 1 are
    rotated together, else i and i + rotated / 2; if `kind` is PROPORTIONAL, i and i + D / 2 for the first rotated / 2
    elements i. growth: beta; queries are multiplied by 1 + beta ln(1 + floor(position / original_max_positions)) (Llama
    4).
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None  # the pretraining length: of yarn, llama3, longrope, and linear if known
    attention_factor: float | None = None  # yarn, longrope: None means the value that the paper derives from the factor
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope: of each pair's wavelength, up to the original length and past it
    long_factors: tuple[float, ...] = ()
    theta: float = 10000.0
    rotated: int | None = None
    neighbours: bool = False
    growth: float = 0.0

    @property
    def depends_on_capacity(self) -> bool:
        """Whether the frequencies depend on the length that a request may reach."""
        return self.kind in ("dynamic", "longrope")

    def context_limit(self, max_positions: int) -> int:
        """The longest supported context of a model whose `max_position_embeddings` is `max_positions`."""
        base = self.original_max_positions if self.kind in ("yarn", "linear") else max_positions
        factor = self.factor if self.kind in ("yarn", "linear", "dynamic") else 1.0
        return max(max_positions, int((base or max_positions) * factor))


@dataclass(frozen=True)
class RopeDefaults:
    """A family's defaults for rope settings, and the further kinds that they may name.

    partial: the share of a head that is rotated; None: the family does not read one. neighbours: see `Rope`. kinds:
    kinds besides ROPE_KINDS.
    """

    theta: float = 10000.0
    partial: float | None = None
    neighbours: bool = False
    keys: Set[str] = frozenset()
    kinds: tuple[str, ...] = ()


def is_neutral(value: object, allowed: tuple[object, ...]) -> bool:
    """True for null and the values in `allowed`. 1 equals 1.0, but true equals neither."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed
    )


def read_rope(source: Fields, *, max_positions: int, head_dim: int, defaults: RopeDefaults = RopeDefaults()) -> Rope:
    """The rotary positions from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).

    A setting that is given in two places must agree. Settings are read as transformers computes them, in any spelling
    that it accepts, except for numbers of which it warns.
    """
    forms = [source.inner(key) for key in ("rope_parameters", "rope_scaling") if source.data.get(key) not in (None, {})]
    owners = [owner for owner in (*forms, source) if owner.data.get("rope_theta") is not None]
    thetas = [owner.number("rope_theta") for owner in owners]
    theta = thetas[0] if thetas else defaults.theta
    for owner, other in zip(owners, thetas, strict=True):
        if other != theta:
            owner.refuse("rope_theta", f"the same as elsewhere, {theta:g}")
    forms = forms or [Fields({}, source.where)]
    rope, *others = (_read_form(source, form, theta, max_positions, head_dim, defaults) for form in forms)
    if any(other != rope for other in others):
        source.refuse("rope_scaling", "equal to rope_parameters, or absent")
    return rope


def _read_form(
    source: Fields, rope: Fields, theta: float, max_positions: int, head_dim: int, defaults: RopeDefaults
) -> Rope:
    for key, value in rope.data.items():
        if key not in _KNOWN_KEYS | defaults.keys and value is not None:
            rope.refuse(key, "absent: no supported rope type reads it")
    kind_key = "type" if rope.data.get("rope_type") is None else "rope_type"
    kind = rope.choice(kind_key, (*ROPE_KINDS, *defaults.kinds), default="default")
    rotated = _read_rotated(source, rope, head_dim, defaults, pairs=kind == PROPORTIONAL)
    if rope.data.get("type") not in (None, kind, *_other_names(kind, defaults)):
        rope.refuse("type", f"the same as rope_type {kind}")
    if kind == "yarn" and theta <= 1:
        (source if rope.data.get("rope_theta") is None else rope).refuse("rope_theta", "over 1 for yarn")
    if kind == "dynamic" and rotated <= 2:
        rope.refuse(kind_key, f"another than dynamic with head_dim {rotated}")
    scaling = _read_scaling(source, rope, kind, max_positions, rotated)
    own = None if rotated == head_dim else rotated
    return replace(scaling, theta=theta, rotated=own, neighbours=defaults.neighbours)


def _other_names(kind: str, defaults: RopeDefaults) -> tuple[str, ...]:
    """Further names of a kind that `type` may have beside `rope_type`."""
    return (SECTIONED,) if kind == "default" and SECTIONED in defaults.kinds else ()


def _read_rotated(source: Fields, rope: Fields, head_dim: int, defaults: RopeDefaults, *, pairs: bool) -> int:
    """The number of rotated elements of a head. pairs: the share counts whole pairs, which only PROPORTIONAL does."""
    key = "partial_rotary_factor"
    if pairs:
        rotated = 2 * int(rope.number(key, default=1.0, most=1.0) * head_dim / 2)
        return rotated or rope.refuse(key, f"a share of {head_dim} numbers in which there is a pair")
    owner = source if rope.data.get(key) is None else rope
    if defaults.partial is None:
        if not is_neutral(rope.data.get(key), (1.0,)):
            rope.refuse(key, "absent or 1.0")
        return head_dim
    rotated = int(head_dim * owner.number(key, default=defaults.partial, most=1.0))
    if rotated < 2 or rotated % 2:
        owner.refuse(key, f"such that an even number of a head's {head_dim} numbers is rotated, not {rotated}")
    return rotated


def _read_scaling(source: Fields, rope: Fields, kind: str, max_positions: int, rotated: int) -> Rope:
    if kind in ("default", SECTIONED):
        return Rope()
    if kind == PROPORTIONAL:
        return Rope(kind, rope.number("factor", default=1.0, least=0.0))
    if kind in ("linear", "dynamic"):
        return Rope(kind, rope.number("factor", least=1.0))
    original = _read_original(source, rope, max_positions)
    if kind == "longrope":
        return Rope(
            kind,
            rope.number("factor", default=max_positions / original, least=0.0),
            original,
            attention_factor=rope.optional_number("attention_factor"),
            short_factors=_read_factors(rope, "short_factor", rotated // 2),
            long_factors=_read_factors(rope, "long_factor", rotated // 2),
        )
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor")
        if high <= low:
            rope.refuse("high_freq_factor", f"over low_freq_factor {low:g}")
        factor = rope.number("factor", least=1.0)
        return Rope(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    beta_fast = 32.0 if _is_zero(rope, "beta_fast") else rope.number("beta_fast", default=32.0)
    temperatures = ("mscale", "mscale_all_dim")
    one_is_zero = any(_is_zero(rope, key) for key in temperatures)
    mscale, mscale_all_dim = (None if one_is_zero else rope.optional_number(key) for key in temperatures)
    return Rope(
        kind,
        # with "factor": null, the factor is the ratio of the lengths, as in transformers 5
        rope.number("factor", default=max_positions / original if "factor" in rope.data else None, least=1.0),
        original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=beta_fast,
        beta_slow=1.0 if _is_zero(rope, "beta_slow") else rope.number("beta_slow", default=1.0, most=beta_fast),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        truncate=rope.flag("truncate", "truncate" not in rope.data),  # transformers reads null as false
    )


def _read_factors(rope: Fields, key: str, count: int) -> tuple[float, ...]:
    """LongRoPE's factors, one for each rotated pair."""
    wanted = f"a list of {count} numbers over 0"
    return tuple(map(float, rope.get(key, list_of(number(0, 1e6, over=0.0), wanted, length=count))))


def _is_zero(rope: Fields, key: str) -> bool:
    """Whether the field is present and 0. A formula with `value or default` treats that as absent."""
    return rope.data.get(key) is not None and is_neutral(rope.data[key], (0,))


def _read_original(source: Fields, rope: Fields, max_positions: int) -> int:
    """The pretrained length; `max_position_embeddings` by default, as in transformers."""
    key = "original_max_position_embeddings"
    original = (source if rope.data.get(key) is None else rope).integer(key, 1 << 30, default=max_positions)
    if source.data.get(key) not in (None, original):
        source.refuse(key, f"the same as in the rope settings, {original}")
    return original
