"""Rows of a table in host memory, for those who read them from a file: as many as there is room for."""

from __future__ import annotations

import torch
from torch import Tensor

_WAYS = 8  # places that a row may have
_OUTLIVES = 1 << 12  # reads by which a row that was read again outlives one that was not


class RowCache:
    """Rows by their numbers in a table, in the memory `held`, uint8 [places, bytes of a row]. A row has one of the
    `_WAYS` places of its set, that of the row that was used the longest ago, where one that was never read again counts
    as used _OUTLIVES reads earlier: the rows that a long prompt has once do not push the others out. Memory beside
    `held`: 16 bytes a place."""

    def __init__(self, held: Tensor) -> None:
        ways = min(_WAYS, len(held))
        self._num_sets = len(held) // ways if ways else 0
        self._held = held[: self._num_sets * ways]
        self._rows = torch.full((self._num_sets, ways), -1)  # -1: none
        self._used = torch.full_like(self._rows, -(2 * _OUTLIVES))
        self._now = 0  # number of reads

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Copy those of `rows`, int64 [n], that are held to their places in `out`, uint8 [n, bytes] -> the places of
        the others, ascending."""
        self._now += 1
        is_held, places = self._places(rows)
        hits = places[is_held]
        out[is_held] = self._held[hits]
        self._used.view(-1)[hits] = self._now
        return (~is_held).nonzero()[:, 0]

    def write(self, rows: Tensor, content: Tensor) -> None:
        """Hold rows, int64 [n], each once: content uint8 [n, bytes]."""
        is_held, _ = self._places(rows)
        waiting = (~is_held).nonzero()[:, 0] if self._num_sets else rows[:0]
        while len(waiting):
            sets, order = (rows[waiting] % self._num_sets).sort(stable=True)
            is_first = torch.cat([torch.tensor([True]), sets[1:] != sets[:-1]])  # one of each set at a time
            sets, own = sets[is_first], waiting[order[is_first]]
            places = sets * self._rows.shape[1] + self._used[sets].argmin(1)
            self._rows.view(-1)[places] = rows[own]
            self._used.view(-1)[places] = self._now - _OUTLIVES
            self._held[places] = content[own]
            waiting = waiting[order[~is_first]]

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """For each row: whether it is held, bool [n], and its place if it is, int64 [n]."""
        if not self._num_sets:
            return torch.zeros(len(rows), dtype=torch.bool), rows
        sets = rows % self._num_sets
        same = self._rows[sets] == rows[:, None]
        return same.any(1), sets * self._rows.shape[1] + same.int().argmax(1)
