"""Buffers of the CPU's kernels for the mixers of layers, and the products that run in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offload.config.mixers import LOW_RANK_PARTS, Attention, DeltaRule, Latent, Mixer
from offload.config.model import ModelConfig
from offload.config.networks import Activation
from offload.kernels.norms import NormWeights
from offload.kernels.products import Ending, Step, divided, widened_floats
from offload.model.heads import gated_heads
from offload.model.layer import Attend, LayerStep, Recur
from offload.weights.layout import LayerWeights
from offload.weights.linear import Linear, Parts


class Views(NamedTuple):
    """Views of projected rows. rows: q [T, H * D], k and v [T, H_kv * D]; of a layer that shares those of another, q
    alone. v has its own buffer where values are the keys. heads: the same by heads, [T, H, D]. gate: None without one.
    of_index: an indexer's queries and keys, if there is one."""

    rows: Sequence[Tensor]
    heads: Sequence[Tensor]
    gate: Tensor | None
    of_index: Sequence[Tensor]


class Room:
    """Buffers for mixers of one shape and up to `most` rows: the first product's output, and the mixer's."""

    def __init__(self, mixer: Mixer, most: int, dtype: torch.dtype) -> None:
        self._mixer = mixer
        self.qkv = torch.empty(most, sum(mixer.parts), dtype=dtype)
        self.mixed = torch.empty(most, mixer.out_size, dtype=dtype)
        values = mixer.kv_size if isinstance(mixer, Attention) and mixer.values_are_keys else 0
        self._values = torch.empty(most, values, dtype=dtype)
        if isinstance(mixer, Attention) and mixer.latent is not None:
            self._make_latent(mixer.latent, mixer.num_heads, most, dtype)
        if isinstance(mixer, DeltaRule) and mixer.low_rank:
            self._rows = torch.empty(most, sum(mixer.row_parts), dtype=dtype)
        self._views: dict[int, Views] = {}

    def _make_latent(self, latent: Latent, heads: int, most: int, dtype: torch.dtype) -> None:
        """queries: [most, H * query_dim]. absorbed, values: [most, H * rank], queries times their heads' keys, and
        attended rows. Each head has scratch."""
        queries = torch.empty(most, heads * latent.query_dim, dtype=dtype) if latent.query_rank else self.qkv
        self.queries = queries[:, : heads * latent.query_dim]
        self.absorbed, self.values = (torch.empty(most, heads * latent.rank, dtype=dtype) for _ in range(2))
        self._scratch = torch.empty(heads, 1, widened_floats(most, max(latent.rank, latent.plain))).expand(-1, 2, -1)

    def mixer_steps(self, step: LayerStep, weights: LayerWeights) -> tuple[list[Step], list[Step]]:
        """The further products of a mixer, before and after the step at which a cache attends or recurs; of another
        step none."""
        if isinstance(step, Recur) and step.low_rank is not None:
            places = zip(LOW_RANK_PARTS, step.low_rank, strict=True)
            rows, wide = (each.split(sizes, 1) for each, sizes in self._low_rank(step))
            return [own for part, linear in places for own in product_steps(rows[part], linear, wide[part])], []
        if not isinstance(step, Attend) or (latent := step.attention.latent) is None:
            return [], []
        return self._latent_steps(latent, step.attention.num_heads, weights)

    def widened(self, step: Recur, rows: Tensor) -> Tensor:
        """The rows that a recurrence takes: projected ones, or with gates and times of low rank, which are there
        already."""
        if step.low_rank is None:
            return rows
        (_, sizes), (wide, own_sizes) = self._low_rank(step)
        found = wide[: len(rows)]
        parts = zip(found.split(own_sizes, 1), rows.split(sizes, 1), strict=True)
        for part, (into, projected) in enumerate(parts):
            if part not in LOW_RANK_PARTS:
                into.copy_(projected)
        return found

    def _low_rank(self, step: Recur) -> tuple[tuple[Tensor, tuple[int, ...]], tuple[Tensor, tuple[int, ...]]]:
        """Buffers and their parts: of projected rows, and of those with gates and times."""
        return (self.qkv, step.recurrence.parts), (self._rows, step.recurrence.row_parts)

    def open_heads(self, attention: Attention, num_rows: int) -> None:
        """Multiply the output of latent attention by the function of its gate."""
        mixed = self.mixed[:num_rows]
        mixed.copy_(gated_heads(attention, mixed, self.qkv[:num_rows, -attention.gate_size :]))

    def _latent_steps(self, latent: Latent, heads: int, weights: LayerWeights) -> tuple[list[Step], list[Step]]:
        assert weights.k_b is not None
        assert weights.v_b is not None
        before = list[Step]()
        if weights.q_b is not None:
            before = product_steps(self.qkv[:, : latent.query_rank], weights.q_b, self.queries, weights.q_norm)
        plain = [head[:, : latent.plain] for head in self.queries.chunk(heads, 1)]
        keys = self._by_heads(plain, weights.k_b, self.absorbed)
        return [*before, *keys], self._by_heads(self.values.chunk(heads, 1), weights.v_b, self.mixed)

    def _by_heads(self, rows: Sequence[Tensor], linear: Linear, out: Tensor) -> list[Step]:
        """A step for the rows of each head."""
        assert not isinstance(linear.weight, Parts)
        heads = zip(rows, divided(linear.weight, len(rows)), out.chunk(len(rows), 1), self._scratch, strict=True)
        return [
            Step(own, weight, None, made, room=room, beside=number > 0)
            for number, (own, weight, made, room) in enumerate(heads)
        ]

    def views(self, num_rows: int) -> Views:
        """Views of the first `num_rows` rows."""
        if num_rows not in self._views:
            attention = self._mixer
            assert isinstance(attention, Attention)
            parts = list(self.qkv[:num_rows].split(attention.parts, 1))
            index = [parts.pop() for _ in range(2)] if attention.indexer is not None else []
            gate = parts.pop() if attention.gate else None
            if attention.values_are_keys and not attention.shares:
                parts.append(self._values[:num_rows])
            heads = [part.unflatten(1, (-1, attention.head_dim)) for part in parts]
            self._views[num_rows] = Views(parts, heads, gate, index[::-1])
        return self._views[num_rows]


def rooms(config: ModelConfig, most: int, dtype: torch.dtype) -> list[Room]:
    """A room for each layer; layers with mixers of the same shape share one."""
    made: dict[tuple[object, ...], Room] = {}
    found = []
    for block in config.blocks:
        own = block.mixer
        same = ("head_dim", "values_are_keys", "gate", "shares", "latent", "row_parts", "indexer")
        key = (own.parts, *(getattr(own, name, None) for name in same))
        if key not in made:
            made[key] = Room(own, most, dtype)
        found.append(made[key])
    return found


def product_steps(
    x: Tensor,
    linear: Linear,
    out: Tensor,
    norm: NormWeights | None = None,
    ending: Ending = "write",
    factor: float = 1.0,
    activation: Activation = "silu",
) -> list[Step]:
    """A step for each part of the matrix. With the ending "gate", both halves are one step."""
    weight, bias = linear.weight, linear.bias
    if not isinstance(weight, Parts):
        return [Step(x, weight, bias, out, norm, ending, factor, activation)]
    if ending == "gate":
        first, up = weight.parts
        return [Step(x, first, bias, out, norm, ending, factor, activation, up)]
    steps, end = [], 0
    for part in weight.parts:
        own = slice(end, end := end + part.shape[0])
        steps.append(Step(x, part, None if bias is None else bias[own], out[:, own], norm, ending, factor, activation))
    return steps
