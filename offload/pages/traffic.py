"""The copies in progress to and from the homes of tiles, and waits for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from offload.transfer.link import Event, Link

Tile = tuple[int, int]  # layer, index of the tile in the layer


class Traffic:
    """The last copies to and from each tile's home, and the last kernel of the device that reads homes directly."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._written, self._read = dict[Tile, Event](), dict[Tile, Event]()  # in order of the copies in their lane
        self._last: Event | None = None  # copy to any home
        self._read_by_kernel: Event | None = None

    def writes(self, tile: Tile, event: Event) -> None:
        """Register a copy of new rows to the tile's home, complete at `event`."""
        self._written.pop(tile, None)
        self._written[tile] = self._last = event

    def reads(self, tile: Tile, event: Event) -> None:
        """Register a copy from the tile's home, complete at `event`."""
        self._read.pop(tile, None)
        self._read[tile] = event

    def read_by_kernel(self) -> None:
        """Register that kernels launched so far read homes directly."""
        self._read_by_kernel = self._link.record()

    def written_by_kernel(self, tiles: Iterable[Tile]) -> None:
        """Register that kernels launched so far read homes directly, and write to those of `tiles`: after all copies to
        homes, see `order`."""
        self.read_by_kernel()
        assert self._read_by_kernel is not None
        for tile in tiles:
            self.writes(tile, self._read_by_kernel)

    def before(self, tile: Tile) -> tuple[Event, ...]:
        """The events that a copy from the tile's home has to wait for."""
        event = self._written.get(tile)
        return () if event is None else (event,)

    def settle(self, tiles: Collection[Tile]) -> None:
        """Wait until the homes of `tiles` have all rows and nothing reads them, so that the host may write to them."""
        for events in (self._written, self._read):
            if known := [tile for tile in events if tile in tiles]:
                events[known[-1]].synchronize()
                for tile in known:
                    del events[tile]
        if tiles:
            self._settle_kernel()

    def pending(self, tiles: Collection[Tile]) -> list[Event]:
        """The events that `settle` would wait for, so that another thread can wait for them."""
        copies = (self._written, self._read)
        last = [[event for tile, event in events.items() if tile in tiles][-1:] for events in copies]
        kernel = [] if self._read_by_kernel is None else [self._read_by_kernel]
        return [*last[0], *last[1], *kernel]

    def happened(self, pending: Collection[Event]) -> None:
        """Forget the events in `pending`, which are complete, and the earlier copies in the same direction, which
        complete in order."""
        for events in (self._written, self._read):
            known = list(events)
            last = max((at for at, tile in enumerate(known) if events[tile] in pending), default=-1)
            for tile in known[: last + 1]:
                del events[tile]
        if self._read_by_kernel in pending:
            self._read_by_kernel = None

    def wait(self) -> None:
        """Wait until every home is up to date and no kernel reads it. Copies to the host complete in order, so the wait
        is for the last one."""
        if self._last is not None:
            self._last.synchronize()
        self._last = None
        self._written.clear()
        self._settle_kernel()

    def order(self) -> None:
        """Make the device's later work wait until all rows are home. On a GPU the host does not wait."""
        if self._last is not None:
            self._last.wait()

    def _settle_kernel(self) -> None:
        if self._read_by_kernel is not None:
            self._read_by_kernel.synchronize()
        self._read_by_kernel = None


@dataclass(frozen=True)
class All:
    """An event that is complete when all of `events` are."""

    events: tuple[Event, ...]

    def wait(self) -> None:
        for event in self.events:
            event.wait()

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()
