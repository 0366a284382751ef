"""Rotary scaling as a config names it: which kind, with which constants. The frequencies are in kernels/rope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.plan.fields import Fields, is_neutral

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
_KNOWN_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "truncate", "partial_rotary_factor",
    "finetuned",  # Yarn-Llama-2: the weights were trained with this scaling; no formula changes
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies. Only the fields that its `kind` uses are set; the rest keep defaults."""

    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None  # yarn, llama3: the length that the model was pretrained with
    attention_factor: float | None = None  # yarn: None means what the paper derives from the factor
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True


def read_rope(source: Fields, *, max_positions: int, head_dim: int) -> tuple[float, RopeScaling]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).

    Theta is 10000 where no form names it, as in transformers. Where two places name one thing they must mean the same.
    What transformers computes is taken, also where it is written in another way, except for numbers of which it warns.
    """
    forms = [
        _form(source, key) for key in ("rope_parameters", "rope_scaling") if source.data.get(key) not in (None, {})
    ]
    owners = [owner for owner in (*forms, source) if owner.data.get("rope_theta") is not None]
    thetas = [owner.number("rope_theta") for owner in owners]
    theta = thetas[0] if thetas else 10000.0
    for owner, other in zip(owners, thetas, strict=True):
        if other != theta:
            owner.refuse("rope_theta", f"the same as elsewhere, {theta:g}")
    forms = forms or [Fields({}, source.where)]
    scaling, *others = (_read_form(source, form, theta, max_positions, head_dim) for form in forms)
    if any(other != scaling for other in others):
        source.refuse("rope_scaling", "equal to rope_parameters, or absent")
    return theta, scaling


def _form(source: Fields, key: str) -> Fields:
    values = source.data[key]
    if not isinstance(values, Mapping):
        source.refuse(key, "a JSON object")
    return Fields(values, f"{source.where}: {key}")


def _read_form(source: Fields, rope: Fields, theta: float, max_positions: int, head_dim: int) -> RopeScaling:
    for key, value in rope.data.items():
        if key not in _KNOWN_KEYS and value is not None:
            rope.refuse(key, "absent: no supported rope type reads it")
    if not is_neutral(rope.data.get("partial_rotary_factor"), (1.0,)):
        rope.refuse("partial_rotary_factor", "absent or 1.0")
    kind_key = "type" if rope.data.get("rope_type") is None else "rope_type"
    kind = rope.choice(kind_key, ROPE_KINDS, default="default")
    if rope.data.get("type") not in (None, kind):
        rope.refuse("type", f"the same as rope_type {kind}")
    if kind == "yarn" and theta <= 1:
        (source if rope.data.get("rope_theta") is None else rope).refuse("rope_theta", "over 1 for yarn")
    if kind == "dynamic" and head_dim <= 2:
        rope.refuse(kind_key, f"another than dynamic with head_dim {head_dim}")
    return _read_scaling(source, rope, kind, max_positions)


def _read_scaling(source: Fields, rope: Fields, kind: str, max_positions: int) -> RopeScaling:
    if kind == "default":
        return RopeScaling()
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, rope.number("factor", least=1.0))
    original = _read_original(source, rope, max_positions)
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor")
        if high <= low:
            rope.refuse("high_freq_factor", f"over low_freq_factor {low:g}")
        factor = rope.number("factor", least=1.0)
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    beta_fast = 32.0 if rope.is_zero("beta_fast") else rope.number("beta_fast", default=32.0)
    temperatures = ("mscale", "mscale_all_dim")
    one_is_zero = any(rope.is_zero(key) for key in temperatures)
    mscale, mscale_all_dim = (None if one_is_zero else rope.optional_number(key) for key in temperatures)
    return RopeScaling(
        kind,
        # "factor": null leaves it to the two lengths; transformers 5 does the same
        rope.number("factor", default=max_positions / original if "factor" in rope.data else None, least=1.0),
        original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=beta_fast,
        beta_slow=1.0 if rope.is_zero("beta_slow") else rope.number("beta_slow", default=1.0, most=beta_fast),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        truncate=rope.flag("truncate", "truncate" not in rope.data),  # null is false to transformers
    )


def _read_original(source: Fields, rope: Fields, max_positions: int) -> int:
    """The pretrained length: `max_position_embeddings` where none is named, as in transformers."""
    key = "original_max_position_embeddings"
    original = (source if rope.data.get(key) is None else rope).integer(key, 1 << 30, default=max_positions)
    if source.data.get(key) not in (None, original):
        source.refuse(key, f"the same as in the rope settings, {original}")
    return original
