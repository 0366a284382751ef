"""Attention of a prefill's rows, tile by tile: what a cache asks of it, and how torch's operators do it.

`kernels.choice` finds who computes it on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offload.kernels.attention import (
    Part,
    attend,
    attend_joined,
    attend_whole_pages,
    attended_rows,
    count_up,
    fold,
    merge,
    sink_part,
    unfold,
)
from offload.kernels.rope import Scoring
from offload.plan.fixed_bytes import PREFILL_PAGES


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


@dataclass
class OperatorBlock:
    """A `PrefillBlock` of `count` rows at positions `first` and on: query [H_kv, G * count, D], rotated.

    A tile is [2, P, H_kv, S, D]; `base` is the position of its first token. scale: on products of queries and keys,
    None: D^-0.5. part: of the sink logits, if there are any, and the tiles so far. window: tokens that a row sees,
    itself and those before it; None: all. cap: of scores, see `attend`. fused: `attend` uses torch's fused kernel where
    that serves. joined: see `Scoring`.
    """

    query: Tensor
    first: int
    count: int
    scale: float | None = None
    part: Part | None = None
    window: int | None = None
    cap: float | None = None
    fused: bool = False
    joined: bool = False

    @classmethod
    def of(
        cls, q: Tensor, start: int, num_kv_heads: int, scoring: Scoring, window: int | None = None, *,
        fused: bool = False,
    ) -> OperatorBlock:  # fmt: skip
        """Rows q [T, H, D], rotated, at positions `start` and on."""
        query = fold(q, num_kv_heads)
        part = sink_part(scoring.sink_logits, query)
        others = {"window": window, "cap": scoring.cap, "fused": fused, "joined": scoring.joined}
        return cls(query, start, len(q), scoring.scale, part, **others)  # type: ignore[arg-type]

    def attend(self, tile: Tensor, base: int) -> None:
        """See `PrefillBlock`: the pages that some row sees, a few at a time where torch's fused kernel does not serve.
        On a GPU it serves over pages that all rows see whole."""
        if base > self._last:
            return
        page, fused = tile.shape[3], self.fused and self.cap is None
        used = min(-(-(self._last + 1 - base) // page), tile.shape[1])
        whole = max(min((self.first + 1 - base) // page, used), 0) if fused and self.window is None else 0
        if whole:
            self._add(attend_whole_pages(self.query, *self._rows(tile[:, :whole]), self.scale))
        visible, first_visible = self._visible(tile, base)
        joined = fused and not tile.is_cuda
        step = used if joined else PREFILL_PAGES
        for at in range(whole, used, step):
            some = slice(at, min(at + step, used))
            seen, first = (None if each is None else each - at * page for each in (visible, first_visible))
            keys, values = self._rows(tile[:, some])
            if joined:
                self._add(attend_joined(self.query, keys, values, seen, first_visible=first, scale=self.scale))
            else:
                self._add(self._by_products(keys, values, seen, first))

    def _rows(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        return attended_rows(pages, joined=self.joined)

    def _by_products(self, keys: Tensor, values: Tensor, seen: Tensor | None, first: Tensor | None) -> Part:
        return attend(self.query, keys, values, seen, first_visible=first, scale=self.scale, cap=self.cap)

    def attended(self) -> Tensor:
        """[count, H * D] fp32."""
        assert self.part is not None
        return unfold(self.part.out, self.count)

    @property
    def _last(self) -> int:
        return self.first + self.count - 1

    def _visible(self, tile: Tensor, base: int) -> tuple[Tensor | None, Tensor | None]:
        """The tokens of the tile up to which each row sees, and the first one that it sees; None: all of them."""
        num_tokens, own = tile.shape[1] * tile.shape[3], self.first + 1 - base
        begins = self.window is not None and own + self.count - 1 > self.window
        if own >= num_tokens and not begins:
            return None, None
        visible = count_up(own, self.count, self.query)
        first = (visible - self.window).clamp_(0, num_tokens) if begins and self.window is not None else None
        return visible.clamp_(0, num_tokens), first

    def _add(self, part: Part) -> None:
        self.part = part if self.part is None else merge(self.part, part)


@dataclass(frozen=True)
class OperatorTiles:
    """`PrefillAttention` by torch's operators, and by its fused kernel where that serves."""

    num_kv_heads: int
    fused: bool = True

    def block(self, rows: Tensor, first: int, scoring: Scoring, window: int | None = None) -> OperatorBlock:
        return OperatorBlock.of(rows, first, self.num_kv_heads, scoring, window, fused=self.fused)
