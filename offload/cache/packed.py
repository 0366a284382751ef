"""Pages that lie packed at home, in about 12 of a number's 16 bits: fewer bytes of them cross the link.

Nothing is lost, so it never matters to what is computed which pages are packed, and when that was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.cache.tiles import TileStore
from offload.kernels.card import Card
from offload.kernels.native import Kernels
from offload.kernels.packed import pack, unpack, unpack_tile
from offload.kernels.packing import Packing
from offload.plan.sizing import PACKED_ESCAPES, PACKED_TOKENS
from offload.transfer.link import Event, Link
from offload.transfer.memory import sent

UNINTERRUPTED = True  # a page lies as its flag says


class PackedPages:
    """Which pages of a store's streamed tiles are packed. The keys of a page are a block, its values another: each is
    packed in its place once all its tokens are there, and lies as it is after it was written to again, or where it
    would take too many escapes.

    kernels: the processor's, which pack, and unpack what the host reads.
    """

    def __init__(self, store: TileStore, kernels: Kernels) -> None:
        shape = store.shape
        assert shape.dtype == torch.bfloat16
        self._store, self._kernels = store, kernels
        self.packing = Packing.of(
            shape.num_kv_heads * shape.page_tokens * shape.head_dim, PACKED_TOKENS * shape.head_dim, PACKED_ESCAPES
        )
        self._flags = torch.zeros(store.num_layers, 2, 0, dtype=torch.uint8)
        self._num_tried = 0  # pages: those before are packed as far as they can be
        self._on_device: Tensor | None = None

    @property
    def flags(self) -> Tensor:
        """uint8 [L, 2, pages] on the host: 1 where a layer's keys or values of a page are packed."""
        shape = self._store.shape
        if (missing := self._store.num_tiles * shape.num_pages - self._flags.shape[2]) > 0:
            with torch.inference_mode(False):  # they change in passes and between them
                self._flags = pad(self._flags, (0, missing))
            self._on_device = None
        return self._flags

    def flags_on(self, device: torch.device) -> Tensor:
        """The same on the device."""
        flags = self.flags
        if self._on_device is None:
            self._on_device = sent(flags, device) if device.type != "cpu" else flags
        return self._on_device

    def of_tile(self, layer: int, index: int, device: torch.device | None = None) -> Tensor:
        """uint8 [2, P] of a tile, on the host or on the device."""
        pages, flags = self._store.shape.num_pages, self.flags if device is None else self.flags_on(device)
        return flags[layer, :, index * pages : (index + 1) * pages]

    def are_due(self, num_tokens: int) -> bool:
        """Whether whole pages of `num_tokens` tokens may be packed that are not."""
        return num_tokens // self._store.shape.page_tokens > self._num_tried

    def pack_next(self) -> None:
        """Pack the next page, in all layers: its homes are up to date, and nobody reads them."""
        page, flags = self._num_tried, self.flags
        where = [
            (layer, half)
            for layer in range(self._store.num_layers)
            if self._store.place(layer, page // self._store.shape.num_pages) == "stream"
            for half in range(2)
            if not flags[layer, half, page]
        ]
        if where:
            addresses = torch.tensor([self._address(*each, page) for each in where])
            layers, halves = torch.tensor(where).unbind(1)
            flags[layers, halves, page] = (pack(addresses, self.packing, self._kernels) > 0).to(torch.uint8)
            self._on_device = None
        self._num_tried += 1

    def written(self, layer: int, index: int, pages: slice, write: Callable[[], Event]) -> Event:
        """Have `write` write these pages of a tile home, as they are."""
        event = write()
        first = index * self._store.shape.num_pages
        own = self.flags[layer, :, first + pages.start : first + pages.stop]
        if own.any():
            own.zero_()
            self._on_device = None
        self._num_tried = min(self._num_tried, first + pages.start)
        return event

    def forget(self) -> None:
        """All homes were written as they are."""
        self._flags.zero_()
        self._num_tried, self._on_device = 0, None

    def tokens(self, layer: int, page: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Tokens `start` to `stop` of a page as bf16 [2, H_kv, stop - start, D] on the host, in memory of their own."""
        shape = self._store.shape
        stop = shape.page_tokens if stop is None else stop
        first, last = start // PACKED_TOKENS, -(-stop // PACKED_TOKENS)
        count = last - first
        out = torch.empty((2, shape.num_kv_heads, count * PACKED_TOKENS, shape.head_dim), dtype=shape.dtype)
        parts = [
            (self._address(layer, half, page), out[half, head].data_ptr(), head * self._groups_of_head + first, count,
             int(self.flags[layer, half, page]))
            for half in range(2)
            for head in range(shape.num_kv_heads)
        ]  # fmt: skip
        unpack(torch.tensor(parts), self.packing, self._kernels)
        return out[:, :, start - first * PACKED_TOKENS : stop - first * PACKED_TOKENS]

    def read(self, layer: int, page: int, start: int, stop: int, out: Tensor) -> None:
        """The same in `out`."""
        out.copy_(self.tokens(layer, page, start, stop))

    def chunks(self, layer: int, index: int, half: int, runs: Tensor, out: Tensor) -> None:
        """Runs of tokens of a tile's keys (half 0) or values, each in one head, to the rows of `out` [n, tokens * D] on
        the host. runs int64 [n]: number of each in the half, which is cut into such runs; the tokens of one are a
        multiple of PACKED_TOKENS."""
        per_run = out.shape[1] // self.packing.group
        page, run = runs // (per_page := self.packing.num_groups // per_run), runs % per_page
        base = self._address(layer, half, index * self._store.shape.num_pages)
        parts = torch.stack(
            [
                base + page * self._block_bytes,
                out.data_ptr() + torch.arange(len(runs)) * out.stride(0) * out.itemsize,
                run * per_run,
                torch.full_like(runs, per_run),
                self.of_tile(layer, index)[half, page].long(),
            ],
            1,
        )
        unpack(parts, self.packing, self._kernels)

    def fetch(self, link: Link, tile: Tensor, home: Tensor, flags: Tensor, after: Sequence[Event]) -> Event:
        """Bring the first pages of `home` to `tile`, as many as `flags`, uint8 [2, pages], has, as they lie there: of
        packed blocks no more than they fill."""
        assert flags.shape[1]
        for half in range(2):
            dst, src = (each[half].flatten(1).view(torch.uint8) for each in (tile, home))
            for pages, is_packed in _runs(flags[half].tolist()):
                size = self.packing.nbytes if is_packed else self._block_bytes
                event = link.to_device(dst[pages, :size], src[pages, :size], after)
        return event

    @property
    def _block_bytes(self) -> int:
        return 2 * self.packing.numbers

    @property
    def _groups_of_head(self) -> int:
        return self._store.shape.page_tokens // PACKED_TOKENS

    def _address(self, layer: int, half: int, page: int) -> int:
        """Of a block, packed or not."""
        num_pages = self._store.shape.num_pages
        index, within = divmod(page, num_pages)
        return self._store.home(layer, index).data_ptr() + (half * num_pages + within) * self._block_bytes


class Unpacked:
    """A tile on the device into which pages are unpacked that crossed the link packed.

    kernels: the device's.
    """

    def __init__(self, pages: PackedPages, tile: Tensor, link: Link, kernels: Kernels | Card) -> None:
        self.pages, self.tile, self._kernels = pages, tile, kernels
        self._left: Event = link.record()

    def take(self, slot: Tensor, layer: int, index: int, num_pages: int) -> Tensor:
        """The first `num_pages` pages of that tile, which came into `slot`."""
        self._left.wait()
        self._unpack(self.tile, slot, layer, index, num_pages)
        return self.tile

    def leaves(self, event: Event) -> None:
        """New rows of it are on their way home until then."""
        self._left = event

    def in_place(self, tile: Tensor, layer: int, index: int, num_pages: int) -> None:
        """The same where they came."""
        self._left.wait()
        self.tile[:, :num_pages].copy_(tile[:, :num_pages])
        self._unpack(tile, self.tile, layer, index, num_pages)

    def _unpack(self, tile: Tensor, slot: Tensor, layer: int, index: int, num_pages: int) -> None:
        """No block was packed, or written to, since it came."""
        flags = self.pages.of_tile(layer, index, tile.device)
        unpack_tile(tile, slot, flags, num_pages, self.pages.packing, self._kernels)


def _runs(flags: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Slices of equal flags, with these."""
    start = 0
    for stop in range(1, len(flags) + 1):
        if stop == len(flags) or flags[stop] != flags[start]:
            yield slice(start, stop), flags[start]
            start = stop
