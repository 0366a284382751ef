"""The hidden rows of a prefill: each layer works on all of them, some at a time, in place.

The rows are on the device or, if the cache streams, on the host: decoding does not need them, and they cross the link
in less time than a layer works on them.
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
    """The hidden rows of a prefill, in the model's hidden size and dtype. block: rows of a block, in which layers work
    on them. together: rows that are on the device at a time, whole blocks, over which a layer's experts run at once."""

    block: int
    together: int

    def begin(self, num_rows: int) -> None:
        """Start a prefill of `num_rows` rows. The rows of an interrupted one are dropped."""
        ...

    def groups(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        """The rows of `layer` in order, `together` at a time -> (first row, rows [n, hidden] on the device): the
        results of `layer - 1`, and arbitrary content in layer 0. The caller has finished some when it requests the next
        ones. Layers are called in order, each once."""
        ...


class ResidentRows:
    """Hidden rows on the device: in `arena`, during the turn of the prefill's cache."""

    def __init__(
        self, arena: Arena, hidden_size: int, dtype: torch.dtype, *, block: int, together: int | None = None
    ) -> None:
        """together: None for a block."""
        self._arena, self._hidden_size, self._dtype, self.block = arena, hidden_size, dtype, block
        self.together = together or block
        self.rows = torch.empty(0)  # [T, hidden], valid from `begin` to the arena's next turn

    def begin(self, num_rows: int) -> None:
        self.rows = self._arena.take((num_rows, self._hidden_size), self._dtype)

    def groups(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(self.rows), self.together):
            yield start, self.rows[start : start + self.together]


class StreamedRows:
    """Hidden rows on the host. While one group is worked on in its slot on the device, the next one is copied to a
    second slot, and the previous one is copied home from a third.

    Groups use the slots cyclically, layer after layer. If there are no more groups than slots, they stay in the slots,
    and nothing crosses the link. One object serves all sequences, of which one is prefilled at a time.
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
        together: int | None = None,
    ) -> None:
        """num_rows: of the longest planned prefill; a longer one allocates more. together: None for a block.
        num_layers: of the model; the last layer's rows are not copied home. Raises DoesNotFit."""
        self._memory, self._link, self._num_layers, self.block = memory, link, num_layers, block
        self.together = together or block
        self._home = memory.allocate((num_rows, hidden_size), dtype, tier="host", purpose=_PURPOSE)
        slot = self.together, hidden_size
        self._slots = [memory.allocate(slot, dtype, tier="device", purpose=_PURPOSE) for _ in range(num_slots)]
        self._ready: list[Event] = [link.record()] * num_slots  # by slot: it is ready for its next content, or has it
        self._left = link.record()  # the latest block copied home has arrived
        self._num_rows = 0

    def begin(self, num_rows: int) -> None:
        for event in (*self._ready, self._left):
            event.wait()
        if num_rows > len(self._home):
            shape = num_rows, self._home.shape[1]
            self._link.record().synchronize()  # after all copies
            longer = self._memory.allocate(shape, self._home.dtype, tier="host", purpose=_PURPOSE)
            self._memory.released(self._home, tier="host", purpose=_PURPOSE)
            self._home = longer
        self._num_rows = num_rows

    def groups(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        crosses = self._num_groups > len(self._slots)
        for number in range(self._num_groups):
            place = layer * self._num_groups + number if crosses else number
            self._ready[place % len(self._slots)].wait()
            yield number * self.together, self._in_slot(place)
            if crosses:
                self._move_on(place)

    @property
    def _num_groups(self) -> int:
        return -(-self._num_rows // self.together)

    def _move_on(self, place: int) -> None:
        """Handle a finished group, by its number among all layers' groups: copy it home for the next layer, and start
        the copy of its slot's next content, which is home by then, since copies home keep their order."""
        computed, following = self._link.record(), place + len(self._slots)
        if place < (self._num_layers - 1) * self._num_groups:
            self._left = self._link.to_host(self._at_home(place), self._in_slot(place), (computed,))
        slot = place % len(self._slots)
        if following < self._num_groups:  # layer 0 writes its rows there itself
            self._ready[slot] = self._left
        elif following < self._num_layers * self._num_groups:
            arrives = self._in_slot(following), self._at_home(following)
            self._ready[slot] = self._link.to_device(*arrives, (computed, self._left))

    def _in_slot(self, place: int) -> Tensor:
        return self._slots[place % len(self._slots)][: len(self._at_home(place))]

    def _at_home(self, place: int) -> Tensor:
        start = place % self._num_groups * self.together
        return self._home[start : min(start + self.together, self._num_rows)]
