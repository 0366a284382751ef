"""New rows on their way from the device to their tiles' homes."""

from __future__ import annotations

from torch import Tensor

from offload.cache.packed import PackedPages
from offload.cache.tiles import TileStore
from offload.cache.traffic import Traffic
from offload.transfer.link import Event, Link

UNINTERRUPTED = True  # what was issued is known


class WriteBack:
    """Copies of new rows back home. packed: where pages of streamed tiles lie there, if not in tiles."""

    def __init__(self, store: TileStore, link: Link, traffic: Traffic, packed: PackedPages | None = None) -> None:
        self._store, self._link, self._traffic, self._packed = store, link, traffic, packed

    def write(self, layer: int, index: int, tile: Tensor, start: int, stop: int) -> Event:
        """Send home the pages of `tile` that tokens start to stop lie in: whole pages are contiguous in each half."""
        if self._packed is not None and self._store.place(layer, index) == "stream":
            return self._packed.write(layer, index, tile, start, stop)
        page = self._store.shape.page_tokens
        pages = slice(start // page, -(-stop // page))
        home, ready = self._store.home(layer, index), self._link.record()
        self._link.to_host(home[0, pages], tile[0, pages], (ready,))
        event = self._link.to_host(home[1, pages], tile[1, pages], (ready,))
        self._traffic.writes((layer, index), event)
        return event
