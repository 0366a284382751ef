"""Rotary position settings of a GGUF file, from its metadata and from tensors with frequency factors."""

from __future__ import annotations

import math

from offload.config.families.common import with_rope
from offload.config.gguf_fields import Metadata
from offload.config.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from offload.config.model import ModelConfig
from offload.config.rope import PROPORTIONAL
from offload.errors import ModelError

_THETA = 10000.0  # llama.cpp's default
_KINDS = ("none", "linear", "yarn", "longrope")
_ORIGINALS = (8192, 4096, 16384, 32768, 65536, 131072)  # llama3's pretrained lengths that are tried
_LOW, _HIGH = 1.0, 4.0  # llama3's other numbers, the same in all models
_STILL = 1e30  # the least factor of a pair that does not rotate
_NEAR = 1e-5  # two numbers that differ by fp32's rounding alone


def rope_settings(values: Metadata, head_dim: int) -> dict[str, object]:
    """The field `rope_parameters` of a config.json, and the fields beside it. Raises ModelError."""
    settings: dict[str, object] = {
        "rope_theta": values.number("rope.freq_base", _THETA),
        "partial_rotary_factor": share_of(values.integer("rope.dimension_count", default=head_dim), head_dim),
    }
    return {"rope_parameters": settings | _scaling(values)}


def share_of(rotated: int, head_dim: int) -> float:
    """The share of a head for which transformers' int(head_dim * share) is `rotated`."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else (rotated + 0.5) / head_dim


def _scaling(values: Metadata) -> dict[str, object]:
    kind, factor = values.text("rope.scaling.type"), values.optional("rope.scaling.factor")
    old = values.optional("rope.scale_linear")  # the key of files from before scaling types
    if kind and kind not in _KINDS:
        values.refuse("rope.scaling.type", f"one of {', '.join(_KINDS)}")
    if not kind and values.header.tensors.keys() & {LONG_FACTORS}:
        kind = "longrope"
    if kind == "yarn":
        return _yarn(values)
    if kind == "longrope":
        return _longrope(values)
    factor = factor or old or 1.0
    if kind == "none" or factor == 1:
        return {"rope_type": "default"}
    return {"rope_type": "linear", "factor": factor}


def _yarn(values: Metadata) -> dict[str, object]:
    factor, attention = values.number("rope.scaling.factor"), values.optional("rope.scaling.attn_factor")
    whole = values.optional("rope.scaling.yarn_attn_factor")  # the attention factor itself, as config.json has it
    settings: dict[str, object] = {"rope_type": "yarn", "factor": factor}
    for field, key in (
        ("original_max_position_embeddings", "rope.scaling.original_context_length"),
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
        ("mscale_all_dim", "rope.scaling.yarn_log_multiplier"),
    ):
        if (value := values.optional(key)) is not None:
            settings[field] = int(value) if field.startswith("original") else value
    if "mscale_all_dim" in settings:
        settings["mscale"] = 1.0
    elif whole is not None:
        settings["attention_factor"] = whole
    elif attention is not None and attention != 1:  # a factor on the attention factor that follows from the scaling
        settings["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    return settings


def _longrope(values: Metadata) -> dict[str, object]:
    short, long = values.factors(SHORT_FACTORS), values.factors(LONG_FACTORS)
    if short is None or long is None:
        raise ModelError(f"{values.header.path} has no {SHORT_FACTORS} and {LONG_FACTORS}, which LongRoPE needs")
    most, original = values.integer("context_length"), values.integer("rope.scaling.original_context_length")
    settings: dict[str, object] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    told, scale = values.optional("rope.scaling.attn_factor"), most / original
    derived = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 < original else 1.0
    if told is not None and abs(told / derived - 1) > _NEAR:
        settings["attention_factor"] = told
    return settings


def with_factors(values: Metadata, config: ModelConfig) -> ModelConfig:
    """`config` with frequencies divided by the file's ROPE_FACTORS, if it has some: as llama3's scaling if they match
    it, else one by one. Raises ModelError."""
    if config.rope.kind == PROPORTIONAL:  # which follows from the factors
        return config
    factors = values.factors(ROPE_FACTORS)
    if factors is None or set(factors) == {1.0}:
        return config
    rope, rotated = config.rope, config.rope.rotated or config.head_dim
    if len(factors) != rotated // 2 or rope.kind != "default":
        raise ModelError(
            f"{values.header.path}: {ROPE_FACTORS} has {len(factors)} numbers beside rope scaling {rope.kind}, where "
            f"{rotated // 2} beside none are known; fetch the model as safetensors"
        )
    for original in dict.fromkeys((*_ORIGINALS, config.max_positions)):
        expected = _llama3(rope.theta, rotated, max(factors), original)
        if all(abs(one / other - 1) < _NEAR for one, other in zip(factors, expected, strict=True)):
            fields = {"original_max_positions": original, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
            return with_rope(config, kind="llama3", factor=max(factors), **fields)
    own = {"short_factors": tuple(factors), "long_factors": tuple(factors), "attention_factor": 1.0}
    return with_rope(config, kind="longrope", original_max_positions=config.max_positions, **own)


def rotated_share(values: Metadata, head_dim: int) -> float:
    """The share of a head that rotates by the file's ROPE_FACTORS: pairs with a factor of 1, before others whose
    frequency is divided by so much that they stay as they are. Raises ModelError for any other factors."""
    factors, pairs = values.factors(ROPE_FACTORS, math.inf) or [], head_dim // 2
    rotated = next((at for at, factor in enumerate(factors) if factor != 1), len(factors))
    if len(factors) != pairs or not rotated or any(factor < _STILL for factor in factors[rotated:]):
        told = f", of which the first {rotated} are 1 and the least of the others {min(factors[rotated:], default=1):g}"
        raise ModelError(
            f"{values.header.path}: {ROPE_FACTORS} has {len(factors)} numbers{told if factors else ''}; it must have "
            f"{pairs}, some of 1 and then others from {_STILL:g}; fetch the model as safetensors"
        )
    return min((rotated + 0.5) / pairs, 1.0)


def _llama3(theta: float, rotated: int, factor: float, original: int) -> list[float]:
    """The divisors of each pair's frequency in llama3's scaling."""
    found = []
    for pair in range(0, rotated, 2):
        turns = original * theta ** (-pair / rotated) / (2 * math.pi)  # full rotations within the pretrained length
        kept = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        found.append(1 / ((1 - kept) / factor + kept))
    return found
