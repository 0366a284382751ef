"""Layers run by the CPU's kernels over a few rows: all steps between two attentions are one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload.config.block import Block
from offload.config.mixers import Attention, Latent
from offload.config.model import ModelConfig
from offload.kernels.experts import ExpertHomes
from offload.kernels.experts_cpu import MixtureCalls
from offload.kernels.norms import NormWeights, add_normed, normed_heads
from offload.kernels.products import HeadNorms, Step, Steps, room_to_widen
from offload.kernels.streams import inject
from offload.model.heads import gated_heads, index_rows, normed_over_ranks, norms_over_ranks
from offload.model.latent import in_halves, values_of
from offload.model.layer import (
    Add,
    AddNGrams,
    Attend,
    Gate,
    Inject,
    Join,
    LayerStep,
    Mean,
    Mix,
    MixRows,
    Operand,
    Product,
    Recur,
    Scale,
    steps_of,
)
from offload.model.native_room import Room, product_steps, rooms
from offload.model.ngrams import add_ngrams
from offload.model.streams import mean_of
from offload.model.sums import OneRank, Sums
from offload.native.interface import Library
from offload.weights.layout import LayerWeights
from offload.weights.linear import Linear
from offload.weights.streams import StreamWeights


class _MeanCalls:
    """A mean over streams whose two products are prepared."""

    def __init__(self, weights: StreamWeights, kernels: Library, rows: Mapping[str, Tensor], widened: Tensor) -> None:
        """rows: that all means share, read and written by each product. widened: see `Steps`."""
        self.weights, self._found = weights, dict[int, tuple[Tensor, Steps, Tensor]]()
        for linear, read, written in ((weights.low, "normed", "low"), (weights.up, "inner", "mixes")):
            x, out = rows[read], rows[written]
            self._found[id(linear)] = x, Steps(kernels, product_steps(x, linear, out), widened), out

    def multiply(self, x: Tensor, linear: Linear) -> Tensor:
        """The product of one of the two matrices, until the next product of a mean."""
        own, steps, out = self._found[id(linear)]
        own[: len(x)] = x
        steps.run(len(x))
        return out[: len(x)]


@dataclass(frozen=True)
class _OpenHeads:
    """The gate of latent attention, over its output."""

    attention: Attention


@dataclass(frozen=True)
class _Attention:
    """An attention, with the norms of the room's heads before it, or of its latent rows."""

    step: Attend
    norms: HeadNorms


_Step = (
    Steps | _Attention | _OpenHeads | Recur | MixtureCalls | Join | Add | _MeanCalls | Inject | AddNGrams | Gate | Scale
)  # fmt: skip
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
        self._layers: dict[tuple[int, int], tuple[LayerWeights, _Prepared]] = {}  # by identity of weights and by layer
        self._rooms: list[Room] = []  # one per layer

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
                case MixtureCalls():
                    step.run(num_rows)
                case _Attention():
                    if step.step.attention.latent is None:
                        mixed = self._attended(layer, step, room, num_rows, caches)
                    else:
                        self._attend_latent(layer, step, step.step.attention.latent, room, num_rows, caches)
                case Recur():
                    rows = room.qkv if step.read == "qkv" else self._operands[step.read]
                    mixed = caches.recur(layer, room.widened(step, rows[:num_rows]), step.weights)
                case _OpenHeads():
                    room.open_heads(step.attention, num_rows)
                case Join():
                    made, beside = (self._operands[name][:num_rows] for name in ("made", "beside"))
                    made.copy_(step(made, beside, self._sums))
                case Add():
                    part = self._operands[step.read][:num_rows]
                    add_normed(x, part if step.is_whole else self._sums.total(part), step.norm, step.factor)
                case _MeanCalls():
                    read = mean_of(x, step.weights, step.multiply)
                    self._operands["read"][:num_rows] = read.rows
                    self._operands["factors"][:num_rows] = read.factors
                case Inject():
                    part = self._operands[step.part][:num_rows]
                    part = part if step.is_whole else self._sums.total(part)
                    inject(x, part, self._operands["factors"][:num_rows])
                case AddNGrams():
                    assert given is not None
                    convolve = partial(caches.convolve, layer, weights=step.weights.convolution)
                    add_ngrams(x, step, given, self.multiply, convolve)
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
        Steps(self._kernels, product_steps(x, linear, out, norm), room_to_widen(*x.shape)).run(num_rows)
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
        count = 0 if self._config.streams is None else self._config.streams.count
        widths |= {"gated": given, "latent": latent, "states": states, "recurred": recurred}
        widths |= {"x": self._config.row_size, "read": hidden * (count > 0), "factors": count}
        self._operands = {name: torch.empty(most, width, dtype=self._dtype) for name, width in widths.items()}
        mixers = (max(sum(each.mixer.parts), each.mixer.out_size) for each in kinds)
        widest = max(*widths.values(), *mixers)
        self._widened = room_to_widen(most, widest)
        self._layers.clear()
        wide, streams = self._config.row_size, self._config.streams
        rank = 0 if streams is None else streams.rank
        of_means = {"normed": wide, "low": rank + count, "inner": rank, "mixes": wide} if count else {}
        self._of_means = {name: torch.empty(most, width, dtype=self._dtype) for name, width in of_means.items()}
        self._rooms = rooms(self._config, most, self._dtype)

    def _prepared(self, layer: int, weights: LayerWeights, room: Room) -> _Prepared:
        """A layer's prepared steps; consecutive native steps are one call."""
        block, key = self._config.blocks[layer], (id(weights), layer)
        if key not in self._layers:
            found, products = list[_Step](), list[Step]()
            for step in steps_of(block, weights, alone=self._alone):
                if isinstance(step, Product | Add) and (native := self._native(step, block, room)):
                    products += native
                    continue
                before, after = room.mixer_steps(step, weights)
                own = self._own(layer, step, room)
                found += [*self._call([*products, *before]), own]  # type: ignore[list-item]
                if isinstance(step, Attend) and step.attention.latent is not None and step.attention.gate:
                    found += [*self._call(after), _OpenHeads(step.attention)]
                    after = []
                products = after
            self._layers[key] = weights, [*found, *self._call(products)]
        return self._layers[key][1]

    def _call(self, products: list[Step]) -> list[Steps]:
        return [Steps(self._kernels, products, self._widened)] if products else []

    def _own(self, layer: int, step: LayerStep, room: Room) -> _Step | Product:
        """A step that is no product, with calls prepared."""
        match step:
            case Attend():
                return _Attention(step, HeadNorms(self._kernels, self._head_norms(step, room)))
            case Mix():
                return self._mixture(layer, step)
            case Mean():
                return _MeanCalls(step.weights, self._kernels, self._of_means, self._widened)
            case _:
                return step

    def _mixture(self, layer: int, step: Mix) -> MixtureCalls:
        homes, own = self._experts[layer], self._operands
        assert homes is not None
        beside, latents = own["beside"] if step.adds else None, own["latent"] if step.mixture.experts.latent else None
        places = own[step.read], own[step.out]
        return MixtureCalls(self._kernels, step.mixture, homes, *places, beside=beside, latents=latents)

    def _native(self, step: Product | Add, block: Block, room: Room) -> list[Step]:
        """The native steps of a step; empty where there is none: ranks have to sum first, say."""
        inner = self._operands["inner"][:, : block.feed_forward.size]
        own = self._operands | {"qkv": room.qkv, "mixed": room.mixed, "inner": inner}
        if isinstance(step, Product):
            described = step.norm, step.ending, step.factor, step.activation
            return product_steps(own[step.read], step.linear, own[step.out], *described)
        if not (self._alone or step.is_whole) or step.norm is None:
            return []
        return [Step(own[step.read], None, None, own["x"], step.norm, "add", step.factor)]

    def _head_norms(self, step: Attend, room: Room) -> list[tuple[Tensor, NormWeights]]:
        """The parts of the room's rows whose heads the kernels norm, and their norms."""
        attention, weights = step.attention, step.weights
        if attention.latent is not None:
            assert weights.k_norm is not None
            return [(room.qkv.split(attention.parts, 1)[1][:, : attention.latent.rank], weights.k_norm)]
        own = not norms_over_ranks(self._config, self._sums) and not attention.weighs_heads
        norms = (weights.q_norm, weights.k_norm) if own else (None, None)
        parts = zip(room.views(self._most)[0], (*norms, weights.v_norm), strict=False)
        return [(part, norm) for part, norm in parts if norm is not None]

    def _attended(self, layer: int, prepared: _Attention, room: Room, num_rows: int, caches: MixRows) -> Tensor:
        """The attention's output [T, H * D]. Heads are normed in place, in the room."""
        step = prepared.step
        attention, weights = step.attention, step.weights
        rows, heads, gate, index = room.views(num_rows)
        if attention.values_are_keys and not attention.shares:
            rows[2].copy_(rows[1])
        if norms_over_ranks(self._config, self._sums):
            for part, normed in zip(rows, normed_over_ranks(rows[0], rows[1], weights, self._sums), strict=False):
                part.copy_(normed)
        elif attention.weighs_heads:
            for part, norm in zip(rows, (weights.q_norm, weights.k_norm), strict=False):
                if norm is not None:
                    part.copy_(normed_heads(part, norm, attention.head_dim))
        prepared.norms.run(num_rows)
        q, *own = heads
        k, v = own or (None, None)
        if attention.indexer is None:
            attended = caches.attend(layer, q, k, v)
        else:
            assert k is not None
            assert v is not None
            attended = caches.attend_chosen(layer, q, k, v, index_rows(attention.indexer, weights, *index))
        return attended if gate is None else gated_heads(attention, attended, gate)

    def _attend_latent(
        self, layer: int, prepared: _Attention, latent: Latent, room: Room, num_rows: int, caches: MixRows
    ) -> None:
        """Latent attention between two steps, from and to the room's buffers."""
        attention = prepared.step.attention
        heads, low = attention.num_heads, room.qkv[:num_rows].split(attention.parts, 1)[1]
        prepared.norms.run(num_rows)
        plain, rotated = (rows[:num_rows].unflatten(1, (heads, -1)) for rows in (room.absorbed, room.queries))
        q = in_halves(rotated[..., latent.plain :], plain)
        held = in_halves(low[:, latent.rank :], low[:, : latent.rank])[:, None]
        values = room.values[:num_rows].unflatten(1, (heads, 2, -1))
        values.copy_(values_of(caches.attend(layer, q, held, held), latent))
