"""A tile on the device into which pages are unpacked that crossed the link as they lay at home."""

from __future__ import annotations

from torch import Tensor

from offload.cache.packed import PackedPages, StagedPages
from offload.cache.write_back import WriteBack
from offload.kernels.gpu import GpuKernels
from offload.kernels.kv_residuals import restore_tile
from offload.kernels.native import Kernels
from offload.kernels.packed import unpack_tile
from offload.kernels.packing import RESIDUAL
from offload.transfer.link import Event, Link

UNINTERRUPTED = True  # what leaves it is known


class Unpacked:
    """`tile`, [2, P, H_kv, S, D]. kernels: the device's."""

    def __init__(self, pages: PackedPages, tile: Tensor, link: Link, kernels: Kernels | GpuKernels) -> None:
        self.pages, self.tile, self._kernels = pages, tile, kernels
        self._left: Event = link.record()

    def take(self, slot: Tensor, came: StagedPages) -> Tensor:
        """The tile whose first pages came into `slot`."""
        self._left.wait()
        self._unpack(slot, came)
        return self.tile

    def send(self, write_back: WriteBack, layer: int, index: int, start: int, stop: int) -> None:
        """Send its tokens start to stop home, which are new."""
        self._left = write_back.write(layer, index, self.tile, start, stop)

    def in_place(self, tile: Tensor, came: StagedPages) -> None:
        """The same where they came. Packed bytes are no numbers, not even finite ones: none are left."""
        num_pages = len(came.flags)
        if not num_pages:
            return
        self._left.wait()
        self._unpack(tile, came)
        tile[:, :num_pages].copy_(self.tile[:, :num_pages])
        tile[:, num_pages:].zero_()

    def _unpack(self, slot: Tensor, came: StagedPages) -> None:
        codec, tile = self.pages.codec, self.tile
        if came.kinds - {RESIDUAL}:
            unpack_tile(tile, slot, came.flags, came.starts, codec.packing, self._kernels)
        if RESIDUAL in came.kinds:
            assert codec.codes is not None
            codes, group = codec.codes.of_layer(came.layer), codec.codes.first_group(came.index * tile.shape[1])
            restore_tile(tile, slot, came.flags, came.starts, codes, group, codec.page_shape, self._kernels)
