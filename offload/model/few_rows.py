"""A few rows through a model's layers, by the CPU's kernels: one call before and one after each attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.config.block import Activation, Attention
from offload.config.model import ModelConfig
from offload.kernels.norms import NormWeights, add_normed, norm_over, normed_heads
from offload.kernels.products import Ending, Step, Steps, norm_heads, room_to_widen
from offload.model.sums import OneRank, Sums
from offload.native.interface import Library
from offload.weights.layout import LayerWeights
from offload.weights.linear import Linear, Parts

# (layer, q [T, H, D], k and v [T, H_kv, D]) -> [T, H * D], contiguous
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class FewRows:
    """Layers over rows that it keeps, [n, hidden]. A row's bits do not depend on the rows beside it.

    Layers are known by their weights, which stay where they are: streamed ones come to a few staging buffers.
    """

    def __init__(self, kernels: Library, config: ModelConfig, dtype: torch.dtype, sums: Sums) -> None:
        self._kernels, self._config, self._dtype, self._sums = kernels, config, dtype, sums
        self._alone = isinstance(sums, OneRank)
        self._most = 0
        self._layers: dict[tuple[int, int], tuple[LayerWeights, Steps, list[Steps]]] = {}  # by weights and room
        self._rooms: list[_Room] = []  # of each layer

    def rows(self, num_rows: int) -> Tensor:
        """[num_rows, hidden], for the caller to fill; `layer` works on them."""
        if num_rows > self._most:
            self._allocate(max(num_rows, 8))
        return self._x[:num_rows]

    def layer(self, layer: int, weights: LayerWeights, num_rows: int, attend: Attend) -> None:
        """The first `num_rows` rows, in place."""
        room = self._rooms[layer]
        attention = room.attention
        before, after = self._steps(weights, room)
        before.run(num_rows)
        rows, heads, gate = room.views(num_rows)
        if attention.values_are_keys:
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
        attended = attend(layer, *heads)
        after[0].read(attended if gate is None else attended * gate.sigmoid())
        for steps, after_norm in zip(after, (weights.after_attention, weights.after_feed_forward), strict=False):
            steps.run(num_rows)
            if not self._alone:
                total = self._sums.total(self._part[:num_rows])
                add_normed(self._x[:num_rows], total, after_norm, self._config.block.scale)
        if weights.factor is not None:
            self._x[:num_rows] *= weights.factor

    def logits(self, hidden: Tensor, norm: NormWeights, head: Linear) -> Tensor:
        """hidden [n, hidden] -> [n, V]."""
        hidden = hidden.contiguous()
        num_rows = hidden.shape[0]
        out = hidden.new_empty(num_rows, head.weight.shape[0])
        Steps(self._kernels, _steps_of(hidden, head, out, norm), room_to_widen(*hidden.shape)).run(num_rows)
        return out

    def _allocate(self, most: int) -> None:
        hidden, self._most = self._config.hidden_size, most
        inner = self._config.intermediate_size
        self._x, self._inner = (torch.empty(most, width, dtype=self._dtype) for width in (hidden, inner))
        attentions = [kind.block.attention for kind, _ in self._config.kinds]
        widest = max(hidden, inner, *(max(sum(each.parts), each.q_size) for each in attentions))
        self._widened = room_to_widen(most, widest)
        self._part = torch.empty_like(self._x)
        self._layers.clear()
        self._rooms = _rooms(self._config, most, self._dtype)

    def _steps(self, weights: LayerWeights, room: _Room) -> tuple[Steps, list[Steps]]:
        """Of a layer: up to its attention, and after it, cut where ranks sum."""
        key = id(weights), id(room)
        if key not in self._layers:
            before, after = self._described(weights, room)
            made = [Steps(self._kernels, steps, self._widened) for steps in after]
            self._layers[key] = (weights, Steps(self._kernels, before, self._widened), made)
        return self._layers[key][1:]

    def _described(self, weights: LayerWeights, room: _Room) -> tuple[list[Step], list[list[Step]]]:
        """See `_steps`."""
        block = self._config.block
        ending: Ending = "gate" if block.feed_forward.gated else "activate"
        norm = weights.before_attention if block.side_by_side else weights.before_feed_forward
        activation = block.feed_forward.activation
        inner = _steps_of(self._x, weights.gate_up, self._inner, norm, ending, activation=activation)
        qkv = _steps_of(self._x, weights.qkv, room.qkv, weights.before_attention)
        o = self._added(room.attended, weights.o, weights.after_attention)
        down = self._added(self._inner, weights.down, weights.after_feed_forward)
        before, after = ([*qkv, *inner], [o, down]) if block.side_by_side else (qkv, [o, [*inner, *down]])
        return before, [after[0] + after[1]] if self._alone else after

    def _added(self, x: Tensor, linear: Linear, norm: NormWeights | None) -> list[Step]:
        """What a part of a layer gives, added to the rows; of several ranks, written to be summed first."""
        factor = self._config.block.scale
        if self._alone and norm is None:
            return _steps_of(x, linear, self._x, ending="add", factor=factor)
        product = _steps_of(x, linear, self._part)
        return [*product, Step(self._part, None, None, self._x, norm, "add", factor)] if self._alone else product


class _Room:
    """Of heads of one shape: what a layer's first product gives, and what its attention does, for `most` rows."""

    def __init__(self, attention: Attention, most: int, dtype: torch.dtype) -> None:
        self.attention = attention
        self.qkv = torch.empty(most, sum(attention.parts), dtype=dtype)
        self.attended = torch.empty(most, attention.q_size, dtype=dtype)
        self._values = torch.empty(most, attention.kv_size if attention.values_are_keys else 0, dtype=dtype)
        self._views: dict[int, tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None]] = {}

    def views(self, num_rows: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None]:
        """q [T, H * D], k and v [T, H_kv * D], among the products' results where they have their own; the same by
        heads, [T, H, D]; the gate."""
        if num_rows not in self._views:
            attention = self.attention
            q, k, *others = self.qkv[:num_rows].split(attention.parts, 1)
            v, *gate = [self._values[:num_rows], *others] if attention.values_are_keys else others
            heads = [part.unflatten(1, (-1, attention.head_dim)) for part in (q, k, v)]
            self._views[num_rows] = (q, k, v), heads, gate[0] if gate else None
        return self._views[num_rows]


def _rooms(config: ModelConfig, most: int, dtype: torch.dtype) -> list[_Room]:
    """Of each layer; those whose heads are alike share theirs."""
    made: dict[tuple[object, ...], _Room] = {}
    found = []
    for block in config.blocks:
        own = block.attention
        key = own.parts, own.head_dim, own.values_are_keys
        if key not in made:
            made[key] = _Room(own, most, dtype)
        found.append(made[key])
    return found


def norms_over_ranks(config: ModelConfig, sums: Sums) -> bool:
    """Whether queries and keys are normed over heads that other ranks have."""
    return config.block.attention.norms_whole and sums.size > 1


def normed_over_ranks(q: Tensor, k: Tensor, weights: LayerWeights, sums: Sums) -> tuple[Tensor, Tensor]:
    """q [T, H * D] and k [T, H_kv * D] of this rank's heads -> the same, normed over all ranks' heads. Where ranks have
    the same KV heads, all are had by as many."""
    assert weights.q_norm is not None
    assert weights.k_norm is not None
    squares = sums.total(torch.stack([part.float().square().sum(1) for part in (q, k)], 1))
    return (
        norm_over(q, weights.q_norm, squares[:, :1], sums.size * q.shape[1]),
        norm_over(k, weights.k_norm, squares[:, 1:], sums.size * k.shape[1]),
    )


def _steps_of(
    x: Tensor,
    linear: Linear,
    out: Tensor,
    norm: NormWeights | None = None,
    ending: Ending = "write",
    factor: float = 1.0,
    activation: Activation = "silu",
) -> list[Step]:
    """A step for each part of the operator's matrix, but for a gate: of that both halves are one."""
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
