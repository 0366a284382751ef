"""The block cache: blocks of keys and values on the device that rows chose lately, of those that are on the host."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from offload.kernels.block_slots import SlotTable
from offload.kernels.device import DeviceKernels
from offload.kernels.runs import Run
from offload.kv.fetch import HostFetch, Tail, copies_of
from offload.kv.full import FullCache
from offload.plan.sizing import CHOOSING_ROWS
from offload.transfer.memory import Memory

PURPOSE = "block cache"
_NO_TAIL = Tail(0, 0, 0, 0)


class BlockCache:
    """Slots of each layer for blocks of `size` tokens, [L, 2, H_kv, slots * size, D] on the device. A block that is in
    none takes the slot of the least recently used one. Layers do not share slots: they come in turns, and where a pass
    wants more than all slots hold, each would have lost its blocks when it comes again.

    copies: of a GPU's own kernels, where they reach all homes: they bring blocks and take new rows home, and the host
    reads nothing; None: the host does. new: room for rows of a layer, [2, 1, H_kv, rows, D]."""

    def __init__(
        self, memory: Memory, full: FullCache, size: int, slots: int, num_blocks: int, kernels: DeviceKernels
    ) -> None:
        """full: whose homes on the host have all rows. num_blocks: of a sequence, at most."""
        shape, count = full.shape, full.num_layers
        self.size, self.num_slots, self._memory, self._full = size, slots, memory, full
        self._all = list[Tensor]()
        self.held = self._allocated(shape.dtype, count, 2, shape.num_kv_heads, slots * size, shape.head_dim)
        self.new = self._allocated(shape.dtype, 2, 1, shape.num_kv_heads, CHOOSING_ROWS, shape.head_dim)
        self.copies = copies_of(full, kernels)
        self._fetches = list[HostFetch]()
        if self.copies is None:
            of_layer = self.held[0].nbytes
            self._fetches = [HostFetch(full, size, kernels, of_layer, [layer]) for layer in range(count)]
        self._take = kernels.take_slots
        self._of_slots = self._allocated(torch.int32, 2, count, slots)
        self._of_blocks = self._allocated(torch.int32, 2, count, num_blocks)
        self._clocks = self._allocated(torch.int32, count, 1).zero_()
        for table in (self._of_slots, self._of_blocks):
            table[0], table[1] = -1, 0

    def begin(self) -> None:
        """A pass begins: what a broken-off one marked is not asked for now."""
        self._clocks += 1

    @property
    def has_all(self) -> bool:
        """Whether there are slots for all blocks of a sequence."""
        return self.num_slots >= self._of_blocks.shape[2]

    def table(self, layer: int) -> SlotTable:
        """Which block is in which slot of a layer."""
        slot_of, asked = self._of_blocks[:, layer]
        block_in, used = self._of_slots[:, layer]
        return SlotTable(slot_of, asked, block_in, used, self._clocks[layer])

    def run(self, layer: int) -> Run:
        """All slots of a layer as one run, in which a block's tokens are at its slot."""
        return Run(self.held[layer][:, None], self.num_slots * self.size)

    def bring(self, layer: int, blocks: Tensor, positions: Tensor) -> Tensor:
        """Bring blocks, int32 [T, n], -1 for none, and those of the rows' positions, see `TakeSlots`, to slots, with
        the rows of their tokens before the first position. Returns their slots, int32 [T, n]."""
        found, wanted = self._take(self.table(layer), blocks, positions, self.size)
        held, shape = self.held[layer : layer + 1], self._full.shape
        if self.copies is None:
            if (wanted >= 0).any():  # else it would wait for rows that go home
                wanted = wanted.expand(1, shape.num_kv_heads, -1).contiguous()
                self._fetches[layer].fetch(held, _NO_TAIL, wanted)
        else:
            homes = self._full.pages.store.addresses()[layer : layer + 1]
            self.copies.chunks(homes, wanted, held, chunk=self.size, page=shape.page_tokens, tile=shape.tokens)
        return found

    def write(self, layer: int, start: int, positions: Tensor) -> None:
        """Write the first rows of `new`, but for padding, to the slots of their blocks, and home. positions: of the
        rows, from `start` on, see `TakeSlots`."""
        rows, slot_of = self.new[:, 0, :, : len(positions)], self._of_blocks[0, layer]
        pages, shape = self._full.pages, self._full.shape
        if self.copies is not None:
            more = {"size": self.size, "page": shape.page_tokens, "tile": shape.tokens}
            homes = pages.store.addresses()[layer]
            self.copies.new_rows(rows, positions, slot_of, self.held[layer], homes, **more)
            return
        positions = positions[positions >= 0]
        at = slot_of[positions // self.size] * self.size + positions % self.size
        self.held[layer].index_copy_(2, at, rows[:, :, : len(at)])
        pages.write_rows(layer, start, rows[:, :, : len(at)])

    def forget(self, first: int) -> None:
        """Forget the blocks from `first` on, whose rows change at home."""
        self._of_blocks[0, :, first:] = -1
        block_in, used = self._of_slots
        used.masked_fill_(block_in >= first, 0)
        block_in.masked_fill_(block_in >= first, -1)

    @property
    def graph_key(self) -> Hashable:
        """A part of `Cache.graph_key`: where the homes' addresses are."""
        return self._full.pages.store.addresses().data_ptr()

    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._all)

    def release(self) -> None:
        """Release the memory; the cache is not used again."""
        for each in self._all:
            self._memory.released(each, tier="device", purpose=PURPOSE)

    def _allocated(self, dtype: torch.dtype, *size: int) -> Tensor:
        self._all.append(self._memory.allocate(size, dtype, tier="device", purpose=PURPOSE))
        return self._all[-1]
