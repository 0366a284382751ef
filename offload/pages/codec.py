"""Codec of the cache's pages in host memory: it packs them into fewer bits, and reads packed and residual pages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from offload.formats.layout import PACKED_TOKENS, RESIDUAL, PageShape
from offload.formats.packed import pack, unpack
from offload.formats.quantised_kv import GROUP, Order
from offload.formats.residuals import restore_pages, split_off_pages
from offload.native.interface import Library
from offload.pages.table import Page, PageTable
from offload.pages.tiles import TileShape


class PageCodes(Protocol):
    """4-bit codes of the full cache's tokens, on the device. Codes exist as long as their tokens' rows."""

    @property
    def order(self) -> Order: ...

    @property
    def covered(self) -> int:
        """Tokens before this position have codes, except the first few."""
        ...

    def first_group(self, page: int) -> int:
        """The first group of a page, within a head; negative where the page's first tokens have no codes."""
        ...

    def of_layer(self, layer: int) -> Tensor:
        """The codes of a layer, uint8 [H_kv, groups, bytes] on the device."""
        ...

    def of_page(self, layer: int, page: int) -> Tensor:
        """The codes of a page, uint8 [H_kv, groups of a page, bytes] on the host. All its tokens must have codes."""
        ...


class PageCodec:
    """Codec of the pages in `table`. kernels: the CPU's. codes: the 4-bit codes of the pages' tokens, if any."""

    def __init__(self, shape: TileShape, table: PageTable, kernels: Library) -> None:
        assert shape.dtype == torch.bfloat16
        self._shape, self._table, self._kernels = shape, table, kernels
        self.packing, self.page_shape = shape.packing, PageShape(shape.num_kv_heads, shape.page_tokens, shape.head_dim)
        self.codes: PageCodes | None = None

    def outside_code_range(self, page: Page) -> bool:
        """Whether the page never gets codes for all its tokens: there are no codes, or its first tokens have none."""
        return self.codes is None or self.codes.first_group(page[1]) < 0

    def has_codes(self, page: Page) -> bool:
        """Whether all of the page's tokens have codes now."""
        if self.codes is None or self.outside_code_range(page):
            return False
        return (page[1] + 1) * self._shape.page_tokens <= self.codes.covered

    def pack(self, pages: Sequence[Page]) -> Callable[[], Tensor]:
        """Packing of raw pages into their places at home, which any thread may call -> the bytes of keys and values of
        each, int64 [n, 2], 0 where they do not fit. It changes no table: see `entered`."""
        numbers = self._table.raw.addresses([self._table.slots[page] for page in pages])
        to = self._table.places(pages)
        return lambda: pack(numbers.flatten(), self.packing, self._kernels, to=to.flatten()).view(-1, 2)

    def entered(self, pages: Sequence[Page], sizes: Tensor) -> None:
        """Enter pages that are packed in their places. Those that did not fit stay raw."""
        self._table.set_packed([page for page, fits in zip(pages, (sizes > 0).all(1).tolist(), strict=True) if fits])

    def split_off(self, pages: Sequence[Page]) -> set[Page]:
        """Write raw pages home as residuals of their codes -> the pages for which that succeeded."""
        if self.codes is None or not pages:
            return set()
        numbers = self._table.raw.addresses([self._table.slots[page] for page in pages]).tolist()
        places, codes = self._table.places(pages).tolist(), [self.codes.of_page(*page) for page in pages]
        parts = [
            (numbers[i][half], places[i][half], codes[i].data_ptr(), codes[i].stride(0), half)
            for i in range(len(pages))
            for half in range(2)
        ]
        order, most = self.codes.order, self.packing.nbytes
        sizes = (
            split_off_pages(torch.tensor(parts), self.page_shape, order, self._kernels, most=most).view(-1, 2).tolist()
        )
        done = {page: i for i, page in enumerate(pages) if all(sizes[i])}
        for page, i in sorted(done.items()):
            start = self._table.place_of_residual(page)
            move(start, places[i][0], sizes[i][0])
            move(start + sizes[i][0], places[i][1], sizes[i][1])
            self._table.set_residual(page, start, sizes[i])
        return {*done}

    def read(self, pages: Sequence[Page], outs: Sequence[Tensor], first: int = 0) -> None:
        """Read pages into `outs`, bf16 [2, H_kv, tokens, D] each, from group `first` of each head on. A group has
        PACKED_TOKENS tokens, or GROUP tokens where the page is a residual."""
        packed, beside, kept = [], [], []
        for (layer, number), out in zip(pages, outs, strict=True):
            flag, blocks = int(self._table.flags[layer, number]), self._table.blocks[layer, :, number].tolist()
            step = GROUP if flag == RESIDUAL else PACKED_TOKENS
            per_head, count = self._shape.page_tokens // step, out.shape[2] // step
            heads = [
                (blocks[half], rows.data_ptr(), head * per_head + first, half)
                for half in range(2)
                for head, rows in enumerate(out[half])
            ]
            if flag != RESIDUAL:
                packed += [(at, to, group, count, flag) for at, to, group, _ in heads]
                continue
            assert self.codes is not None
            kept.append(codes := self.codes.of_page(layer, number))
            where = codes.data_ptr(), codes.stride(0)
            beside += [(at, to, *where, half, group, count) for at, to, group, half in heads]
        if packed:
            unpack(torch.tensor(packed), self.packing, self._kernels)
        if beside:
            assert self.codes is not None
            restore_pages(torch.tensor(beside), self.page_shape, self.codes.order, self._kernels)

    def tokens(self, layer: int, number: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Tokens `start` to `stop` of a page as bf16 [2, H_kv, stop - start, D] on the host, in new memory."""
        shape = self._shape
        stop = shape.page_tokens if stop is None else stop
        step = GROUP if self._table.flags[layer, number] == RESIDUAL else PACKED_TOKENS
        first, last = start // step, -(-stop // step)
        out = torch.empty((2, shape.num_kv_heads, (last - first) * step, shape.head_dim), dtype=shape.dtype)
        self.read([(layer, number)], [out], first)
        return out[:, :, start - first * step : stop - first * step]

    def chunks(self, layer: int, index: int, half: int, runs: Tensor, out: Tensor) -> None:
        """Read runs of tokens of a tile's keys (half 0) or values (half 1), each of one head, to the rows of `out`
        [n, tokens * D] on the host. runs int64 [n]: index of each run in the half, which is divided into runs of this
        length; the number of tokens of a run is a multiple of PACKED_TOKENS."""
        assert self.codes is None  # with codes, no caller reads chunks
        per_run = out.shape[1] // self.packing.group
        page, run = runs // (per_page := self.packing.num_groups // per_run), runs % per_page
        page = page + index * self._shape.num_pages
        parts = torch.stack(
            [
                self._table.blocks[layer, half, page],
                out.data_ptr() + torch.arange(len(runs)) * out.stride(0) * out.itemsize,
                run * per_run,
                torch.full_like(runs, per_run),
                self._table.flags[layer, page].long(),
            ],
            1,
        )
        unpack(parts, self.packing, self._kernels)


def move(to: int, at: int, size: int) -> None:
    """Copy `size` bytes of host memory from address `at` to address `to`."""
    if to != at:
        ctypes.memmove(to, at, size)
