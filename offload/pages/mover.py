"""The mover of tiles between their homes and the device: every copy of a decode pass and of a prefill."""

from __future__ import annotations

from torch import Tensor

from offload.formats.layout import RESIDUAL
from offload.kernels.device import NONE, DeviceKernels
from offload.pages.packed import PackedPages, StagedPages
from offload.pages.tiles import TileStore
from offload.pages.traffic import All, Traffic
from offload.transfer.link import Event, Link


class Mover:
    """Copies of tiles over `link`, each ordered after the registered copies of the same home in `traffic`.

    packed: the pages of streamed tiles, which are packed at home and on the link. kernels: the device's, which unpack
    them into `unpacked`, one tile on the device [2, P, H_kv, S, D]. packed None: tiles cross raw.
    """

    def __init__(
        self,
        store: TileStore,
        link: Link,
        traffic: Traffic,
        packed: PackedPages | None = None,
        unpacked: Tensor | None = None,
        kernels: DeviceKernels = NONE,
    ) -> None:
        assert (packed is None) == (unpacked is None)
        self.packed, self._unpacked, self._kernels = packed, unpacked, kernels
        self._store, self._link, self._traffic = store, link, traffic
        self._left: Event = link.record()  # the last new rows of `unpacked` are home

    def fetch(
        self, slot: Tensor, layer: int, index: int, num_tokens: int, after: tuple[Event, ...]
    ) -> tuple[Event, StagedPages | None]:
        """Begin to copy the pages of a tile that the first `num_tokens` tokens use into `slot`, after the events
        `after` -> (event of completion, the pages' formats in the slot; None: raw)."""
        num_pages = self._store.shape.used_pages(index, num_tokens)
        after = (*after, *self._traffic.before((layer, index)))
        if self._crosses_packed(layer, index):
            assert self.packed is not None
            return self.packed.fetch(slot, layer, index, num_pages, after)
        home = self._store.home(layer, index)
        if num_pages == slot.shape[1]:
            return self._link.to_device(slot, home, after), None
        if not num_pages:  # all its rows will be new: no copy
            return All(after), None
        self._link.to_device(slot[0, :num_pages], home[0, :num_pages], after)
        return self._link.to_device(slot[1, :num_pages], home[1, :num_pages], after), None

    def opened(self, slot: Tensor, staged: StagedPages | None) -> Tensor:
        """The raw tile of `slot`, valid until the next one is opened: the slot itself, or `unpacked`."""
        if staged is None:
            return slot
        assert self._unpacked is not None
        self._left.wait()
        self._unpack(self._unpacked, slot, staged)
        return self._unpacked

    def open_in_place(self, tile: Tensor, staged: StagedPages | None) -> None:
        """Unpack a tile in place. Pages after the staged ones are zeroed, since packed bytes read as numbers may not be
        finite."""
        if staged is None or not (num_pages := len(staged.flags)):
            return
        tile[:, :num_pages].copy_(self.opened(tile, staged)[:, :num_pages])
        tile[:, num_pages:].zero_()

    def write(self, layer: int, index: int, tile: Tensor, start: int, stop: int) -> Event:
        """Begin to copy home the pages of `tile` that contain its new tokens `start` to `stop`. Whole pages are copied,
        which are contiguous in each half. Raises DoesNotFit where there is no slot for raw pages of a packed tile."""
        if self._crosses_packed(layer, index):
            assert self.packed is not None
            event = self.packed.write(layer, index, tile, start, stop)
            if tile is self._unpacked:
                self._left = event
            return event
        page = self._store.shape.page_tokens
        pages = slice(start // page, -(-stop // page))
        home, ready = self._store.home(layer, index), self._link.record()
        self._link.to_host(home[0, pages], tile[0, pages], (ready,))
        event = self._link.to_host(home[1, pages], tile[1, pages], (ready,))
        self._traffic.writes((layer, index), event)
        return event

    def write_rows(self, layer: int, start: int, rows: Tensor) -> None:
        """Begin to copy rows [2, H_kv, n, D] of the tokens at `start` and on home. They are copied before they leave,
        so that the caller may write over them."""
        shape, ready = self._store.shape, self._link.record()
        position, stop, rows = start, start + rows.shape[2], rows.clone()
        while position < stop:
            index, within = divmod(position, shape.tokens)
            page, offset = divmod(within, shape.page_tokens)
            count = min(shape.page_tokens - offset, stop - position)
            first = position - start
            for half, own in zip(self._store.home(layer, index), rows, strict=True):
                for head, own_head in zip(half[page], own, strict=True):
                    new = own_head[first : first + count]
                    event = self._link.to_host(head[offset : offset + count], new, (ready,))
            self._traffic.writes((layer, index), event)
            position += count

    def pack_behind(self) -> None:
        """Begin to pack raw pages on a thread, where pages are packed; see `PackedPages.pack_behind`."""
        if self.packed is not None:
            self.packed.pack_behind()

    def before(self, layer: int, index: int) -> tuple[Event, ...]:
        """The events that a copy from the tile's home has to wait for."""
        return self._traffic.before((layer, index))

    def wait(self) -> None:
        """Wait until every home is up to date."""
        self._traffic.wait()

    def _crosses_packed(self, layer: int, index: int) -> bool:
        return self.packed is not None and self._store.place(layer, index) == "stream"

    def _unpack(self, tile: Tensor, slot: Tensor, staged: StagedPages) -> None:
        assert self.packed is not None
        codec = self.packed.codec
        if staged.kinds - {RESIDUAL}:
            self._kernels.unpack_tile(tile, slot, staged.flags, staged.starts, codec.packing)
        if RESIDUAL in staged.kinds:
            assert codec.codes is not None
            codes, group = codec.codes.of_layer(staged.layer), codec.codes.first_group(staged.index * tile.shape[1])
            self._kernels.restore_tile(tile, slot, staged.flags, staged.starts, codes, group, codec.page_shape)
