"""A tile on the device into which pages are unpacked that crossed the link as they lay at home."""

from __future__ import annotations

from torch import Tensor

from offload.cache.packed import PackedPages
from offload.cache.write_back import WriteBack
from offload.kernels.card import Card
from offload.kernels.native import Kernels
from offload.kernels.packed import unpack_tile
from offload.transfer.link import Event, Link

UNINTERRUPTED = True  # what leaves it is known


class Unpacked:
    """`tile`, [2, P, H_kv, S, D]. kernels: the device's."""

    def __init__(self, pages: PackedPages, tile: Tensor, link: Link, kernels: Kernels | Card) -> None:
        self.pages, self.tile, self._kernels = pages, tile, kernels
        self._left: Event = link.record()

    def take(self, slot: Tensor, flags: Tensor) -> Tensor:
        """The tile, of whose first pages `slot` has what `PackedPages.fetch` brought; flags: as that gave them."""
        self._left.wait()
        self._unpack(self.tile, slot, flags)
        return self.tile

    def send(self, write_back: WriteBack, layer: int, index: int, start: int, stop: int) -> None:
        """Send its tokens start to stop home, which are new."""
        self._left = write_back.write(layer, index, self.tile, start, stop)

    def in_place(self, tile: Tensor, flags: Tensor) -> None:
        """The same where they came. Packed bytes are no numbers, not even finite ones: none are left anywhere."""
        if not len(flags):
            return
        self._left.wait()
        came = len(flags) * tile.numel() // tile.shape[1]
        apart = self.tile.view(-1)[:came]
        apart.copy_(tile.view(-1)[:came])
        self._unpack(tile, self.tile, flags)
        apart.zero_()
        if len(flags) < tile.shape[1]:
            tile[:, len(flags) :].zero_()

    def _unpack(self, tile: Tensor, slot: Tensor, flags: Tensor) -> None:
        if len(flags):
            unpack_tile(tile, slot, flags, self.pages.packing, self._kernels)
