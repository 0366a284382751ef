"""Rotary position embeddings (RoFormer, Su et al. 2021, section 3.2.2), with the scalings of Hugging Face configs.

Pair i of a head's D/2 pairs is rotated by `position * f_i`; the pairs are (x[i], x[i + D/2]), the layout of all Hugging
Face checkpoints. Frequencies, angles and tables are fp32 and computed on the CPU, so every device has the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.plan.config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class RopeTable:
    """cos, sin [num_positions, D], fp32 unless rounded by `to`, for positions 0, 1, ..., times the attention scaling.

    The first D/2 columns of `sin` are -sin, the others +sin, as `rotate` expects.
    """

    cos: Tensor
    sin: Tensor

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions start to stop, each [stop - start, D], as views."""
        return self.cos[start:stop], self.sin[start:stop]

    def starts_like(self, other: RopeTable) -> bool:
        """Tell whether the rows that both tables have are equal."""
        count = min(len(self.cos), len(other.cos))
        ours, theirs = self.rows(0, count), other.rows(0, count)
        return all(torch.equal(one, another) for one, another in zip(ours, theirs, strict=True))

    def to(self, dtype: torch.dtype) -> RopeTable:
        """The table rounded to the dtype of the rows that it will rotate, so that `rotate` need not round it again."""
        return RopeTable(self.cos.to(dtype), self.sin.to(dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] (any float dtype, may be a view) by cos, sin [T, D] of a RopeTable -> new [T, H, D].

    The tables are rounded to x's dtype first and every operation rounds separately, so the bits equal those of
    transformers. There is no fused multiply-add, whose rounding could depend on a row's place in memory.
    """
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def rope_table(config: ModelConfig, num_positions: int, capacity: int, device: torch.device | str) -> RopeTable:
    """The table of positions 0 to `num_positions` - 1 on `device`: 8 * num_positions * D bytes.

    capacity: see `inverse_frequencies`. Temporary memory: the same number of bytes on the host.
    """
    frequencies, scaling = inverse_frequencies(config, capacity)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return RopeTable(torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device))


def inverse_frequencies(config: ModelConfig, capacity: int) -> tuple[Tensor, float]:
    """(f fp32 [D/2] on the CPU, attention scaling: the factor on cos and sin) for all five kinds of scaling.

    capacity: the largest length in tokens that the request may reach. Only `dynamic` depends on it. transformers
    recomputes these frequencies as the sequence grows, so keys of one sequence are rotated at different frequencies and
    the result depends on how tokens are grouped into forwards. Here a request has one set of frequencies, so
    speculation, which groups tokens differently, does not change the result. ValueError for an unknown kind.
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
    """Stretch of dynamic NTK (bloc97, emozilla 2023; YaRN, section 3.3), 1 up to a capacity of `max_positions`."""
    return factor * max(capacity, max_positions) / max_positions - (factor - 1)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """[D/2] -> [D/2]. Llama 3.1: pairs with at least `high_freq_factor` full turns within the pretrained length keep
    their frequency, those with fewer than `low_freq_factor` are divided by the factor, those between are blended."""
    original = _original_positions(scaling)
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(wavelengths: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """[D/2] -> [D/2]. YaRN (Peng et al. 2023), section 3.2, "NTK-by-parts": pairs with more than `beta_fast` turns
    within the pretrained length keep their frequency, those with fewer than `beta_slow` are divided by the factor, and
    a linear ramp over the pair's index blends those between. `truncate` rounds the ends of the ramp outwards to whole
    pairs, as the authors' code does."""
    original = _original_positions(scaling)
    pairs = len(wavelengths)

    def pair_that_turns(times: float) -> float:
        return 2 * pairs * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001  # avoids a division by zero, as the authors' code does
    ramp = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def yarn_attention_scaling(scaling: RopeScaling) -> float:
    """The factor on cos and sin. Its square is YaRN's 1/t on the logits (section 3.4).

    It is `attention_factor` if given, otherwise 0.1 ln(factor) + 1. With DeepSeek's `mscale` and `mscale_all_dim` it is
    the ratio of two such terms, whose logarithms are multiplied by them.
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
