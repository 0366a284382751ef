"""The slots of a block cache: which block of keys and values is in which, by torch's operators.

Nothing here is read by the host, and no size follows from what is in slots, so a pass that runs as a graph may take
slots. Letters: T rows, n blocks that a row attends to, N blocks of a sequence, S slots of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

NOWHERE = -1  # in place of a block


@dataclass(frozen=True)
class SlotTable:
    """A layer's table of slots, all int32. slot_of: [N], -1 for a block in none. asked: [N], when rows last wanted a
    block. block_in: [S], -1 for none. used: [S], when rows last wanted the slot's block. clock: [1]: the last time; a
    time is a call of `TakeSlots`."""

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
    """See `TakeSlots`."""
    num_slots = len(table.used)
    numbers = torch.arange(len(table.asked), device=blocks.device, dtype=torch.int32)
    slots = torch.arange(num_slots, device=blocks.device, dtype=torch.int32)
    now = table.clock.add_(1)
    _put(table.asked, torch.cat([blocks.flatten().long(), positions // size]), now)
    is_asked = table.asked == now
    _put(table.used, torch.where(is_asked, table.slot_of, -1).long(), now)
    is_missing = is_asked & (table.slot_of < 0)
    missing = slots.new_full((num_slots,), -1)
    _put(missing, torch.where(is_missing, is_missing.cumsum(0) - 1, -1), numbers)
    is_free = table.used.argsort(stable=True).argsort() < is_missing.sum()
    given = torch.where(is_free, missing[(is_free.cumsum(0) - 1).clamp(min=0)], -1)
    _put(table.slot_of, torch.where(is_free, table.block_in, -1).long(), torch.full_like(slots, -1))
    _put(table.slot_of, given.long(), slots)
    table.block_in.copy_(torch.where(is_free, given, table.block_in))
    table.used.copy_(torch.where(is_free, now, table.used))
    wanted = torch.where(given * size < positions[0], given, -1).long()
    return torch.where(blocks >= 0, table.slot_of[blocks.long().clamp(min=0)], -1), wanted


def _put(table: Tensor, places: Tensor, numbers: Tensor) -> None:
    """Write numbers [n], or one, to the places [n] of a table; to none where a place is -1."""
    with_room = pad(table, (0, 1))
    with_room[places] = numbers
    table.copy_(with_room[:-1])
