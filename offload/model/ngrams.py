"""N-gram embeddings in a pass: the rows that its tokens choose, and what these add to a layer's streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from offload.kernels.ngrams import chosen_rows, gated_values
from offload.model.layer import AddNGrams
from offload.weights.linear import Linear
from offload.weights.ngram_rows import NGramTable


class NGramInputs:
    """The rows of n-gram tables, by layer: inputs of the layers that have one."""

    def __init__(self, tables: Mapping[int, NGramTable]) -> None:
        self._tables = tables

    def of_pass(self, ids: Sequence[Tensor]) -> Tensor:
        """The rows of all tables side by side, [T, sum of widths] on the device. ids: of each segment, int64 [context +
        T], with those before it. The host reads them: no part of a graph."""
        chosen = {layer: self._chosen(layer, ids) for layer in self._tables}
        for layer, rows in chosen.items():
            self._tables[layer].begin(rows)
        return torch.cat([self._tables[layer].read(rows) for layer, rows in chosen.items()], 1)

    def by_layer(self, rows: Tensor, num_layers: int) -> list[Tensor | None]:
        """The input of each layer, from what `of_pass` returns; None of a layer without n-grams."""
        found: list[Tensor | None] = [None] * num_layers
        widths = [table.ngrams.width for table in self._tables.values()]
        for layer, own in zip(self._tables, rows.split(widths, 1), strict=True):
            found[layer] = own.contiguous()
        return found

    def of_prefill(self, layer: int, ids: Tensor, block: int) -> Callable[[int, int], Tensor]:
        """A function of a block's first row and its number of rows, which gives its input. The rows of the block after
        it are read meanwhile. ids: of the prefill, with those before it."""
        table, chosen = self._tables[layer], self._chosen(layer, [ids])

        def given(first: int, count: int) -> Tensor:
            table.begin(chosen[first : first + count + block])
            return table.read(chosen[first : first + count])

        return given

    def __contains__(self, layer: int) -> bool:
        return layer in self._tables

    def _chosen(self, layer: int, ids: Sequence[Tensor]) -> Tensor:
        return torch.cat([chosen_rows(self._tables[layer].ngrams, each) for each in ids])


def add_ngrams(
    x: Tensor,
    step: AddNGrams,
    given: Tensor,
    multiply: Callable[[Tensor, Linear], Tensor],
    convolve: Callable[[Tensor], Tensor],
) -> None:
    """Add an n-gram embedding to the streams x [T, channels], in place. given: its table's rows [T, width]. multiply:
    rows by a matrix. convolve: of normed gated values."""
    keys, values = multiply(given, step.keys), multiply(given, step.values)
    gated, normed = gated_values(step.ngrams, step.weights.norms, keys, values, x)
    x += gated + convolve(normed)
