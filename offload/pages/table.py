"""Where each page of a store lies, and how: the one that is asked by whoever reads or writes a home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.formats.layout import PACKED, RAW, RESIDUAL
from offload.pages.raw import RawPages
from offload.pages.tiles import TileStore
from offload.transfer.memory import Memory, sent

Page = tuple[int, int]  # its layer, and its number in the sequence


@dataclass(frozen=True)
class Entries:
    """Of all pages, in one memory. flags: uint8 [L, pages]: RAW, PACKED or RESIDUAL. blocks: int64 [L, 2, pages], the
    addresses of keys and of values. starts: likewise, the bytes of a staging slot at which each comes to lie with its
    tile: page after page, the keys of each before its values."""

    flags: Tensor
    blocks: Tensor
    starts: Tensor


class PageTable:
    """Of a page its keys are a block, its values another. Both lie packed at home, or both as residuals, or both as
    they are: at home in tiles that do not stream, else in a slot of `raw`.

    Each page has a *place* of its own at home, which fits it packed. A residual takes less and lies there, or where
    the page before it ends, if that is one as well: so a tile's residuals cross the link in one piece.

    Nobody has written to what lies packed at home at first: zeros.
    """

    def __init__(self, store: TileStore, memory: Memory) -> None:
        self._store, self._device, self._packing = store, memory.device, store.shape.packing
        self.raw = RawPages(memory, store.shape)
        self.slots: dict[Page, int] = {}  # of raw pages
        self._flags = torch.zeros(store.num_layers, 0, dtype=torch.uint8)
        self._places = self._blocks = self._sizes = torch.zeros(store.num_layers, 2, 0, dtype=torch.long)
        self._there: Entries | None = None

    @property
    def flags(self) -> Tensor:
        """uint8 [L, pages] on the host: how each lies."""
        self._follow_store()
        return self._flags

    @property
    def blocks(self) -> Tensor:
        """int64 [L, 2, pages] on the host: the address of each page's keys and values."""
        self._follow_store()
        return self._blocks

    @property
    def sizes(self) -> Tensor:
        """int64 [L, 2, pages] on the host: their bytes."""
        self._follow_store()
        return self._sizes

    def on_device(self) -> Entries:
        """On the device, as they are now: what was given stays so."""
        self._follow_store()
        if self._there is None:
            blocks, starts = sent(torch.stack([self._blocks, self._starts()]), self._device).unbind()
            self._there = Entries(sent(self._flags.clone(), self._device), blocks, starts)
        return self._there

    def places(self, pages: Sequence[Page]) -> Tensor:
        """int64 [n, 2]: those of their keys and values, at home."""
        self._follow_store()
        layers, numbers = torch.tensor(pages).unbind(1)
        return self._places[layers, :, numbers]

    def place_of_residual(self, page: Page) -> int:
        """Where one begins."""
        layer, number = page
        if number % self._store.shape.num_pages and self.flags[layer, number - 1] == RESIDUAL:
            return int(self._blocks[layer, 1, number - 1] + self._sizes[layer, 1, number - 1])
        return int(self._places[layer, 0, number])

    def streaming(self, number: int) -> list[Page]:
        """That page of the layers in which it streams."""
        pages = [(layer, number) for layer in range(self._store.num_layers)]
        return [page for page in pages if self._store.place(*self.tile(page)) == "stream"]

    def tile(self, page: Page) -> tuple[int, int]:
        """Its layer, and its number there."""
        return page[0], page[1] // self._store.shape.num_pages

    def set_raw(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """These pages lie in these slots from now on."""
        moved = {page: slot for page, slot in zip(pages, slots, strict=True) if self.slots.get(page) != slot}
        if not moved:
            return
        self._enter([*moved], RAW, self.raw.addresses([*moved.values()]), torch.tensor(2 * self._packing.numbers))
        self.slots |= moved

    def set_packed(self, pages: Sequence[Page]) -> None:
        """These raw pages are what their places have from now on, and their slots are free."""
        if not pages:
            return
        self._enter(pages, PACKED, self.places(pages), torch.tensor(self._packing.nbytes))
        self._give_back(pages)

    def set_residual(self, page: Page, start: int, sizes: Sequence[int]) -> None:
        """This raw page is the residual at home from address `start` on, of keys and values of so many bytes."""
        self._enter([page], RESIDUAL, torch.tensor([[start, start + sizes[0]]]), torch.tensor([sizes]))
        self._give_back([page])

    def _enter(self, pages: Sequence[Page], flag: int, blocks: Tensor, sizes: Tensor) -> None:
        self._follow_store()
        layers, numbers = torch.tensor(pages).unbind(1)
        self._flags[layers, numbers] = flag
        self._blocks[layers, :, numbers] = blocks
        self._sizes[layers, :, numbers] = sizes
        self._there = None

    def _give_back(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self.raw.give_back(self.slots.pop(page))

    def _starts(self) -> Tensor:
        keys, values = self._sizes.unflatten(2, (-1, self._store.shape.num_pages)).unbind(1)
        first = (keys + values).cumsum(2) - keys - values
        return torch.stack([first, first + keys], 1).flatten(2)

    def _follow_store(self) -> None:
        """Have all pages that the store has."""
        store, num_pages, known = self._store, self._store.shape.num_pages, self._flags.shape[1]
        if store.num_tiles * num_pages <= known:
            return
        missing = store.num_tiles * num_pages - known
        with torch.inference_mode(False):  # they change in passes and between them
            self._flags, self._places, self._sizes = (
                pad(entries, (0, missing)) for entries in (self._flags, self._places, self._sizes)
            )
            for layer in range(store.num_layers):
                for index in range(known // num_pages, store.num_tiles):
                    self._take_in(layer, index)
            self._blocks = torch.cat([self._blocks, self._places[..., known:]], 2)
        self._there = None

    def _take_in(self, layer: int, index: int) -> None:
        """A home that is new: pages with keys and values, or the keys of all and then the values of all. Nobody asks
        for pages that the last home has no room for."""
        count, kinds = self._store.shape.num_pages, torch.arange(2)[:, None]
        if streams := self._store.place(layer, index) == "stream":
            size, found = self._packing.nbytes, 2 * torch.arange(count) + kinds
        else:
            size, found = 2 * self._packing.numbers, torch.arange(count) + kinds * count
        own = slice(index * count, (index + 1) * count)
        self._flags[layer, own] = PACKED if streams else RAW
        self._places[layer, :, own] = self._store.address(layer, index) + found * size
        self._sizes[layer, :, own] = size
