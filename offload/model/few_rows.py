"""A few rows through a model's layers, by the CPU's kernels: one call before and one after each attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload.kernels.products import Ending, Step, Steps, norm_heads, room_to_widen
from offload.model.sums import OneRank, Sums
from offload.native.interface import Library
from offload.plan.config import ModelConfig
from offload.weights.layout import LayerWeights, Linear

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
        self._layers: dict[int, tuple[LayerWeights, Steps, list[Steps]]] = {}
        self._views: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def rows(self, num_rows: int) -> Tensor:
        """[num_rows, hidden], for the caller to fill; `layer` works on them."""
        if num_rows > self._most:
            self._allocate(max(num_rows, 8))
        return self._x[:num_rows]

    def layer(self, layer: int, weights: LayerWeights, num_rows: int, attend: Attend) -> None:
        """The first `num_rows` rows, in place."""
        before, after = self._steps(weights)
        before.run(num_rows)
        q, k, v = self._heads(num_rows)
        if weights.q_norm is not None and weights.k_norm is not None:
            norm_heads(self._kernels, q, weights.q_norm, self._config.rms_norm_eps)
            norm_heads(self._kernels, k, weights.k_norm, self._config.rms_norm_eps)
        after[0].read(attend(layer, q, k, v))
        for steps in after:
            steps.run(num_rows)
            if not self._alone:
                self._x[:num_rows] += self._sums.total(self._part[:num_rows])

    def logits(self, hidden: Tensor, norm: Tensor, head: Linear) -> Tensor:
        """hidden [n, hidden] -> [n, V]."""
        hidden = hidden.contiguous()
        num_rows = hidden.shape[0]
        out = hidden.new_empty(num_rows, head.weight.shape[0])
        step = _step(hidden, head, out, norm, epsilon=self._config.rms_norm_eps)
        Steps(self._kernels, [step], room_to_widen(*hidden.shape)).run(num_rows)
        return out

    def _allocate(self, most: int) -> None:
        config, self._most = self._config, most
        heads = config.num_heads + 2 * config.num_kv_heads
        widths = (config.hidden_size, heads * config.head_dim, config.num_heads * config.head_dim)
        self._x, self._qkv, self._attended = (torch.empty(most, width, dtype=self._dtype) for width in widths)
        self._inner = torch.empty(most, config.intermediate_size, dtype=self._dtype)
        self._widened = room_to_widen(most, max(*widths, config.intermediate_size))
        self._part = self._x if self._alone else torch.empty_like(self._x)
        self._layers.clear()
        self._views.clear()

    def _steps(self, weights: LayerWeights) -> tuple[Steps, list[Steps]]:
        """Of a layer: up to its attention, and after it, cut where ranks sum."""
        if id(weights) not in self._layers:
            epsilon = self._config.rms_norm_eps
            ending: Ending = "add" if self._alone else "write"
            qkv = _step(self._x, weights.qkv, self._qkv, weights.input_norm, epsilon=epsilon)
            o = _step(self._attended, weights.o, self._part, ending=ending)
            gate = _step(self._x, weights.gate_up, self._inner, weights.post_norm, "gate", epsilon)
            down = _step(self._inner, weights.down, self._part, ending=ending)
            after = [[o, gate, down]] if self._alone else [[o], [gate, down]]
            made = (
                Steps(self._kernels, [qkv], self._widened),
                [Steps(self._kernels, steps, self._widened) for steps in after],
            )
            self._layers[id(weights)] = (weights, *made)
        return self._layers[id(weights)][1:]

    def _heads(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, H_kv, D] among the products' results."""
        if num_rows not in self._views:
            config = self._config
            heads = self._qkv[:num_rows].view(num_rows, -1, config.head_dim)
            q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
            self._views[num_rows] = q, k, v
        return self._views[num_rows]


def _step(
    x: Tensor, linear: Linear, out: Tensor, norm: Tensor | None = None, ending: Ending = "write", epsilon: float = 0.0
) -> Step:
    return Step(x, linear.weight, linear.bias, out, norm, ending, epsilon)
