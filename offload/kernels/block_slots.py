"""The slots of a block cache: which block of keys and values is in which, by torch's operators.

Letters: T rows, n blocks that a row attends to, N blocks of a sequence, S slots of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotTable:
    """A layer's LRU table, all int32. slot_of: [N], -1 for a block in none. block_in: [S], -1 for none. used: [S], when
    rows last wanted the slot's block. clock: [1]: the last time; a time is a call of `TakeSlots`. asked: [N], when rows
    last wanted a block, by a GPU's kernels."""

    slot_of: Tensor
    asked: Tensor
    block_in: Tensor
    used: Tensor
    clock: Tensor


class TakeSlots(Protocol):
    """Slots for all blocks that rows attend to or are part of. Blocks in no slot take the slots that were used longest
    ago, of equally old ones the first, the lower block the lower slot. At most S blocks may be wanted."""

    def __call__(self, table: SlotTable, blocks: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """blocks: int32 [T, n], -1 for none. positions: of the rows, int64 [T], one after the other, the last of which
        may be padding, -size. size: tokens of a block. Returns the slots of `blocks`, int32 [T, n], -1 for none, and
        what has to be fetched: for each slot the block, int64 [S], -1 for none. A block that the rows begin is not
        fetched."""
        ...


def take_slots(table: SlotTable, blocks: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The slots of blocks, and the blocks to fetch, by torch's operators: see `TakeSlots`."""
    now = table.clock.add_(1)
    asked = torch.cat([blocks.flatten().long(), positions // size]).unique()
    asked = asked[asked >= 0]
    slots = table.slot_of[asked]
    table.used[slots[slots >= 0]] = now
    missing, wanted = asked[slots < 0], torch.full((len(table.used),), -1, device=blocks.device)
    if len(missing):
        free = _oldest(table.used, len(missing))
        before = table.block_in[free]
        table.slot_of[before[before >= 0]] = -1
        table.slot_of[missing] = free.int()
        table.block_in[free], table.used[free] = missing.int(), now
        wanted[free] = torch.where(missing * size < positions[0], missing, -1)
    return torch.where(blocks >= 0, table.slot_of[blocks.clamp(min=0)], -1), wanted


def _oldest(used: Tensor, count: int) -> Tensor:
    """The `count` slots that were used longest ago, int64 ascending; of equally old ones the first."""
    last = used.kthvalue(count).values
    older, equal = used < last, used == last
    return torch.where(older | (equal & (equal.cumsum(0) <= count - older.sum())))[0]
