"""The weights of the inputs of layers: a table of which each token reads one row, and the projection of its embedding.

The table is larger than all layers together, and a pass reads a few rows of it: they are read from the mapped file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offload.config.layer_table import LayerTable
from offload.formats.stored import StoredMatrix
from offload.kernels.norms import NormWeights
from offload.transfer.memory import sent
from offload.weights.linear import Linear, numbers


@dataclass(frozen=True)
class LayerInputWeights:
    """The table [V, L * size] on the host, as its file has it; the projection [L * size, hidden] and the norm [size] on
    the device. dtype: of the rows."""

    described: LayerTable
    table: Tensor | StoredMatrix
    projection: Linear
    norm: NormWeights
    device: torch.device
    dtype: torch.dtype

    def rows(self, tokens: Tensor, layer: int | None = None) -> Tensor:
        """The tokens' rows of the table: int64 [T] -> [T, L * size] on the device, or [T, size] of one layer. On a GPU
        the host waits for tokens that are there."""
        size, tokens = self.described.size, tokens.cpu()
        first, stop = (0, self.table.shape[1]) if layer is None else (layer * size, (layer + 1) * size)
        if isinstance(self.table, Tensor):
            found = self.table[:, first:stop].index_select(0, tokens).to(self.dtype)
        else:
            found = self._decoded(self.table, tokens, first, stop)
        return sent(found, self.device)

    def projection_of(self, layer: int) -> Linear:
        """The rows of the projection for one layer."""
        return self._projections[layer]

    def _decoded(self, table: StoredMatrix, tokens: Tensor, first: int, stop: int) -> Tensor:
        """Columns of rows in blocks: whole blocks are decoded, and whole rows with a scale of their own."""
        kind = table.encoding
        begin, end = first // kind.numbers * kind.numbers, -(-stop // kind.numbers) * kind.numbers
        if kind.tail:
            begin, end = 0, table.shape[1]
        own = table.rows[:, kind.row_bytes(begin) - kind.tail : kind.row_bytes(end)].index_select(0, tokens)
        return numbers(StoredMatrix(own, kind), self.dtype)[:, first - begin : stop - begin]

    @cached_property
    def _projections(self) -> list[Linear]:
        weight, size = self.projection.weight, self.described.size
        assert isinstance(weight, Tensor | StoredMatrix)
        return [Linear(weight[first : first + size], None) for first in range(0, weight.shape[0], size)]
