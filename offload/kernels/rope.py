"""Rotary position embeddings (RoFormer, Su et al. 2021, section 3.2.2), with the scalings that real configs name.

Pair i of a head's D/2 pairs turns by `position * f_i`; the pairs are (x[i], x[i + D/2]), the layout of all Hugging Face
checkpoints. Frequencies, angles and tables are fp32, and made on the CPU, so every device sees the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.plan.config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class RopeTable:
    """Rows for positions 0, 1, ...: `cos`, `sin` fp32 [num_positions, D], attention scaling multiplied in.

    `sin` has its sign folded in: the first D/2 columns hold -sin, the others +sin, as `rotate` wants it.
    """

    cos: Tensor
    sin: Tensor

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions start to stop, each [stop - start, D], as views."""
        return self.cos[start:stop], self.sin[start:stop]

    def starts_like(self, other: RopeTable) -> bool:
        """Are the rows that both have the same?"""
        count = min(len(self.cos), len(other.cos))
        ours, theirs = self.rows(0, count), other.rows(0, count)
        return all(torch.equal(one, another) for one, another in zip(ours, theirs, strict=True))

    def to(self, dtype: torch.dtype) -> RopeTable:
        """The same table rounded to the dtype of the rows it will turn: `rotate` then rounds nothing."""
        return RopeTable(self.cos.to(dtype), self.sin.to(dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] of any float dtype (a view will do); cos, sin [T, D] as `RopeTable` holds them -> [T, H, D], new.

    The tables are rounded to x's dtype first, and every operation rounds on its own, as in transformers: same bits. No
    fused multiply-add, whose rounding could depend on where a row lies. q and k rotate in one call, stacked along H.
    """
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def rope_table(config: ModelConfig, num_positions: int, capacity: int, device: torch.device | str) -> RopeTable:
    """The rows of positions 0 to `num_positions` - 1 on `device`: 8 * num_positions * D bytes.

    `capacity`: see `inverse_frequencies`. Making them takes the same memory once more on the host.
    """
    frequencies, scaling = inverse_frequencies(config, capacity)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return RopeTable(torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device))


def inverse_frequencies(config: ModelConfig, capacity: int) -> tuple[Tensor, float]:
    """(f fp32 [D/2] on the CPU, attention scaling: the factor on cos and sin) for all five kinds of scaling.

    `capacity` is the largest length in tokens that the request may reach. Only `dynamic` looks at it: transformers
    recomputes these frequencies as the sequence grows, so keys of one sequence are turned at different rates and the
    result depends on how the forwards were cut. Here one request has one set of frequencies, and speculation, which
    cuts the forwards otherwise, cannot change them.
    """
    scaling, theta, dim = config.rope, config.rope_theta, config.head_dim
    if scaling.kind == "dynamic":
        theta *= _ntk_stretch(scaling.factor, capacity, config.max_positions) ** (dim / (dim - 2))
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # over 2 pi, in tokens
    frequencies = 1.0 / wavelengths
    if scaling.kind == "linear":  # position interpolation, Chen et al. 2023, arXiv 2306.15595
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(wavelengths, theta, scaling), yarn_attention_scaling(scaling)
    if scaling.kind in ("default", "dynamic"):
        return frequencies, 1.0
    raise ValueError(f"unknown rope kind {scaling.kind!r}")


def _ntk_stretch(factor: float, capacity: int, max_positions: int) -> float:
    """Dynamic NTK (bloc97, emozilla 2023; YaRN, section 3.3): theta grows with the length beyond `max_positions`."""
    return factor * max(capacity, max_positions) / max_positions - (factor - 1)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """[D/2] -> [D/2]. Llama 3.1: pairs that turn fully at least `high_freq_factor` times within the pretrained length
    stay, those that turn less than `low_freq_factor` times are divided by the factor, a linear blend lies between."""
    original = _original_positions(scaling)
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(wavelengths: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """[D/2] -> [D/2]. YaRN (Peng et al. 2023), section 3.2, "NTK-by-parts": pairs that turn more than `beta_fast` times
    within the pretrained length stay, fewer than `beta_slow` times are divided by the factor, a ramp over the pair's
    index lies between. `truncate` rounds the ends of the ramp outwards to whole pairs, as the authors' code does."""
    original = _original_positions(scaling)
    pairs = len(wavelengths)

    def pair_that_turns(times: float) -> float:
        return 2 * pairs * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001  # no division by zero; the same step as the authors'
    ramp = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def yarn_attention_scaling(scaling: RopeScaling) -> float:
    """The factor on cos and sin; squared, it is YaRN's 1/t on the logits (section 3.4).

    `attention_factor` where given; else 0.1 ln(factor) + 1, with DeepSeek's `mscale` over `mscale_all_dim` if both are.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def _original_positions(scaling: RopeScaling) -> int:
    if scaling.original_max_positions is None:
        raise ValueError(f"rope kind {scaling.kind} needs original_max_positions")
    return scaling.original_max_positions
