"""What a cache asks of the attention of a prefill, whoever computes it. `kernels.choice` finds it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from offload.kernels.rope import Scoring


class PrefillBlock(Protocol):
    """A block of rows that attend to tiles, which are given in order. The last tile has the key of the last row."""

    def attend(self, tile: Tensor, base: int) -> None:
        """Attend to the tile [2, P, H_kv, S, D] whose first token is at position `base`. A row attends to tokens up to
        its own position. A tile after all rows has no effect."""
        ...

    def attended(self) -> Tensor:
        """The attention's output [T, H * D] over all tiles, in the rows' dtype or fp32."""
        ...


class PrefillAttention(Protocol):
    """Attention of many rows, whose bits may depend on the number of rows."""

    def block(self, rows: Tensor, first: int, scoring: Scoring, window: int | None = None) -> PrefillBlock:
        """Begin a block of rows [T, H, D], rotated, at positions `first` and on. window: number of tokens that a row
        attends to, up to its own; None: all."""
        ...
