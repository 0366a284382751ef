"""Where the rows of the forward under way are, kept on the device."""

from __future__ import annotations

import torch

from offload.kernels.places import RowPlaces
from offload.kernels.rows import MAX_ROWS
from offload.transfer.memory import sent, sent_to


class Places:
    """Those of the forward under way. On a GPU forwards of as many rows, up to MAX_ROWS, have them at the same
    addresses; elsewhere they are made when they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept = torch.zeros(2 * MAX_ROWS, dtype=torch.long, device=self._device)
        self._first, self._num_rows = (0, 0), 0
        self._all: RowPlaces | None = None

    def set(self, position: int, slot: int, num_rows: int) -> None:
        """A forward of `num_rows` rows starts, the first of them at these."""
        self._first, self._num_rows, self._all = (position, slot), num_rows, None
        if self._device.type == "cuda":
            kept, both = self._kept[: 2 * num_rows], self._numbers()
            both = sent_to(kept, both) if num_rows <= MAX_ROWS else sent(both, self._device)
            self._all = RowPlaces(both[:num_rows], both[num_rows:])

    def rows(self, first: int, count: int) -> RowPlaces:
        """Of `count` of the forward's rows from the `first` on."""
        if self._all is None:
            positions, slots = self._numbers().split(self._num_rows)
            self._all = RowPlaces(positions, slots)
        if count == self._num_rows:
            return self._all
        own = slice(first, first + count)
        return RowPlaces(self._all.positions[own], self._all.slots[own])

    def on_gpu(self) -> RowPlaces | None:
        """Of all rows; None where the device is no GPU, and a kernel takes numbers instead."""
        return self._all if self._device.type == "cuda" else None

    def _numbers(self) -> torch.Tensor:
        """Positions, then slots, [2 * T] on the CPU."""
        steps = torch.arange(self._num_rows)
        return torch.cat([steps + first for first in self._first])
