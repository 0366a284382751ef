"""Layers run by the CPU's kernels over a few rows: all steps between two attentions are one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.config.block import Block
from offload.config.mixers import LOW_RANK_PARTS, Attention, DeltaRule, Latent, Mixer
from offload.config.model import ModelConfig
from offload.config.networks import Activation
from offload.kernels.experts import ExpertHomes
from offload.kernels.experts_cpu import run_experts
from offload.kernels.norms import NormWeights, add_normed, normed_heads
from offload.kernels.products import Ending, Step, Steps, divided, norm_heads, room_to_widen, widened_floats
from offload.model.heads import gated_heads, normed_over_ranks, norms_over_ranks
from offload.model.latent import in_halves, values_of
from offload.model.layer import (
    Add,
    Attend,
    Gate,
    Join,
    LayerStep,
    Mix,
    MixRows,
    Operand,
    Product,
    Recur,
    Scale,
    steps_of,
)
from offload.model.sums import OneRank, Sums
from offload.native.interface import Library
from offload.weights.layout import LayerWeights
from offload.weights.linear import Linear, Parts


@dataclass(frozen=True)
class _OpenHeads:
    """The gate of latent attention, over its output."""

    attention: Attention


_Step = Steps | Attend | _OpenHeads | Recur | Mix | Join | Add | Gate | Scale
_Prepared = Sequence[_Step]


class NativeLayers:
    """Executor of layers' steps over rows in its own buffers. A row's bits do not depend on the rows beside it.

    Calls are prepared once for each set of weights, whose addresses do not change: streamed weights use a few staging
    buffers.
    """

    def __init__(
        self,
        kernels: Library,
        config: ModelConfig,
        dtype: torch.dtype,
        sums: Sums,
        experts: Sequence[ExpertHomes | None],
    ) -> None:
        """experts: of each layer."""
        self._kernels, self._config, self._dtype, self._sums, self._experts = kernels, config, dtype, sums, experts
        self._alone = isinstance(sums, OneRank)
        self._most = 0
        self._layers: dict[tuple[int, int], tuple[LayerWeights, _Prepared]] = {}  # by identity of weights and block
        self._rooms: list[_Room] = []  # one per layer

    def rows(self, num_rows: int) -> Tensor:
        """The hidden rows [num_rows, hidden], for the caller to fill and to give to `run`."""
        if num_rows > self._most:
            self._allocate(max(num_rows, 8))
        return self._operands["x"][:num_rows]

    def run(
        self, layer: int, weights: LayerWeights, x: Tensor, caches: MixRows, *, given: Tensor | None = None
    ) -> None:
        """Run a layer on x [T, hidden], which `rows` returned, in place. given: the layer's input [T, size], if it has
        one."""
        num_rows, room, mixed = len(x), self._rooms[layer], None
        for step in self._prepared(layer, weights, room):
            match step:
                case Steps():
                    if mixed is not None:
                        step.read(mixed)
                    step.run(num_rows)
                    mixed = None
                case Attend():
                    if step.attention.latent is None:
                        mixed = self._attended(layer, step, room, num_rows, caches)
                    else:
                        self._attend_latent(layer, step, step.attention.latent, room, num_rows, caches)
                case Recur():
                    rows = room.qkv if step.read == "qkv" else self._operands[step.read]
                    mixed = caches.recur(layer, room.widened(step, rows[:num_rows]), step.weights)
                case _OpenHeads():
                    room.open_heads(step.attention, num_rows)
                case Mix():
                    homes = self._experts[layer]
                    assert homes is not None
                    beside = self._operands["beside"][:num_rows] if step.adds else None
                    latents = self._operands["latent"][:num_rows] if step.mixture.experts.latent else None
                    made = run_experts(step.mixture, homes, x, beside, latents=latents, kernels=self._kernels)
                    self._operands[step.out][:num_rows] = made
                case Join():
                    made, beside = (self._operands[name][:num_rows] for name in ("made", "beside"))
                    made.copy_(step(made, beside, self._sums))
                case Add():
                    part = self._operands[step.read][:num_rows]
                    add_normed(x, part if step.is_whole else self._sums.total(part), step.norm, step.factor)
                case Gate():
                    assert given is not None
                    self._operands["gated"][:num_rows] *= given
                case _:
                    x *= step.factor

    def multiply(self, x: Tensor, linear: Linear, norm: NormWeights | None = None) -> Tensor:
        """The product of a matrix outside layers, such as the head, with x [n, inputs] -> [n, outputs]. norm: of x
        before it."""
        x = x.contiguous()
        num_rows = x.shape[0]
        out = x.new_empty(num_rows, linear.weight.shape[0])
        Steps(self._kernels, _steps_of(x, linear, out, norm), room_to_widen(*x.shape)).run(num_rows)
        return out

    def _allocate(self, most: int) -> None:
        kinds = [kind.block for kind, _ in self._config.kinds]
        self._most, hidden, inner = most, self._config.hidden_size, max(each.feed_forward.size for each in kinds)
        given = max(each.input_size for each in kinds)
        latent = self._config.experts.latent if self._config.experts else 0
        widths: dict[Operand, int] = {"x": hidden, "inner": inner, "part": hidden, "made": hidden, "beside": hidden}
        besides = [each.beside for each in kinds if each.beside is not None]
        states = max((sum(each.parts) for each in besides), default=0)
        recurred = max((each.out_size for each in besides), default=0)
        widths |= {"gated": given, "latent": latent, "states": states, "recurred": recurred}
        self._operands = {name: torch.empty(most, width, dtype=self._dtype) for name, width in widths.items()}
        mixers = (max(sum(each.mixer.parts), each.mixer.out_size) for each in kinds)
        widest = max(*widths.values(), *mixers)
        self._widened = room_to_widen(most, widest)
        self._layers.clear()
        self._rooms = _rooms(self._config, most, self._dtype)

    def _prepared(self, layer: int, weights: LayerWeights, room: _Room) -> _Prepared:
        """A layer's prepared steps; consecutive native steps are one call."""
        block = self._config.blocks[layer]
        key = id(weights), id(block)
        if key not in self._layers:
            found, products = list[_Step](), list[Step]()
            for step in steps_of(block, weights, alone=self._alone):
                if isinstance(step, Product | Add) and (native := self._native(step, block, room)):
                    products += native
                    continue
                before, after = room.mixer_steps(step, weights)
                found += [*self._call([*products, *before]), step]  # type: ignore[list-item]
                if isinstance(step, Attend) and step.attention.latent is not None and step.attention.gate:
                    found += [*self._call(after), _OpenHeads(step.attention)]
                    after = []
                products = after
            self._layers[key] = weights, [*found, *self._call(products)]
        return self._layers[key][1]

    def _call(self, products: list[Step]) -> list[Steps]:
        return [Steps(self._kernels, products, self._widened)] if products else []

    def _native(self, step: Product | Add, block: Block, room: _Room) -> list[Step]:
        """The native steps of a step; empty where there is none: ranks have to sum first, say."""
        inner = self._operands["inner"][:, : block.feed_forward.size]
        own = self._operands | {"qkv": room.qkv, "mixed": room.mixed, "inner": inner}
        if isinstance(step, Product):
            described = step.norm, step.ending, step.factor, step.activation
            return _steps_of(own[step.read], step.linear, own[step.out], *described)
        if not (self._alone or step.is_whole) or step.norm is None:
            return []
        return [Step(own[step.read], None, None, own["x"], step.norm, "add", step.factor)]

    def _attended(self, layer: int, step: Attend, room: _Room, num_rows: int, caches: MixRows) -> Tensor:
        """The attention's output [T, H * D]. Heads are normed in place, in the room."""
        attention, weights = step.attention, step.weights
        rows, heads, gate = room.views(num_rows)
        if attention.values_are_keys and not attention.shares:
            rows[2].copy_(rows[1])
        if norms_over_ranks(self._config, self._sums):
            for part, normed in zip(rows, normed_over_ranks(rows[0], rows[1], weights, self._sums), strict=False):
                part.copy_(normed)
        else:
            for part, norm in zip(rows, (weights.q_norm, weights.k_norm), strict=False):
                if norm is not None and attention.weighs_heads:
                    part.copy_(normed_heads(part, norm, attention.head_dim))
                elif norm is not None:
                    norm_heads(self._kernels, part, norm)
        if weights.v_norm is not None:
            norm_heads(self._kernels, rows[2], weights.v_norm)
        q, *own = heads
        k, v = own or (None, None)
        attended = caches.attend(layer, q, k, v)
        return attended if gate is None else gated_heads(attention, attended, gate)

    def _attend_latent(
        self, layer: int, step: Attend, latent: Latent, room: _Room, num_rows: int, caches: MixRows
    ) -> None:
        """Latent attention between two steps, from and to the room's buffers."""
        norm, heads = step.weights.k_norm, step.attention.num_heads
        assert norm is not None
        low = room.qkv[:num_rows].split(step.attention.parts, 1)[1]
        norm_heads(self._kernels, low[:, : latent.rank], norm)
        plain, rotated = (rows[:num_rows].unflatten(1, (heads, -1)) for rows in (room.absorbed, room.queries))
        q = in_halves(rotated[..., latent.plain :], plain)
        held = in_halves(low[:, latent.rank :], low[:, : latent.rank])[:, None]
        values = room.values[:num_rows].unflatten(1, (heads, 2, -1))
        values.copy_(values_of(caches.attend(layer, q, held, held), latent))


class _Room:
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
        self._views: dict[int, tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None]] = {}

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
            return [own for part, linear in places for own in _steps_of(rows[part], linear, wide[part])], []
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
            before = _steps_of(self.qkv[:, : latent.query_rank], weights.q_b, self.queries, weights.q_norm)
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

    def views(self, num_rows: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None]:
        """Views of the first `num_rows` rows: q [T, H * D], k and v [T, H_kv * D]; the same three by heads,
        [T, H, D]; the gate, if there is one. v has its own buffer where values are the keys. Of a layer that shares
        those of another, q alone."""
        if num_rows not in self._views:
            attention = self._mixer
            assert isinstance(attention, Attention)
            parts = list(self.qkv[:num_rows].split(attention.parts, 1))
            gate = parts.pop() if attention.gate else None
            if attention.values_are_keys and not attention.shares:
                parts.append(self._values[:num_rows])
            heads = [part.unflatten(1, (-1, attention.head_dim)) for part in parts]
            self._views[num_rows] = parts, heads, gate
        return self._views[num_rows]


def _rooms(config: ModelConfig, most: int, dtype: torch.dtype) -> list[_Room]:
    """A room for each layer; layers with mixers of the same shape share one."""
    made: dict[tuple[object, ...], _Room] = {}
    found = []
    for block in config.blocks:
        own = block.mixer
        same = ("head_dim", "values_are_keys", "gate", "shares", "latent", "row_parts")
        key = (own.parts, *(getattr(own, name, None) for name in same))
        if key not in made:
            made[key] = _Room(own, most, dtype)
        found.append(made[key])
    return found


def _steps_of(
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
