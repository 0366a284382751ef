"""Rotary position embeddings (RoFormer, Su et al. 2021, section 3.2.2), with the scalings of Hugging Face configs.

Pair i of a head's D/2 pairs is rotated by `position * f_i`; the pairs are (x[i], x[i + D/2]), the order in which
weights are read (weights/tensors.head_order). Frequencies, angles and tables are fp32 and computed on the CPU, so every
device has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.config.model import ModelConfig
from offload.config.rope import PROPORTIONAL, Rope


@dataclass(frozen=True)
class RopeTable:
    """A table of rotations: cos, sin [num_positions, D], fp32 unless rounded by `to`, for positions 0, 1, ..., times
    the attention scaling.

    The first D/2 columns of `sin` are -sin, the others +sin, as `rotate` expects. A table may be narrower than heads:
    then the first numbers of both halves of a head are rotated. growth: [num_positions], factors of rotated queries;
    None for no factors.
    """

    cos: Tensor
    sin: Tensor
    growth: Tensor | None = None

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions start to stop, each [stop - start, D], as views."""
        return self.cos[start:stop], self.sin[start:stop]

    def rotated(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """q and k [T, H, D] at positions `start` and on -> both rotated, and q times its growth."""
        stop = start + len(q)
        growth = None if self.growth is None else self.growth[start:stop]
        return rotate_queries(q, self.rows(start, stop), growth), rotate(k, *self.rows(start, stop))

    def narrowed(self, width: int) -> RopeTable:
        """The rotations of heads of `width` numbers, at most D, of which the first pairs rotate as here."""

        def first(table: Tensor) -> Tensor:
            halves: Tensor = table.unflatten(1, (2, -1))
            return halves[:, :, : width // 2].flatten(1).contiguous()

        return RopeTable(first(self.cos), first(self.sin))

    def starts_like(self, other: RopeTable) -> bool:
        """Whether the common rows of both tables are equal. `growth` is not compared: it depends on positions alone."""
        count = min(len(self.cos), len(other.cos))
        ours, theirs = self.rows(0, count), other.rows(0, count)
        return all(torch.equal(one, another) for one, another in zip(ours, theirs, strict=True))

    def to(self, where: torch.dtype | str) -> RopeTable:
        """The table in another dtype, that of the rows to rotate, so that `rotate` need not round it again; or on
        another device."""
        return RopeTable(self.cos.to(where), self.sin.to(where), None if self.growth is None else self.growth.to(where))


@dataclass(frozen=True)
class ScoringWeights:
    """The weights that a layer's attention scores take, on the device. factors: of its rotated queries and keys, [D]
    each. sink_logits: of its heads, [H] fp32."""

    factors: tuple[Tensor, Tensor] | None = None
    sink_logits: Tensor | None = None


@dataclass(frozen=True)
class Scoring:
    """The attention scores of a layer. Queries and keys are rotated by `rope`, then multiplied by `weights`, [D] each
    for queries and for keys. Their products are multiplied by `scale`, None for D^-0.5, and capped by `cap`, see
    `Attention` of a model. sink_logits: [H] fp32; each row's softmax in head h has exp(sink_logits[h]) in its
    denominator, once beside those of all scores. It is neither scaled nor capped (transformers, modeling_gpt_oss).

    joined: a token has one row of as many numbers as a query, which is both its key and its value, see
    `Attention.latent`: caches have its halves in place of a key and of a value. `attend` gets it for k and for v."""

    rope: RopeTable
    scale: float | None = None
    cap: float | None = None
    weights: tuple[Tensor, Tensor] | None = None
    sink_logits: Tensor | None = None
    joined: bool = False

    def cached(self, rotated: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and v [T, H_kv, D] -> the two parts of a row that a cache has."""
        first, *second = rotated.chunk(2, -1) if self.joined else (rotated, v)
        return first, second[0]

    def rotated(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """q and k [T, H, D] at positions `start` and on -> both rotated and weighted."""
        q, k = self.rope.rotated(q, k, start)
        return self.weighed_queries(q), self.weighed_keys(k)

    def weighed_queries(self, rotated: Tensor) -> Tensor:
        """Rotated queries times their weights, in place."""
        return rotated if self.weights is None else rotated.mul_(self.weights[0])

    def weighed_keys(self, rotated: Tensor) -> Tensor:
        """Rotated keys times their weights, in place."""
        return rotated if self.weights is None else rotated.mul_(self.weights[1])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] (any float dtype, may be a view) by cos, sin [T, D] of a RopeTable -> new [T, H, D].

    The tables are rounded to x's dtype first and every operation rounds separately, so the bits equal those of
    transformers. There is no fused multiply-add, whose rounding could depend on a row's place in memory. A narrower
    table rotates the first numbers of both halves of D.
    """
    if (width := cos.shape[-1]) < x.shape[-1]:
        turned, still = x.unflatten(-1, (2, -1)).split([width // 2, (x.shape[-1] - width) // 2], -1)
        turned = rotate(turned.flatten(-2), cos, sin).unflatten(-1, (2, -1))
        return torch.cat([turned, still], -1).flatten(-2)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def rotate_queries(q: Tensor, table: tuple[Tensor, Tensor], growth: Tensor | None) -> Tensor:
    """Queries rotated by `rotate`, then multiplied by `growth` [T] in q's dtype."""
    rotated = rotate(q, *table)
    return rotated if growth is None else rotated.mul_(growth.to(q.dtype)[:, None, None])


def scorings(
    config: ModelConfig,
    num_positions: int,
    capacity: int,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    weights: Sequence[ScoringWeights] = (),
) -> tuple[Scoring, ...]:
    """The `Scoring` of each layer that attends, for positions 0 to `num_positions` - 1. Layers with equal rotations
    share a table of 2 * num_positions * D numbers of `dtype`. capacity: see `inverse_frequencies`. weights: of each
    layer; () if none has any."""
    tables: dict[tuple[Rope | None, int], RopeTable] = {}
    for kind, _ in config.kinds:
        if not kind.block.attends:
            continue
        rope = kind.block.attention.rope
        if (key := (rope, kind.head_dim)) not in tables:
            tables[key] = rope_table(kind, num_positions, capacity, device, rope).to(dtype)
    attentions = [block.attention for block in config.blocks if block.attends]
    given = weights or [ScoringWeights()] * len(attentions)
    assert [each.sink_logits for each in attentions] == [own.sink_logits is not None for own in given]
    return tuple(
        Scoring(
            tables[each.rope, each.head_dim],
            each.scale,
            each.cap,
            own.factors,
            own.sink_logits,
            each.latent is not None,
        )
        for each, own in zip(attentions, given, strict=True)
    )


def rope_table(
    config: ModelConfig, num_positions: int, capacity: int, device: torch.device | str, rope: Rope | None = None
) -> RopeTable:
    """The table of positions 0 to `num_positions` - 1 on `device`: 8 * num_positions * D bytes.

    rope: of some of the model's layers; None for no rotation. capacity: see `inverse_frequencies`. Numbers that are not
    rotated have cos 1 and sin 0. Temporary memory: the same number of bytes on the host.
    """
    half, positions = config.block.attention.table_dim // 2, torch.arange(num_positions, dtype=torch.float32)
    if rope is None:
        shape = num_positions, 2 * half
        return RopeTable(torch.ones(shape, device=device), torch.zeros(shape, device=device))
    frequencies, scaling = inverse_frequencies(config, capacity, rope)
    angles = torch.outer(positions, frequencies)
    still = 0, half - len(frequencies)
    cos, sin = pad(angles.cos() * scaling, still, value=1.0), pad(angles.sin() * scaling, still)
    growth = _growth(rope, positions).to(device) if rope.growth else None
    return RopeTable(torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device), growth)


def _growth(rope: Rope, positions: Tensor) -> Tensor:
    """The growth of queries, 1 + beta ln(1 + floor(position / original length)), fp32 [n]."""
    return 1 + rope.growth * torch.log(1 + torch.floor(positions / _original_positions(rope)))


def inverse_frequencies(config: ModelConfig, capacity: int, rope: Rope | None = None) -> tuple[Tensor, float]:
    """The frequencies for all kinds of scaling -> (f fp32 [D/2] on the CPU, fewer pairs where only a part of a head is
    rotated; attention scaling: the factor on cos and sin).

    rope: of some of the model's layers. capacity: the largest length in tokens that a request may reach; `dynamic` and
    `longrope` depend on it. transformers recomputes these frequencies as the sequence grows, so keys of one sequence
    are rotated at different frequencies and the result depends on how tokens are grouped into forwards. Here a request
    has one set of frequencies, so speculation, which groups tokens differently, does not change the result. Raises
    ValueError for an unknown kind.
    """
    scaling = rope or config.rope
    theta, dim = scaling.theta, scaling.rotated or config.head_dim
    if scaling.kind == PROPORTIONAL:  # the first pairs of a whole head's; as in transformers, which names no paper
        return _proportional(theta, dim, config.head_dim) / scaling.factor, 1.0
    if scaling.kind == "dynamic":
        theta *= _ntk_stretch(scaling.factor, capacity, config.max_positions) ** (dim / (dim - 2))
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # over 2 pi, in tokens
    frequencies = 1.0 / wavelengths
    if scaling.kind == "linear":  # position interpolation, Chen et al. 2023, arXiv 2306.15595
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "longrope":  # Ding et al. 2024, arXiv 2402.13753; the factor on cos and sin: transformers
        factors = scaling.long_factors if capacity > _original_positions(scaling) else scaling.short_factors
        return 1.0 / (torch.tensor(factors) * wavelengths), _longrope_attention_scaling(scaling)
    if scaling.kind == "yarn":
        return _yarn(wavelengths, theta, scaling), yarn_attention_scaling(scaling)
    if scaling.kind in ("default", "dynamic"):
        return frequencies, 1.0
    raise ValueError(f"unknown rope kind {scaling.kind!r}")


def _proportional(theta: float, rotated: int, head_dim: int) -> Tensor:
    """The frequencies [rotated / 2] of the first pairs, as if the whole head were rotated."""
    return 1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / head_dim)


def _ntk_stretch(factor: float, capacity: int, max_positions: int) -> float:
    """The stretch of dynamic NTK (bloc97, emozilla 2023; YaRN, section 3.3), 1 up to a capacity of `max_positions`."""
    return factor * max(capacity, max_positions) / max_positions - (factor - 1)


def _llama3(frequencies: Tensor, scaling: Rope) -> Tensor:
    """Llama 3.1's frequencies, [D/2] -> [D/2]: pairs with at least `high_freq_factor` full turns within the pretrained
    length keep their frequency, pairs with fewer than `low_freq_factor` are divided by the factor, and pairs between
    are blended."""
    original = _original_positions(scaling)
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(wavelengths: Tensor, theta: float, scaling: Rope) -> Tensor:
    """YaRN's frequencies, [D/2] -> [D/2] (Peng et al. 2023, section 3.2, "NTK-by-parts"): pairs with more than
    `beta_fast` turns within the pretrained length keep their frequency, pairs with fewer than `beta_slow` are divided
    by the factor, and a linear ramp over the pair's index blends the pairs between. `truncate` rounds the ends of the
    ramp outwards to whole pairs, as the authors' code does."""
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


def yarn_attention_scaling(scaling: Rope) -> float:
    """YaRN's factor on cos and sin. Its square is YaRN's 1/t on the logits (section 3.4).

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


def _longrope_attention_scaling(scaling: Rope) -> float:
    """LongRoPE's factor on cos and sin: sqrt(1 + ln(factor) / ln(original length)), unless the config names it."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(_original_positions(scaling)))


def _original_positions(scaling: Rope) -> int:
    if scaling.original_max_positions is None:
        raise ValueError(f"rope kind {scaling.kind} needs original_max_positions")
    return scaling.original_max_positions
