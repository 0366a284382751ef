"""N-gram embeddings in a pass: the rows that its tokens choose, and what these add to a layer's streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.kernels.ngrams import chosen_rows, gated_values
from offload.model.layer import AddNGrams
from offload.weights.linear import Linear
from offload.weights.tables import Table


class NGramInputs:
    """The embeddings of n-grams: inputs [T, width] of the layers that have some, from their tables, by layer."""

    def __init__(self, config: ModelConfig, tables: Mapping[int, Table]) -> None:
        self._tables = {layer: (config.ngrams(layer), table) for layer, table in tables.items()}

    def begin(self, ids: Sequence[Tensor]) -> dict[int, Callable[[], Tensor]]:
        """Begin to read the rows of a pass. ids: of each segment, int64 [context + T], with those before its tokens.
        Returns for each layer a function, to be called once, that waits for its input, of all segments."""
        waiting = dict[int, Callable[[], Tensor]]()
        for layer, (ngrams, table) in self._tables.items():
            rows = table.begin(torch.cat([chosen_rows(ngrams, each) for each in ids]))
            waiting[layer] = partial(_embeddings, rows)
        return waiting

    def of_prefill(self, layer: int, ids: Tensor, block: int) -> Callable[[int, int], Tensor]:
        """A function of a block's first row and its number of rows, which gives its input; the rows of the block after
        it, of `block` rows, are read meanwhile. ids: of the prefill, with those before it."""
        ngrams, table = self._tables[layer]
        chosen, waiting = chosen_rows(ngrams, ids), dict[int, Callable[[], Tensor]]()

        def given(first: int, count: int) -> Tensor:
            rows = waiting.pop(first, None) or table.begin(chosen[first : first + count])
            found, after = _embeddings(rows), first + count
            if after < len(chosen):
                waiting[after] = table.begin(chosen[after : after + block])
            return found

        return given

    def __contains__(self, layer: int) -> bool:
        return layer in self._tables


def _embeddings(rows: Callable[[], Tensor]) -> Tensor:
    return rows().flatten(1)


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
