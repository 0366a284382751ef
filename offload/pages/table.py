"""The KV cache's page table: address and format of every page of a store."""

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
    """The page table's entries on the device. flags: uint8 [L, pages]: RAW, PACKED or RESIDUAL. blocks: int64
    [L, 2, pages], the addresses of keys and of values. starts: int64 [L, 2, pages], the byte offsets of keys and of
    values in the staging slot that their tile crosses into: page after page, the keys of each before its values."""

    flags: Tensor
    blocks: Tensor
    starts: Tensor


class PageTable:
    """The page table. A page's keys are one block, its values another. Both blocks are packed at home, or both are
    residuals at home, or both are raw: at home in tiles that do not stream, otherwise in a slot of `raw`.

    Each page has its own *place* at home, with room for the packed page. A residual is smaller: it begins at the
    page's place, or directly after the page before it if that is a residual too. So a tile's residuals cross the link
    in one copy.

    Pages of streamed tiles start as packed zeros, which nothing has written.
    """

    def __init__(self, store: TileStore, memory: Memory) -> None:
        self._store, self._device, self._packing = store, memory.device, store.shape.packing
        self.raw = RawPages(memory, store.shape)
        self.slots: dict[Page, int] = {}  # of raw pages of streamed tiles
        self._flags = torch.zeros(store.num_layers, 0, dtype=torch.uint8)
        self._places = self._blocks = self._sizes = torch.zeros(store.num_layers, 2, 0, dtype=torch.long)
        self._there: Entries | None = None

    @property
    def flags(self) -> Tensor:
        """The format of each page, RAW, PACKED or RESIDUAL: uint8 [L, pages] on the host."""
        self._follow_store()
        return self._flags

    @property
    def blocks(self) -> Tensor:
        """The addresses of each page's keys and values: int64 [L, 2, pages] on the host."""
        self._follow_store()
        return self._blocks

    @property
    def sizes(self) -> Tensor:
        """The bytes of each page's keys and values: int64 [L, 2, pages] on the host."""
        self._follow_store()
        return self._sizes

    def on_device(self) -> Entries:
        """A snapshot of the entries on the device. Later changes of the table do not change a snapshot."""
        self._follow_store()
        if self._there is None:
            blocks, starts = sent(torch.stack([self._blocks, self._starts()]), self._device).unbind()
            self._there = Entries(sent(self._flags.clone(), self._device), blocks, starts)
        return self._there

    def places(self, pages: Sequence[Page]) -> Tensor:
        """The addresses of the pages' places at home, for keys and for values: int64 [n, 2]."""
        self._follow_store()
        layers, numbers = torch.tensor(pages).unbind(1)
        return self._places[layers, :, numbers]

    def place_of_residual(self, page: Page) -> int:
        """The address at which a page's residual begins."""
        layer, number = page
        if number % self._store.shape.num_pages and self.flags[layer, number - 1] == RESIDUAL:
            return int(self._blocks[layer, 1, number - 1] + self._sizes[layer, 1, number - 1])
        return int(self._places[layer, 0, number])

    def streaming(self, number: int) -> list[Page]:
        """Page `number` of every layer in which it streams."""
        pages = [(layer, number) for layer in range(self._store.num_layers)]
        return [page for page in pages if self._store.place(*self.tile(page)) == "stream"]

    def tile(self, page: Page) -> tuple[int, int]:
        """The page's tile: its layer, and its index there."""
        return page[0], page[1] // self._store.shape.num_pages

    def set_raw(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """Enter `pages` as raw, in `slots`."""
        moved = {page: slot for page, slot in zip(pages, slots, strict=True) if self.slots.get(page) != slot}
        if not moved:
            return
        self._enter([*moved], RAW, self.raw.addresses([*moved.values()]), torch.tensor(2 * self._packing.numbers))
        self.slots |= moved

    def set_packed(self, pages: Sequence[Page]) -> None:
        """Enter raw pages as packed in their places, and free their slots."""
        if not pages:
            return
        self._enter(pages, PACKED, self.places(pages), torch.tensor(self._packing.nbytes))
        self._give_back(pages)

    def set_residual(self, page: Page, start: int, sizes: Sequence[int]) -> None:
        """Enter a raw page as a residual at home from address `start` on, and free its slot. sizes: the bytes of the
        keys and of the values."""
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
        """Add entries for the tiles that the store has allocated since."""
        store, num_pages, known = self._store, self._store.shape.num_pages, self._flags.shape[1]
        if store.num_tiles * num_pages <= known:
            return
        missing = store.num_tiles * num_pages - known
        with torch.inference_mode(False):  # entries change in passes and between them
            self._flags, self._places, self._sizes = (
                pad(entries, (0, missing)) for entries in (self._flags, self._places, self._sizes)
            )
            for layer in range(store.num_layers):
                for index in range(known // num_pages, store.num_tiles):
                    self._take_in(layer, index)
            self._blocks = torch.cat([self._blocks, self._places[..., known:]], 2)
        self._there = None

    def _take_in(self, layer: int, index: int) -> None:
        """Enter the pages of a new home. A home of packed pages has each page's keys and values together, any other
        home all keys before all values. The last home may have no room for its last pages, which are never used."""
        count, kinds = self._store.shape.num_pages, torch.arange(2)[:, None]
        if streams := self._store.place(layer, index) == "stream":
            size, found = self._packing.nbytes, 2 * torch.arange(count) + kinds
        else:
            size, found = 2 * self._packing.numbers, torch.arange(count) + kinds * count
        own = slice(index * count, (index + 1) * count)
        self._flags[layer, own] = PACKED if streams else RAW
        self._places[layer, :, own] = self._store.address(layer, index) + found * size
        self._sizes[layer, :, own] = size
