"""The places of new rows, in device memory, from where a pass that runs as a graph reads them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.rope import RopeTable, Scoring, rotate, rotate_queries

Made = TypeVar("Made")


class RowPlaces:
    """The places of new rows, int64 [T]. positions: in the sequence. slots: in the buffer that they are written to.
    bounds: int64 [2]: the tokens of a coded run that count, and the least slot that is written; None: all count, and
    all are written.

    Results derived from them are computed in the first layer that needs them, and reused by the others.
    """

    def __init__(self, positions: Tensor, slots: Tensor, bounds: Tensor | None = None) -> None:
        self.positions, self.slots, self.bounds = positions, slots, bounds
        self._made: dict[Hashable, Any] = {}

    def keys(self, k: Tensor, scoring: Scoring) -> Tensor:
        """Keys k [T, H_kv, D], rotated and weighted. scoring: of all positions; the caller keeps it alive."""
        return scoring.weighed_keys(self.rotated_by(scoring.rope, k))

    def rotated_by(self, rope: RopeTable, x: Tensor) -> Tensor:
        """x [T, H, D], rotated by a table, which the caller keeps alive."""
        return rotate(x, self._rows("cos", rope.cos), self._rows("sin", rope.sin))

    def queries(self, q: Tensor, scoring: Scoring, last: int | None = None) -> Tensor:
        """Queries q [T, H, D], rotated to the positions, but at most to `last`, and weighted."""
        rope = scoring.rope
        table = self._rows("cos", rope.cos, last), self._rows("sin", rope.sin, last)
        growth = None if rope.growth is None else self._rows("growth", rope.growth, last)
        return scoring.weighed_queries(rotate_queries(q, table, growth))

    def rotated(
        self, q: Tensor, k: Tensor, scoring: Scoring, lasts: Sequence[int | None]
    ) -> tuple[list[Tensor], Tensor]:
        """Queries for each of `lasts`, and keys."""
        if len(lasts) > 1 or lasts[0] is not None or scoring.rope.growth is not None or scoring.weights is not None:
            return [self.queries(q, scoring, last) for last in lasts], self.keys(k, scoring)
        both = self.keys(torch.cat([q, k], 1), scoring)
        return [both[:, : q.shape[1]]], both[:, q.shape[1] :]

    def in_blocks(self, rows: int, group: int) -> Sequence[Tensor]:
        """Slots in blocks of so many, the last filled up, folded rows of `group` heads each: int64 [group * rows]."""

        def filled() -> Tensor:
            return pad(self.slots, (0, -len(self.slots) % rows)).view(-1, 1, rows).expand(-1, group, -1).flatten(1)

        return self.once((f"{rows} rows", group), filled).unbind()

    def of_rows(self, rows: slice) -> RowPlaces:
        """The places of some rows."""
        return RowPlaces(self.positions[rows], self.slots[rows], self.bounds)

    def _rows(self, name: str, table: Tensor, last: int | None = None) -> Tensor:
        """The rows of a table [positions, ...] at the positions."""
        at = self.positions if last is None else self.once(("up to", last), lambda: self.positions.clamp(max=last))
        return self.once((name, last, id(table)), lambda: table.index_select(0, at))

    def write(self, rows: Sequence[Tensor], pages: Tensor) -> None:
        """Write keys and values [T, H_kv, D] to the slots of `pages` [2, P, H_kv, S, D]."""
        page = pages.shape[3]
        number = self.once(("page", page), lambda: self.slots // page)
        offset = self.once(("offset", page), lambda: self.slots % page)
        for half, new in zip(pages, rows, strict=True):
            half.transpose(1, 2).index_put_((number, offset), new)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of `make`, which follows from the places and is made in the first layer that asks for it."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


def append_rows(pages: Tensor, first: int, index: int, rows: tuple[Tensor, Tensor], places: RowPlaces) -> None:
    """Write keys and values `rows`, [T, H_kv, D] each, at positions `index` and on, to `pages` [2, P, H_kv, S, D] whose
    first position is `first`. places: of the rows; where all of them are in pages at 0 they are written by them, as a
    graph needs."""
    _, num_pages, _, page, _ = pages.shape
    if first == 0 and index >= 0 and index + len(rows[0]) <= num_pages * page:
        places.write(rows, pages)
    else:
        write_rows(pages, first, index, *rows)


def write_rows(tile: Tensor, base: int, start: int, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Write the part of the rows k, v [T, H_kv, D] at positions `start` and on that falls into `tile`, which begins at
    `base`. Returns the written tokens of the tile as (first, stop); no token if first >= stop."""
    _, num_pages, _, page, _ = tile.shape
    first, stop = max(start, base), min(start + len(k), base + num_pages * page)
    position = first
    while position < stop:
        number, offset = divmod(position - base, page)
        count = min(page - offset, stop - position)
        rows = slice(position - start, position - start + count)
        tile[0, number, :, offset : offset + count] = k[rows].transpose(0, 1)
        tile[1, number, :, offset : offset + count] = v[rows].transpose(0, 1)
        position += count
    return first - base, stop - base
