"""What a cache asks of the attention of a prefill, whoever computes it. `kernels.choice` finds it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from offload.kernels.rope import Scoring


class PrefillBlock(Protocol):
    """Rows that attend together to tiles, which come in order. The last one has the key of the last row."""

    def attend(self, tile: Tensor, base: int) -> None:
        """Over the tile [2, P, H_kv, S, D] whose first token is at `base`; a row sees what is at its position and
        before it. A tile after all rows changes nothing."""
        ...

    def attended(self) -> Tensor:
        """[T, H * D], of the rows' dtype or fp32, over all tiles."""
        ...


class PrefillAttention(Protocol):
    """Attention of many rows. Their bits may depend on how many there are."""

    def block(self, rows: Tensor, first: int, scoring: Scoring, window: int | None = None) -> PrefillBlock:
        """Rows [T, H, D], rotated, at positions `first` and on. window: tokens that a row sees, itself and those before
        it; None: all."""
        ...
