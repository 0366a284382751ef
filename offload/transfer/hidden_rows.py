"""The hidden rows of a prefill: each layer works on all of them, block by block, in place.

They are on the device or, where the cache streams, on the host: decoding needs none of them, and a block crosses the
link in less time than a layer works on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from offload.plan.sizing import NUM_ROW_SLOTS
from offload.transfer.arena import Arena
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory

_PURPOSE = "hidden rows"


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


class StreamedRows:
    """All rows on the host. While one block is worked on in its slot on the device, the next is on its way to another,
    and the one before leaves from a third.

    Blocks go through the slots in a circle, layer after layer. As few as there are slots stay in these, and nothing
    crosses the link. One such object serves all sequences, of which one is prefilled at a time.
    """

    def __init__(
        self,
        memory: Memory,
        link: Link,
        *,
        num_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        block: int,
        num_layers: int,
        num_slots: int = NUM_ROW_SLOTS,
    ) -> None:
        """num_rows: of the longest prefill that is planned; a longer one allocates more. block: rows. num_layers: of
        the model, of which the last one's rows go nowhere. Raises DoesNotFit."""
        self._memory, self._link, self._num_layers = memory, link, num_layers
        self._home = memory.allocate((num_rows, hidden_size), dtype, tier="host", purpose=_PURPOSE)
        self._slots = [
            memory.allocate((block, hidden_size), dtype, tier="device", purpose=_PURPOSE) for _ in range(num_slots)
        ]
        self._ready: list[Event] = [link.record()] * num_slots  # what each slot is to hold next may be, or is, there
        self._left = link.record()  # the latest block to leave is home
        self._num_rows = 0

    def begin(self, num_rows: int) -> None:
        for event in (*self._ready, self._left):
            event.wait()
        if num_rows > len(self._home):
            shape = num_rows, self._home.shape[1]
            self._link.record().synchronize()  # which comes after all copies
            longer = self._memory.allocate(shape, self._home.dtype, tier="host", purpose=_PURPOSE)
            self._memory.released(self._home, tier="host", purpose=_PURPOSE)
            self._home = longer
        self._num_rows = num_rows

    def blocks(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        crosses = self._num_blocks > len(self._slots)
        for number in range(self._num_blocks):
            place = layer * self._num_blocks + number if crosses else number
            self._ready[place % len(self._slots)].wait()
            yield number * len(self._slots[0]), self._in_slot(place)
            if crosses:
                self._move_on(place)

    @property
    def _num_blocks(self) -> int:
        return -(-self._num_rows // len(self._slots[0]))

    def _move_on(self, place: int) -> None:
        """The block of that place among all layers' blocks was worked on: it leaves for the next layer, and what its
        slot holds next is on its way from home, where it is since copies there keep their order."""
        computed, following = self._link.record(), place + len(self._slots)
        if place < (self._num_layers - 1) * self._num_blocks:
            self._left = self._link.to_host(self._at_home(place), self._in_slot(place), (computed,))
        slot = place % len(self._slots)
        if following < self._num_blocks:  # layer 0 makes its rows there
            self._ready[slot] = self._left
        elif following < self._num_layers * self._num_blocks:
            arrives = self._in_slot(following), self._at_home(following)
            self._ready[slot] = self._link.to_device(*arrives, (computed, self._left))

    def _in_slot(self, place: int) -> Tensor:
        return self._slots[place % len(self._slots)][: len(self._at_home(place))]

    def _at_home(self, place: int) -> Tensor:
        block = len(self._slots[0])
        start = place % self._num_blocks * block
        return self._home[start : min(start + block, self._num_rows)]
