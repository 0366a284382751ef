"""The hidden rows of a prefill: each layer works on all of them, block by block, in place.

They are in the arena: decoding needs none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from offload.transfer.arena import Arena


class HiddenRows(Protocol):
    """Rows of the model's hidden size and dtype, and how many of them are worked on at a time."""

    def begin(self, num_rows: int) -> None:
        """A prefill of `num_rows` rows starts. What is left of one that was broken off is no longer needed."""
        ...

    def blocks(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        """(its first row, rows [n, hidden] on the device) of each block in turn: as `layer - 1` left it, and in layer 0
        with any content. `layer` has worked on it when the next one is asked for. Layers come in order, each once."""
        ...


class ResidentRows:
    """All rows on the device: in `arena`, of which the prefill's cache has the turn."""

    def __init__(self, arena: Arena, hidden_size: int, dtype: torch.dtype, *, block: int) -> None:
        """block: rows."""
        self._arena, self._hidden_size, self._dtype, self._block = arena, hidden_size, dtype, block
        self.rows = torch.empty(0)  # [T, hidden], from `begin` to the arena's next turn

    def begin(self, num_rows: int) -> None:
        self.rows = self._arena.take((num_rows, self._hidden_size), self._dtype)

    def blocks(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(self.rows), self._block):
            yield start, self.rows[start : start + self._block]
