"""Pages that lie packed at home, in about 12 of a number's 16 bits, or in 9 where their codes in 4 bits are on the
device: fewer bytes of them cross the link.

Nothing is lost, so it never matters to what is computed which pages are packed, and when that was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.cache.tiles import TileStore
from offload.kernels.card import Card
from offload.kernels.kv_codes import GROUP, Order
from offload.kernels.kv_remainders import REMAINDER, PageShape, restore, restore_tile, split_off
from offload.kernels.native import Kernels
from offload.kernels.packed import pack, unpack, unpack_tile
from offload.kernels.packing import Packing
from offload.plan.sizing import PACKED_ESCAPES, PACKED_TOKENS
from offload.transfer.link import Event, Link
from offload.transfer.memory import sent

UNINTERRUPTED = True  # a page lies as its flag says


class PageCodes(Protocol):
    """Codes in 4 bits of the full cache's tokens, kept on the device. They stay as long as the rows of their tokens."""

    @property
    def order(self) -> Order: ...

    @property
    def covered(self) -> int:
        """Tokens up to here have codes, but for the first few."""
        ...

    def first_group(self, page: int) -> int:
        """That a page begins with, of a head; less than 0 where its first tokens have none."""
        ...

    def of_layer(self, layer: int) -> Tensor:
        """uint8 [H_kv, groups, bytes] on the device."""
        ...

    def of_page(self, page: int) -> Tensor:
        """uint8 [L, H_kv, groups of a page, bytes] on the host, of a page all of whose tokens have codes."""
        ...


class PackedPages:
    """Which pages of a store's streamed tiles are packed. The keys of a page are a block, its values another: each is
    packed in its place once all its tokens are there, and lies as it is after it was written to again, or where it
    would take too many escapes.

    kernels: the processor's, which pack, and unpack what the host reads. codes: where there are some, a page is packed
    once all its tokens have theirs, and then it is what its numbers have beside these.
    """

    def __init__(self, store: TileStore, kernels: Kernels) -> None:
        shape = store.shape
        assert shape.dtype == torch.bfloat16
        self._store, self._kernels = store, kernels
        self.packing = Packing.of(
            shape.num_kv_heads * shape.page_tokens * shape.head_dim, PACKED_TOKENS * shape.head_dim, PACKED_ESCAPES
        )
        self._flags = torch.zeros(store.num_layers, 2, 0, dtype=torch.uint8)
        self._sizes = torch.zeros(store.num_layers, 2, 0, dtype=torch.long)  # bytes of remainders
        self.codes: PageCodes | None = None
        self.page_shape = PageShape(shape.num_kv_heads, shape.page_tokens, shape.head_dim)
        self._num_tried = 0  # pages: those before are packed as far as they can be
        self._on_device: Tensor | None = None

    @property
    def flags(self) -> Tensor:
        """uint8 [L, 2, pages] on the host: 1 where a layer's keys or values of a page are packed, REMAINDER where they
        are remainders."""
        shape = self._store.shape
        if (missing := self._store.num_tiles * shape.num_pages - self._flags.shape[2]) > 0:
            with torch.inference_mode(False):  # they change in passes and between them
                self._flags, self._sizes = pad(self._flags, (0, missing)), pad(self._sizes, (0, missing))
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
        ready = num_tokens if self.codes is None else min(num_tokens, self.codes.covered)
        return ready // self._store.shape.page_tokens > self._num_tried

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
            layers, halves = torch.tensor(where).unbind(1)
            addresses = torch.tensor([self._address(*each, page) for each in where])
            flags[layers, halves, page] = self._packed(addresses, layers, halves, page)
            self._on_device = None
        self._num_tried += 1

    def _packed(self, addresses: Tensor, layers: Tensor, halves: Tensor, page: int) -> Tensor:
        """Pack the blocks of a page at these addresses. -> Their flags now."""
        flags = torch.zeros(len(addresses), dtype=torch.uint8)
        if self.codes is not None and self.codes.first_group(page) >= 0:
            codes = self.codes.of_page(page)
            at_codes = codes.data_ptr() + layers * codes.stride(0)
            parts = [addresses, at_codes, torch.full_like(layers, codes.stride(1)), halves]
            sizes = split_off(torch.stack(parts, 1), self.page_shape, self.codes.order, self._kernels)
            self._sizes[layers, halves, page] = sizes
            flags[sizes > 0] = REMAINDER
        rest = flags == 0
        flags[rest] = (pack(addresses[rest], self.packing, self._kernels) > 0).to(torch.uint8)
        return flags

    def give_back(self, num_tokens: int, length: int) -> None:
        """The codes of tokens from `num_tokens` on are about to go: their pages, of a cache of `length` tokens, lie as
        they are again. Homes are up to date, and nobody reads them."""
        first = num_tokens // self._store.shape.page_tokens
        for page in range(first, self.flags.shape[2]):
            blocks = (self._flags[:, :, page] == REMAINDER).nonzero().tolist()
            if blocks and page * self._store.shape.page_tokens < length:
                for layer in {layer for layer, _ in blocks}:
                    index, within = divmod(page, self._store.shape.num_pages)
                    self._store.home(layer, index)[:, within] = self.tokens(layer, page)
                    self._flags[layer, :, page] = 0
            self._flags[:, :, page][self._flags[:, :, page] == REMAINDER] = 0
        self._num_tried, self._on_device = min(self._num_tried, first), None

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
        step = PACKED_TOKENS if self.codes is None else GROUP
        first, last = start // step, -(-stop // step)
        out = torch.empty((2, shape.num_kv_heads, (last - first) * step, shape.head_dim), dtype=shape.dtype)
        for half in range(2):
            if self.flags[layer, half, page] == REMAINDER:
                self._restore(layer, half, page, out[half], first, last - first)
            else:
                self._unpack(layer, half, page, out[half], first * step // PACKED_TOKENS)
        return out[:, :, start - first * step : stop - first * step]

    def _unpack(self, layer: int, half: int, page: int, out: Tensor, first: int) -> None:
        """Groups of PACKED_TOKENS from number `first` of each head on, to out [H_kv, tokens, D]."""
        per_head, count = self._store.shape.page_tokens // PACKED_TOKENS, out.shape[1] // PACKED_TOKENS
        at, flag = self._address(layer, half, page), int(self.flags[layer, half, page])
        parts = [(at, rows.data_ptr(), head * per_head + first, count, flag) for head, rows in enumerate(out)]
        unpack(torch.tensor(parts), self.packing, self._kernels)

    def _restore(self, layer: int, half: int, page: int, out: Tensor, first: int, count: int) -> None:
        """Groups of GROUP tokens, likewise."""
        assert self.codes is not None
        codes, per_head = self.codes.of_page(page)[layer], self._store.shape.page_tokens // GROUP
        same = self._address(layer, half, page), codes.data_ptr(), codes.stride(0), half
        parts = [(same[0], rows.data_ptr(), *same[1:], head * per_head + first, count) for head, rows in enumerate(out)]
        restore(torch.tensor(parts), self.page_shape, self.codes.order, self._kernels)

    def read(self, layer: int, page: int, start: int, stop: int, out: Tensor) -> None:
        """The same in `out`."""
        out.copy_(self.tokens(layer, page, start, stop))

    def chunks(self, layer: int, index: int, half: int, runs: Tensor, out: Tensor) -> None:
        """Runs of tokens of a tile's keys (half 0) or values, each in one head, to the rows of `out` [n, tokens * D] on
        the host. runs int64 [n]: number of each in the half, which is cut into such runs; the tokens of one are a
        multiple of PACKED_TOKENS."""
        assert self.codes is None  # who has codes asks for no chunks
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

    def fetch(self, link: Link, tile: Tensor, layer: int, index: int, flags: Tensor, after: Sequence[Event]) -> Event:
        """Bring the first pages of tile `index` of a layer to `tile`, as many as `flags`, uint8 [2, pages], has, as
        they lie there: of packed blocks no more than they fill."""
        assert flags.shape[1]
        home, first = self._store.home(layer, index), index * self._store.shape.num_pages
        for half in range(2):
            dst, src = (each[half].flatten(1).view(torch.uint8) for each in (tile, home))
            sizes = self._sizes[layer, half, first : first + flags.shape[1]]
            for pages, flag in _runs(flags[half].tolist()):
                size = (self._block_bytes, self.packing.nbytes, int(sizes[pages].max()))[flag]
                event = link.to_device(dst[pages, :size], src[pages, :size], after)
        return event

    @property
    def _block_bytes(self) -> int:
        return 2 * self.packing.numbers

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
        self._unpack(self.tile, tile, layer, index, num_pages)
        tile[:, :num_pages].copy_(self.tile[:, :num_pages])  # and no packed bytes stay in ours, to be taken for numbers

    def _unpack(self, tile: Tensor, slot: Tensor, layer: int, index: int, num_pages: int) -> None:
        """No block was packed, or written to, since it came."""
        pages, flags = self.pages, self.pages.of_tile(layer, index, tile.device)
        are_remainders = pages.of_tile(layer, index)[:, :num_pages] == REMAINDER
        if not are_remainders.all():
            unpack_tile(tile, slot, flags, num_pages, pages.packing, self._kernels)
        if are_remainders.any():
            assert pages.codes is not None
            codes, first = pages.codes.of_layer(layer), pages.codes.first_group(index * tile.shape[1])
            restore_tile(tile, slot, flags, num_pages, codes, first, pages.page_shape, self._kernels)


def _runs(flags: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Slices of equal flags, with these."""
    start = 0
    for stop in range(1, len(flags) + 1):
        if stop == len(flags) or flags[stop] != flags[start]:
            yield slice(start, stop), flags[start]
            start = stop
