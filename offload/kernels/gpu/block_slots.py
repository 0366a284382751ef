"""The slots of a block cache on a GPU, in Triton, see `kernels.block_slots`: four launches, each of which sees all that
the one before it wrote. The host reads nothing, and no size follows from what is in slots, so a graph may contain them.
"""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.kernels.block_slots import SlotTable
from offload.native.launch import launch

BLOCK = 1024  # entries of a program that marks or looks up
CHUNK = 4096  # blocks of a sequence, or slots, that a program goes through at a time
WARPS = 16  # of the programs that run alone


def take_slots(table: SlotTable, blocks: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The slots of blocks, and the blocks to fetch: see `kernels.block_slots.TakeSlots`."""
    assert blocks.is_contiguous()
    num_slots, count = len(table.used), blocks.numel()
    missing, found = blocks.new_empty(num_slots + 1), torch.empty_like(blocks)
    wanted = positions.new_empty(num_slots)
    launch(
        mark_asked,
        (-(-(count + len(positions)) // BLOCK),),
        (blocks, positions, table.slot_of, table.asked, table.used, table.clock, count, len(positions)),
        SIZE=size, BLOCK=BLOCK,
    )  # fmt: skip
    launch(
        list_missing,
        (1,),
        (table.slot_of, table.asked, table.clock, missing, len(table.asked), num_slots),
        CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip
    launch(
        give_slots,
        (1,),
        (missing, positions, table.slot_of, table.block_in, table.used, table.clock, wanted, num_slots),
        SIZE=size, PADDED=padded(num_slots), CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip
    launch(look_up, (-(-count // BLOCK),), (blocks, table.slot_of, found, count), BLOCK=BLOCK)
    return found, wanted


def padded(num_slots: int) -> int:
    """Slots of the program that gives them, a power of two."""
    return max(1 << (num_slots - 1).bit_length(), 32 * WARPS)


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def mark_asked(
    blocks,  # int32 [num_blocks], -1 for none
    positions,  # int64 [num_rows], -SIZE for padding
    slot_of,  # int32 [N]
    asked,  # int32 [N]
    used,  # int32 [S]
    clock,  # int32 [1]
    num_blocks,
    num_rows,
    SIZE: tl.constexpr,  # tokens of a block
    BLOCK: tl.constexpr,
):
    """Note when the blocks, and those of the rows, are asked for, and when their slots are used: now."""
    place, now = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.load(clock) + 1
    block = tl.load(blocks + place, mask=place < num_blocks, other=-1)
    is_row = (place >= num_blocks) & (place < num_blocks + num_rows)
    row = tl.load(positions + place - num_blocks, mask=is_row, other=0) // SIZE
    block = tl.where(is_row, row.to(tl.int32), block)
    slot = tl.load(slot_of + block, mask=block >= 0, other=-1)
    tl.store(asked + block, tl.zeros([BLOCK], tl.int32) + now, mask=block >= 0)
    tl.store(used + slot, tl.zeros([BLOCK], tl.int32) + now, mask=slot >= 0)


@triton.jit(do_not_specialize=["num_blocks", "num_slots"])
def list_missing(
    slot_of,  # int32 [N]
    asked,  # int32 [N]
    clock,  # int32 [1]
    missing,  # int32 [S + 1]: their number, then they, ascending
    num_blocks,  # N
    num_slots,  # S
    CHUNK: tl.constexpr,
):
    """List the blocks that are asked for now and are in no slot, by one program."""
    now = tl.load(clock) + 1
    count = tl.zeros([], tl.int32)
    for start in range(0, num_blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        real = block < num_blocks
        is_asked = tl.load(asked + block, mask=real, other=-1) == now
        is_missing = is_asked & (tl.load(slot_of + block, mask=real, other=0) < 0)
        place = count + tl.cumsum(is_missing.to(tl.int32), 0)
        tl.store(missing + place, block, mask=is_missing & (place <= num_slots))
        count += tl.sum(is_missing.to(tl.int32), 0)
    tl.store(missing, count)


@triton.jit(do_not_specialize=["num_slots"])
def give_slots(
    missing,  # int32 [S + 1]: the number of blocks, then they
    positions,  # int64 [T]
    slot_of,  # int32 [N]
    block_in,  # int32 [S]
    used,  # int32 [S]
    clock,  # int32 [1]
    wanted,  # int64 [S]
    num_slots,  # S
    SIZE: tl.constexpr,  # tokens of a block
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,  # slots that are given at a time
):
    """Give the missing blocks the slots that were used longest ago, by one program. When the last of these was used is
    found by bisection, counting those that are as old; of equally old slots the first are given."""
    now, count = tl.load(clock) + 1, tl.load(missing)
    every = tl.arange(0, PADDED)
    when = tl.load(used + every, mask=every < num_slots, other=2147483647)
    low, high = tl.full([], -1, tl.int32), now
    while high - low > 1:
        middle = low + (high - low) // 2
        is_reached = tl.sum((when <= middle).to(tl.int32), 0) >= count
        low, high = tl.where(is_reached, low, middle), tl.where(is_reached, middle, high)
    room = count - tl.sum((when < high).to(tl.int32), 0)
    begun, last, num_free = tl.load(positions), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, num_slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        real = slot < num_slots
        own = tl.load(used + slot, mask=real, other=2147483647)
        is_last = (own == high).to(tl.int32)
        is_free = (own < high) | ((own == high) & (last + tl.cumsum(is_last, 0) <= room))
        given = tl.load(missing + num_free + tl.cumsum(is_free.to(tl.int32), 0), mask=is_free, other=-1)
        before = tl.load(block_in + slot, mask=is_free, other=-1)
        tl.store(slot_of + before, tl.zeros([CHUNK], tl.int32) - 1, mask=before >= 0)
        tl.store(slot_of + given, slot, mask=is_free)
        tl.store(block_in + slot, given, mask=is_free)
        tl.store(used + slot, tl.zeros([CHUNK], tl.int32) + now, mask=is_free)
        fetched = is_free & (given.to(tl.int64) * SIZE < begun)
        tl.store(wanted + slot, tl.where(fetched, given, -1).to(tl.int64), mask=real)
        last += tl.sum(is_last, 0)
        num_free += tl.sum(is_free.to(tl.int32), 0)
    tl.store(clock, now)


@triton.jit(do_not_specialize=["num_blocks"])
def look_up(
    blocks,  # int32 [num_blocks], -1 for none
    slot_of,  # int32 [N]
    found,  # int32 [num_blocks]
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Look up the slots of blocks."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < num_blocks
    block = tl.load(blocks + place, mask=real, other=-1)
    tl.store(found + place, tl.load(slot_of + block, mask=block >= 0, other=-1), mask=real)
