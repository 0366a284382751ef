"""What is under way to and from the homes of tiles, and who has to wait for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from offload.transfer.link import Event, Link

Tile = tuple[int, int]  # its layer, and its number there


class Traffic:
    """The last copies to and from each tile's home, and the last kernel of the device that reads homes itself."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._written, self._read = dict[Tile, Event](), dict[Tile, Event]()  # the last ones last: a lane has an order
        self._last: Event | None = None  # copy to any home
        self._read_by_kernel: Event | None = None

    def writes(self, tile: Tile, event: Event) -> None:
        """New rows of the tile are home then."""
        self._written.pop(tile, None)
        self._written[tile] = self._last = event

    def reads(self, tile: Tile, event: Event) -> None:
        """A copy of its home has come then."""
        self._read.pop(tile, None)
        self._read[tile] = event

    def read_by_kernel(self) -> None:
        """What the device computes by now reads homes itself."""
        self._read_by_kernel = self._link.record()

    def before(self, tile: Tile) -> tuple[Event, ...]:
        """What a copy of its home has to wait for."""
        event = self._written.get(tile)
        return () if event is None else (event,)

    def settle(self, tiles: Collection[Tile]) -> None:
        """Return when the homes of these have all rows, and nobody reads them: the host may write to them."""
        for events in (self._written, self._read):
            if known := [tile for tile in events if tile in tiles]:
                events[known[-1]].synchronize()
                for tile in known:
                    del events[tile]
        if tiles:
            self._settle_kernel()

    def wait(self) -> None:
        """Return when every home is up to date, and no kernel reads it: copies to the host keep their order."""
        if self._last is not None:
            self._last.synchronize()
        self._last = None
        self._written.clear()
        self._settle_kernel()

    def order(self) -> None:
        """What the device computes from now on comes after all rows are home. On a GPU the host does not wait."""
        if self._last is not None:
            self._last.wait()

    def _settle_kernel(self) -> None:
        if self._read_by_kernel is not None:
            self._read_by_kernel.synchronize()
        self._read_by_kernel = None


@dataclass(frozen=True)
class All:
    """Has happened when all of `events` have."""

    events: tuple[Event, ...]

    def wait(self) -> None:
        for event in self.events:
            event.wait()

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()
