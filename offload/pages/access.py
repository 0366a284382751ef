"""Access to tiles during a forward, in three kinds.

`TileAccess` uses tiles at home. `StreamedTiles` fetches tile after tile over the link into staging slots.
`PrefillTiles` keeps a layer's tiles on the device while the layer is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from offload.pages.mover import Mover
from offload.pages.packed import StagedPages
from offload.pages.tiles import TileStore
from offload.transfer.arena import Arena
from offload.transfer.link import Event, Link

_AGAIN_SHARE, _AGAIN_SECONDS = 0.25, 1.0  # time for packing pages anew: at most this share of a round, these seconds


class TileAccess:
    """Access to tiles during one forward. Tiles are opened layer by layer, in the order of their places, and closed
    after use.

    In this class every tile is on the device and is used at its home.
    """

    def __init__(self, store: TileStore) -> None:
        self._store = store

    def begin(self, length: int, num_rows: int) -> None:
        """A forward of `num_rows` rows starts, with `length` tokens in the cache."""
        self._store.grow(length + num_rows)

    def open(self, layer: int, index: int) -> Tensor:
        """The tile on the device. The caller may write new rows into it, and then calls `wrote`."""
        return self._store.home(layer, index)

    def wrote(self, layer: int, index: int, start: int, stop: int) -> None:
        """Tokens `start` to `stop` of the opened tile were written."""

    def close(self, layer: int, index: int) -> None:
        """The forward does not use the tile any more."""

    def end(self) -> None:
        """End a forward, which may have been interrupted. Afterwards only copies home may still be in progress."""

    def fetch_ahead(self, length: int) -> None:
        """After a forward, with `length` tokens in the cache, begin to fetch the first tiles of the next one."""

    def forget(self) -> None:
        """Drop tiles that were fetched ahead: a forward with another access changes their homes."""

    def settle(self) -> None:
        """Wait until no copy reads the homes, including fetches ahead, so that the homes can be released or written."""


@dataclass
class _Slot:
    tile: Tensor
    full: Event
    free: Event
    left: Event  # the last new rows of the slot are home, from this forward or an earlier one
    staged: StagedPages | None = None  # formats of the pages; None: raw
    opened: Tensor | None = None  # the tile in use: the slot itself, or the unpacked tile


class StreamedTiles(TileAccess):
    """Decode with the cache on the host: tiles cross into staging slots in the order in which layers use them.

    While one tile is attended the next one is being copied, across layer boundaries and, with `fetch_ahead`, across
    forwards, since rows in the cache do not change. Only pages in use are copied. New rows are written into the staged
    tile and copied home from there; where that tile has been fetched for a further layer already, it is fetched again.
    Whole pages are packed between passes, where homes hold packed pages.
    """

    def __init__(
        self, store: TileStore, link: Link, staging: Sequence[Tensor], mover: Mover, layers: Sequence[int]
    ) -> None:
        """layers: as a forward uses their tiles, those that several layers read several times."""
        super().__init__(store)
        self._link, self._mover, self._layers = link, mover, layers
        self._slots = [_Slot(tile, link.record(), link.record(), link.record()) for tile in staging]
        self._order: list[tuple[int, int]] = []
        self._at = 0  # position in that order of the tile in use, or of the next one
        self._length = 0  # tokens in the cache at the start of the forward
        self._written: dict[tuple[int, int], int] = {}  # tokens in the cache, by tile with new rows of the forward
        self._ahead: list[tuple[int, int]] = []  # in the slots for the next forward
        self._packed = perf_counter()  # time of the last packing

    def begin(self, length: int, num_rows: int) -> None:
        super().begin(length, num_rows)
        self._length, self._at, self._written = length, 0, {}
        self._order = self._store.streamed(length + num_rows, self._layers)
        first, ahead = self._order[: len(self._slots)], self._ahead
        self._ahead = []  # cleared first: the rest may be interrupted
        if first != ahead:
            self._pack(length)
            self._fetch_first(length)

    def open(self, layer: int, index: int) -> Tensor:
        if self._store.place(layer, index) == "device":
            return super().open(layer, index)
        slot = self._slot(layer, index)
        slot.full.wait()
        slot.opened = self._mover.opened(slot.tile, slot.staged)
        return slot.opened

    def wrote(self, layer: int, index: int, start: int, stop: int) -> None:
        if self._store.place(layer, index) == "device":
            return
        slot = self._slot(layer, index)
        assert slot.opened is not None
        event = self._mover.write(layer, index, slot.opened, start, stop)
        if slot.opened is slot.tile:
            slot.left = event
        self._written[layer, index] = index * self._store.shape.tokens + stop
        for ahead in range(self._at + 1, min(self._at + len(self._slots), len(self._order))):
            if self._order[ahead] == (layer, index):
                self._fetch(ahead, self._length)

    def close(self, layer: int, index: int) -> None:
        if self._store.place(layer, index) == "device":
            return
        self._slot(layer, index).free = self._link.record()
        following = self._at + len(self._slots)
        if following < len(self._order):
            self._fetch(following, self._length)
        self._at += 1

    @property
    def _finished(self) -> bool:
        """Whether the last tile of the forward was closed."""
        return 0 < self._at == len(self._order)

    def end(self) -> None:
        if not self._finished:  # interrupted: opened tiles were not closed
            for slot in self._slots:
                slot.full.wait()
                slot.free = self._link.record()

    def fetch_ahead(self, length: int) -> None:
        """Fill the slots with the first tiles again."""
        if self._finished and not self._ahead:
            self._pack(length)
            self._written = {}
            self._fetch_first(length)
            self._ahead = self._order[: len(self._slots)]  # set last: the fetches may be interrupted

    def forget(self) -> None:
        for slot in self._slots:
            slot.full.wait()  # homes that it is read from must not be written meanwhile
        self._ahead = []

    def settle(self) -> None:
        for slot in self._slots:
            slot.full.synchronize()

    def _pack(self, length: int) -> None:
        """Pack the whole pages of `length` tokens, then pack anew the pages that have got codes since. The latter takes
        at most a share of the time since the last packing, so that a short text need not wait for all pages. An
        interrupt can come between two batches."""
        if (pages := self._mover.packed) is None:
            return
        now = perf_counter()
        most = min(_AGAIN_SHARE * (now - self._packed), _AGAIN_SECONDS)
        while pages.pack_some(length):
            pass
        again, began = pages.due_again(), perf_counter()
        while again and perf_counter() - began < most:
            again = pages.pack_again(again)
        self._packed = perf_counter()

    def _slot(self, layer: int, index: int) -> _Slot:
        assert self._order[self._at] == (layer, index)
        return self._slots[self._at % len(self._slots)]

    def _fetch_first(self, length: int) -> None:
        for position in range(min(len(self._slots), len(self._order))):
            self._fetch(position, length)

    def _fetch(self, position: int, length: int) -> None:
        """Begin to fetch the pages that `length` tokens use, or more if they are written, of the tile at `position` in
        the order."""
        layer, index = self._order[position]
        length = self._written.get((layer, index), length)
        slot = self._slots[position % len(self._slots)]
        # A dropped fetch ahead must have completed before the slot is reused: `full`.
        after = (slot.full, slot.free, slot.left)
        slot.full, slot.staged = self._mover.fetch(slot.tile, layer, index, length, after)


class PrefillTiles(TileAccess):
    """Prefill with the cache on the host: one layer's tiles stay on the device while the layer is computed.

    Each new row crosses the link once, to its home, while computation goes on. Tiles with earlier tokens are fetched
    once.
    """

    def __init__(self, store: TileStore, link: Link, arena: Arena, mover: Mover) -> None:
        super().__init__(store)
        self._link, self._arena, self._mover = link, arena, mover
        self._tiles: list[Tensor] = []
        self._full: dict[int, tuple[Event, StagedPages | None]] = {}  # see `_Slot`
        self._unsent: dict[int, tuple[int, int]] = {}  # tile index -> rows written and not yet sent home
        self._layer = -1
        self._length = self._num_tiles = 0

    def begin(self, length: int, num_rows: int) -> None:
        super().begin(length, num_rows)
        shape = self._store.shape
        fewest = min(self._store.num_resident(layer) for layer in range(self._store.num_layers))
        for _ in range(len(self._tiles), shape.count(length + num_rows) - fewest):
            self._tiles.append(self._arena.take(shape.shape, shape.dtype))
        self._num_tiles = shape.count(length + num_rows)
        self._length, self._layer = length, -1

    def open(self, layer: int, index: int) -> Tensor:
        if layer != self._layer:
            self._enter(layer)
        if self._store.place(layer, index) == "device":
            return super().open(layer, index)
        tile = self._tile(index)
        if index in self._full:
            full, staged = self._full.pop(index)
            full.wait()
            self._mover.open_in_place(tile, staged)
        return tile

    def wrote(self, layer: int, index: int, start: int, stop: int) -> None:
        if self._store.place(layer, index) == "device":
            return
        first, _ = self._unsent.get(index, (start, stop))
        self._unsent[index] = (first, stop)
        if stop == self._store.shape.tokens:
            self._send(index)

    def end(self) -> None:
        """Send the last layer home. Returns when no copy uses the tiles on the device any more."""
        self._leave()
        self._mover.wait()
        for full, _ in self._full.values():
            full.synchronize()
        self._full.clear()
        for tile in self._tiles:
            self._arena.put_back(tile)
        self._tiles.clear()

    def _tile(self, index: int) -> Tensor:
        return self._tiles[index - self._store.num_resident(self._layer)]

    def _enter(self, layer: int) -> None:
        """Begin to fetch the tiles of `layer`. A tile is overwritten only after the previous layer's copy of it has
        left the device."""
        self._leave()
        previous, self._layer = self._layer, layer
        free = self._link.record()
        for offset, tile in enumerate(self._tiles):
            index = offset + self._store.num_resident(layer)
            if index >= self._num_tiles:
                break
            before = offset + self._store.num_resident(previous) if previous >= 0 else 0
            left = () if previous < 0 else self._mover.before(previous, before)
            self._full[index] = self._mover.fetch(tile, layer, index, self._length, (free, *left))

    def _leave(self) -> None:
        for index in list(self._unsent):
            self._send(index)

    def _send(self, index: int) -> None:
        start, stop = self._unsent.pop(index)
        self._mover.write(self._layer, index, self._tile(index), start, stop)
        self._mover.pack_behind()
