"""Rows of a table in host memory, for those who read them from a file: as many as there is room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class RowCache:
    """Rows by their numbers in a table, in the memory `held`, uint8 [places, bytes of a row]. Without room for another,
    the first row from a hand on goes that was not read since the hand passed it (CLOCK; Corbato 1968). A row that was
    never read again goes first, so rows that a long prompt has once do not push the others out."""

    def __init__(self, held: Tensor) -> None:
        self._held = held
        self._rows = [-1] * len(held)  # by place
        self._places: dict[int, int] = {}  # by row
        self._was_read = bytearray(len(held))
        self._hand = 0

    def read(self, rows: Sequence[int], out: Tensor) -> list[int]:
        """Copy the rows that are held to their places in `out`, uint8 [n, bytes] -> the places of the others."""
        found = [self._places.get(row, -1) for row in rows]
        hits = [at for at, place in enumerate(found) if place >= 0]
        if hits:
            places = [found[at] for at in hits]
            out[torch.tensor(hits)] = self._held[torch.tensor(places)]
            for place in places:
                self._was_read[place] = 1
        return [at for at, place in enumerate(found) if place < 0]

    def write(self, rows: Sequence[int], content: Tensor) -> None:
        """Hold rows, each once in `rows`: content uint8 [n, bytes]."""
        places = self._free_places()
        new = dict[int, int]()  # place in `content` by place here: of two rows that came to one place the later one
        for at, row in enumerate(rows):
            if row in self._places or (place := next(places, None)) is None:
                continue
            self._places.pop(self._rows[place], None)
            self._rows[place], self._places[row] = row, place
            new[place] = at
        if new:
            self._held[torch.tensor([*new])] = content[torch.tensor([*new.values()])]

    def _free_places(self) -> Iterator[int]:
        """The places of the rows that go next."""
        while self._rows:
            place = self._hand
            self._hand = (place + 1) % len(self._rows)
            if self._was_read[place]:
                self._was_read[place] = 0
            else:
                yield place
