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

    Theta is 10000 where no form names it, as in transformers. Where two places name one thing they must agree.
    """
    given = [key for key in ("rope_parameters", "rope_scaling") if source.data.get(key) not in (None, {})]
    if len(given) == 2 and source.data["rope_parameters"] != source.data["rope_scaling"]:
        source.refuse("rope_scaling", "equal to rope_parameters, or absent")
    values = source.data[given[0]] if given else {}
    if not isinstance(values, Mapping):
        source.refuse(given[0], "a JSON object")
    rope = Fields(values, f"{source.where}: {given[0]}" if given else source.where)
    for key in values:
        if key not in _KNOWN_KEYS:
            rope.refuse(key, "absent: no supported rope type reads it")
    if not is_neutral(values.get("partial_rotary_factor"), (1.0,)):
        rope.refuse("partial_rotary_factor", "absent or 1.0")
    kind_key = "type" if values.get("rope_type") is None else "rope_type"
    kind = rope.choice(kind_key, ROPE_KINDS, default="default")
    if values.get("type") not in (None, kind):
        rope.refuse("type", f"the same as rope_type {kind}")
    theta_owner = source if values.get("rope_theta") is None else rope
    theta = theta_owner.number("rope_theta", default=10000.0)
    if source.data.get("rope_theta") not in (None, theta):
        source.refuse("rope_theta", f"the same as in {given[0]}, {theta:g}")
    if kind == "yarn" and theta <= 1:
        theta_owner.refuse("rope_theta", "over 1 for yarn")
    if kind == "dynamic" and head_dim <= 2:
        rope.refuse(kind_key, f"another than dynamic with head_dim {head_dim}")
    return theta, _read_scaling(source, rope, kind, max_positions)


def _read_scaling(source: Fields, rope: Fields, kind: str, max_positions: int) -> RopeScaling:
    if kind == "default":
        return RopeScaling()
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, rope.number("factor", least=1.0))
    original = _read_original(source, rope)
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor")
        if high <= low:
            rope.refuse("high_freq_factor", f"over low_freq_factor {low:g}")
        factor = rope.number("factor", least=1.0)
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    beta_fast = rope.number("beta_fast", default=32.0)
    return RopeScaling(
        kind,
        # "factor": null leaves it to the two lengths; transformers 5 does the same
        rope.number("factor", default=max_positions / original if "factor" in rope.data else None, least=1.0),
        original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=beta_fast,
        beta_slow=rope.number("beta_slow", default=1.0, most=beta_fast),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _read_original(source: Fields, rope: Fields) -> int:
    """The pretrained length. transformers takes `max_position_embeddings` where it is absent; that guess is refused."""
    key = "original_max_position_embeddings"
    original = (source if rope.data.get(key) is None else rope).integer(key, 1 << 30)
    if source.data.get(key) not in (None, original):
        source.refuse(key, f"the same as in the rope settings, {original}")
    return original
