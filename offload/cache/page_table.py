"""Where each page of a store lies, and how: the one that is asked by whoever reads or writes a home."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.cache.raw_pages import RawPages
from offload.cache.tiles import TileStore
from offload.transfer.memory import Memory, sent

UNINTERRUPTED = True  # a page lies where the table says

Page = tuple[int, int]  # its layer, and its number in the sequence


class PageTable:
    """Of a page its keys are a block, its values another. Both lie packed at home, or both as they are: at home in
    tiles that do not stream, else *raw*, in a slot of `raw`.

    Nobody has written to what lies packed at home at first: zeros.
    """

    def __init__(self, store: TileStore, memory: Memory) -> None:
        self._store, self._device, self._packing = store, memory.device, store.shape.packing
        self.raw = RawPages(memory, store.shape)
        self.slots: dict[Page, int] = {}  # of raw pages
        self._flags = torch.zeros(store.num_layers, 0, dtype=torch.uint8)
        self._homes = self._blocks = torch.zeros(store.num_layers, 2, 0, dtype=torch.long)
        self._flags_there: Tensor | None = None  # as the device has them
        self._blocks_there: Tensor | None = None

    @property
    def flags(self) -> Tensor:
        """uint8 [L, pages] on the host: 1 where a page is packed."""
        self._follow_store()
        return self._flags

    @property
    def blocks(self) -> Tensor:
        """int64 [L, 2, pages] on the host: the address of each page's keys and values."""
        self._follow_store()
        return self._blocks

    def flags_there(self) -> Tensor:
        """`flags` on the device, as they are now: what was given stays so."""
        flags = self.flags
        if self._flags_there is None:
            self._flags_there = sent(flags.clone(), self._device)
        return self._flags_there

    def blocks_there(self) -> Tensor:
        """`blocks` likewise."""
        blocks = self.blocks
        if self._blocks_there is None:
            self._blocks_there = sent(blocks.clone(), self._device)
        return self._blocks_there

    def homes(self, pages: Sequence[Page]) -> Tensor:
        """int64 [n, 2]: where their keys and values lie when they are packed."""
        self._follow_store()
        layers, numbers = torch.tensor(pages).unbind(1)
        return self._homes[layers, :, numbers]

    def streaming(self, number: int) -> list[Page]:
        """That page of the layers in which it streams."""
        pages = [(layer, number) for layer in range(self._store.num_layers)]
        return [page for page in pages if self._store.place(*self.tile(page)) == "stream"]

    def tile(self, page: Page) -> tuple[int, int]:
        """Its layer, and its number there."""
        return page[0], page[1] // self._store.shape.num_pages

    def lie_raw(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """These pages lie in these slots from now on."""
        moved = {page: slot for page, slot in zip(pages, slots, strict=True) if self.slots.get(page) != slot}
        if not moved:
            return
        self._follow_store()
        layers, numbers = torch.tensor([*moved]).unbind(1)
        self._blocks[layers, :, numbers] = self.raw.addresses([*moved.values()])
        self._flags[layers, numbers] = 0
        self.slots |= moved
        self._flags_there = self._blocks_there = None

    def lie_at_home(self, page: Page) -> None:
        """This raw page is what it has packed at home from now on, and its slot is free."""
        layer, number = page
        self._blocks[layer, :, number] = self._homes[layer, :, number]
        self._flags[layer, number] = 1
        self.raw.give_back(self.slots.pop(page))
        self._flags_there = self._blocks_there = None

    def _follow_store(self) -> None:
        """Have all pages that the store has."""
        store, num_pages, known = self._store, self._store.shape.num_pages, self._flags.shape[1]
        if store.num_tiles * num_pages <= known:
            return
        missing = store.num_tiles * num_pages - known
        with torch.inference_mode(False):  # they change in passes and between them
            self._flags, self._homes = pad(self._flags, (0, missing)), pad(self._homes, (0, missing))
            for layer in range(store.num_layers):
                for index in range(known // num_pages, store.num_tiles):
                    self._enter(layer, index)
            self._blocks = torch.cat([self._blocks, self._homes[..., known:]], 2)
        self._flags_there = self._blocks_there = None

    def _enter(self, layer: int, index: int) -> None:
        """A home that is new: pages with keys and values, or the keys of all and then the values of all."""
        address, kinds = self._store.address(layer, index), torch.arange(2)[:, None]
        count = first = self._store.shape.num_pages
        if streams := self._store.place(layer, index) == "stream":
            count = len(self._store.home(layer, index))
            found = (2 * torch.arange(count) + kinds) * self._packing.nbytes
        else:
            found = (torch.arange(count) + kinds * count) * 2 * self._packing.numbers
        own = slice(index * first, index * first + count)
        self._flags[layer, own] = int(streams)
        self._homes[layer, :, own] = address + found
