"""Host memory for raw pages of tiles whose homes have room for packed pages alone."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.pages.tiles import TileShape
from offload.transfer.memory import Memory

PURPOSE = "raw pages"


@dataclass(frozen=True)
class _Slot:
    """Page `at` of `block` [2, n, H_kv, S, D], which begins at `address`."""

    block: Tensor
    at: int
    address: int

    def addresses(self) -> list[int]:
        """The addresses of the keys and of the values."""
        num_pages, page_bytes = self.block.shape[1], self.block[0, 0].nbytes
        return [self.address + (kind * num_pages + self.at) * page_bytes for kind in range(2)]


class RawPages:
    """Slots for one page of one layer each, numbered from 0. Slots are added and never moved."""

    def __init__(self, memory: Memory, shape: TileShape) -> None:
        self._memory, self._shape = memory, shape
        self._slots: list[_Slot] = []
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def add(self, count: int) -> None:
        """Allocate `count` more slots. Raises DoesNotFit."""
        if count <= 0:
            return
        _, _, *page = self._shape.shape
        block = self._memory.allocate((2, count, *page), self._shape.dtype, tier="host", purpose=PURPOSE)
        first, address = len(self._slots), block.data_ptr()
        self._slots += [_Slot(block, at, address) for at in range(count)]
        self._free += range(first, first + count)

    def take(self, count: int) -> list[int]:
        """Take the first `count` free slots; there must be that many."""
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        return taken

    def give_back(self, slot: int) -> None:
        """Free a slot, which no copy or kernel uses any more."""
        insort(self._free, slot)

    def page(self, slot: int) -> Tensor:
        """The page in a slot: [2, H_kv, S, D], each half contiguous."""
        return self._slots[slot].block[:, self._slots[slot].at]

    def addresses(self, slots: Sequence[int]) -> Tensor:
        """The addresses of the slots' keys and values, int64 [n, 2]."""
        return torch.tensor([self._slots[slot].addresses() for slot in slots], dtype=torch.long).view(-1, 2)

    def runs(self, slots: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
        """Runs of `slots` that are adjacent in memory, as (their slice of `slots`, their pages [2, n, H_kv, S, D])."""
        start = 0
        for stop in range(1, len(slots) + 1):
            if stop < len(slots) and self._follows(slots[stop - 1], slots[stop]):
                continue
            first = self._slots[slots[start]]
            yield slice(start, stop), first.block[:, first.at : first.at + stop - start]
            start = stop

    def nbytes(self) -> int:
        return len(self._slots) * self._shape.nbytes // self._shape.num_pages

    def release(self) -> None:
        """Release the memory of all slots."""
        for slot in self._slots:
            if slot.at == 0:
                self._memory.released(slot.block, tier="host", purpose=PURPOSE)
        self._slots.clear()
        self._free.clear()

    def _follows(self, slot: int, other: int) -> bool:
        return other == slot + 1 and self._slots[slot].block is self._slots[other].block
