"""The block cache: blocks of keys and values on the device that rows chose lately, of those that are on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.device import DeviceKernels
from offload.kernels.runs import Run
from offload.kv.fetch import Tail, make_fetch
from offload.kv.full import FullCache
from offload.transfer.memory import Memory

PURPOSE = "block cache"
_NO_TAIL = Tail(0, 0, 0, 0)


class BlockCache:
    """Slots of each layer for blocks of `size` tokens, [L, 2, H_kv, slots * size, D] on the device. A block that is in
    none takes the slot of the least recently used one. Layers do not share slots: they come in turns, and where a pass
    wants more than all slots hold, each would have lost its blocks when it comes again."""

    def __init__(self, memory: Memory, full: FullCache, size: int, slots: int, kernels: DeviceKernels) -> None:
        """full: whose homes on the host have all rows."""
        shape, count = full.shape, full.num_layers
        self.size, self.num_slots, self._memory = size, slots, memory
        held = count, 2, shape.num_kv_heads, slots * size, shape.head_dim
        self.held = memory.allocate(held, shape.dtype, tier="device", purpose=PURPOSE)
        of_layer = self.held[0].nbytes
        self._fetches = [make_fetch(full, size, kernels, of_layer, [layer]) for layer in range(count)]
        device = memory.device
        self._slots = torch.full((count, 0), -1, dtype=torch.long, device=device)  # by block
        self._blocks = torch.full((count, slots), -1, dtype=torch.long, device=device)  # by slot
        self._used = torch.zeros(count, slots, dtype=torch.long, device=device)  # when, by slot
        self._clock = 0

    def reserve(self, num_tokens: int) -> None:
        """Know the blocks of `num_tokens` tokens."""
        missing = -(-num_tokens // self.size) - self._slots.shape[1]
        if missing > 0:
            more = self._slots.new_full((len(self._slots), missing), -1)
            self._slots = torch.cat([self._slots, more], 1)

    def run(self, layer: int) -> Run:
        """All slots of a layer as one run, in which a block's tokens are at its slot."""
        return Run(self.held[layer][:, None], self.num_slots * self.size)

    def slots(self, layer: int, blocks: Tensor, start: int) -> Tensor:
        """The slots of `blocks`, each once and at most as many as there are slots, with the rows of their tokens before
        `start`. They count as used now."""
        slots, own = self._slots[layer], self._used[layer]
        self._clock += 1
        found = slots[blocks]
        own[found[found >= 0]] = self._clock
        missing = blocks[found < 0]
        if len(missing):
            free = own.topk(len(missing), largest=False).indices
            self._give(layer, missing, free)
            wanted = torch.full_like(self._blocks[layer], -1)
            wanted[free] = torch.where(missing * self.size < start, missing, -1)
            heads = self.held.shape[2]
            self._fetches[layer].fetch(self.held[layer][None], _NO_TAIL, wanted.expand(1, heads, -1).contiguous())
        return slots[blocks]

    def places(self, layer: int, blocks: Tensor) -> Tensor:
        """The slots of blocks that are in some, for each of `blocks`; -1 for -1."""
        return torch.where(blocks >= 0, self._slots[layer][blocks.clamp(min=0)], -1)

    def write(self, layer: int, start: int, rows: Tensor) -> None:
        """Write rows [2, H_kv, n, D] of the tokens at `start` and on, whose blocks are in slots."""
        tokens = torch.arange(start, start + rows.shape[2], device=rows.device)
        at = self._slots[layer][tokens // self.size] * self.size + tokens % self.size
        self.held[layer].index_copy_(2, at, rows)

    def forget(self, first: int) -> None:
        """Forget the blocks from `first` on, whose rows change at home."""
        self._slots[:, first:] = -1
        gone = self._blocks >= first
        self._blocks[gone], self._used[gone] = -1, 0

    def nbytes(self) -> int:
        return self.held.nbytes

    def release(self) -> None:
        """Release the memory; the cache is not used again."""
        self._memory.released(self.held, tier="device", purpose=PURPOSE)

    def _give(self, layer: int, blocks: Tensor, slots: Tensor) -> None:
        """Give slots to blocks that are in none."""
        before = self._blocks[layer, slots]
        self._slots[layer, before[before >= 0]] = -1
        self._blocks[layer, slots], self._slots[layer, blocks] = blocks, slots
        self._used[layer, slots] = self._clock
