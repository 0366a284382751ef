"""Numbers of bf16 in about 12 of their 16 bits, none of them lost: so pages of keys and values, and weights, cross a
link.

Numbers near each other have few exponents. Of each number its sign and mantissa are kept as they are, in a byte, and in
4 bits how far its exponent is below the largest of its group; one that is further below is an escape, whose exponent is
kept in a byte of its own. A block with more escapes than there is room for stays as it is.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.card import Card
from offload.kernels.native import Kernels
from offload.kernels.native.interface import PackedShape

ESCAPE = 15  # the distance of a number whose exponent is an escape
_HEAD_BYTES = 4  # of a group: its largest exponent and, above 8 bits, the number of escapes before its own


@dataclass(frozen=True)
class Packing:
    """How blocks of `numbers` numbers are packed, in groups of `group`, a multiple of 64, with room for `room` escapes.

    A packed block lies where its numbers were. Its parts, in bytes: signs and mantissas [numbers]; distances
    [numbers / 2], of each group [group / 2], those of its first half in the low halves; heads, int32 [groups]; escapes
    [room]; see native/packed.h.
    """

    numbers: int
    group: int
    room: int

    @property
    def num_groups(self) -> int:
        return self.numbers // self.group

    @property
    def heads(self) -> int:
        """Where they begin."""
        return self.numbers + self.numbers // 2

    @property
    def escapes(self) -> int:
        """Where they begin."""
        return self.heads + _HEAD_BYTES * self.num_groups

    @property
    def nbytes(self) -> int:
        """Of a packed block, a multiple of 16."""
        return self.escapes + self.room

    @classmethod
    def of(cls, numbers: int, group: int, escapes: float) -> Packing:
        """With room for that share of escapes, and so much more that the size is a multiple of 16 bytes."""
        found = cls(numbers, group, 0)
        found = cls(numbers, group, int(numbers * escapes) // 16 * 16 + -found.escapes % 16)
        if numbers % group or group % 64 or found.nbytes > 2 * numbers:
            raise ValueError(f"{numbers} numbers in groups of {group} cannot be packed with {found.room} escapes")
        return found

    @classmethod
    def roomiest(cls, numbers: int, group: int) -> Packing:
        """With as much room for escapes as leaves a packed block shorter than its numbers."""
        found = cls(numbers, group, 0)
        return cls(numbers, group, 2 * numbers - 16 - found.escapes)


def pack(addresses: Tensor, packing: Packing, kernels: Kernels) -> Tensor:
    """Pack the blocks of bf16 at `addresses`, int64 [n], on the host and on all threads -> int64 [n]: the bytes that
    each fills now; those of 0 are as they were."""
    assert kernels.library is not None
    sizes = torch.empty(len(addresses), dtype=torch.long)
    shape = PackedShape(packing.numbers, packing.group, packing.room)
    kernels.library.pack(
        addresses.data_ptr(), len(addresses), sizes.data_ptr(), ctypes.byref(shape), torch.get_num_threads()
    )
    return sizes


def unpack(parts: Tensor, packing: Packing, kernels: Kernels) -> None:
    """Parts int64 [n, 5], each: from, to, first, count, packed. `count` groups from number `first` on of the block at
    address `from`, packed or, where that is 0, as it is, are written to address `to` as bf16, on all threads."""
    assert kernels.library is not None
    parts = parts.contiguous()
    shape = PackedShape(packing.numbers, packing.group, packing.room)
    kernels.library.unpack(parts.data_ptr(), len(parts), ctypes.byref(shape), torch.get_num_threads())


def pack_numbers(numbers: Tensor, packing: Packing, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """bf16 [n], whole blocks on the host, which are overwritten -> (content, uint8: block after block, each no longer
    than it has to be; where each begins and the last ends, int64 [blocks + 1], multiples of 16)."""
    blocks = numbers.view(-1, packing.numbers)
    sizes = pack(blocks.data_ptr() + torch.arange(len(blocks)) * blocks.stride(0) * 2, packing, kernels)
    sizes = torch.where(sizes > 0, -(-sizes // 16) * 16, 2 * packing.numbers)
    parts = zip(blocks.view(torch.uint8), sizes.tolist(), strict=True)
    return torch.cat([block[:size] for block, size in parts]), pad(sizes.cumsum(0), (1, 0))


def unpack_numbers(content: Tensor, starts: Tensor, out: Tensor, packing: Packing, kernels: Kernels | Card) -> None:
    """Fill out, bf16 [n], from what `pack_numbers` gave; all are on the kernels' device."""
    if isinstance(kernels, Card):
        from offload.kernels.card.packed import unpack_numbers as unpack_on_card

        return unpack_on_card(content, starts, out, packing)
    sizes, number = starts.diff(), torch.arange(len(starts) - 1)
    same = torch.ones_like(number)
    parts = [content.data_ptr() + starts[:-1], out.data_ptr() + number * 2 * packing.numbers, 0 * same]
    is_packed = (sizes < 2 * packing.numbers).long()
    unpack(torch.stack([*parts, packing.num_groups * same, is_packed], 1), packing, kernels)
    return None


def unpack_tile(
    tile: Tensor, slot: Tensor, flags: Tensor, num_pages: int, packing: Packing, kernels: Kernels | Card
) -> None:
    """The first `num_pages` pages of `slot` in `tile`, both bf16 [2, P, H_kv, S, D]: a page's keys are a block, its
    values another, packed where flags, uint8 [2, P], are 1, as they are where these are 0, and else left alone. All are
    on the kernels' device."""
    if isinstance(kernels, Card):
        from offload.kernels.card.packed import unpack_pages  # it imports Triton, which not every machine has

        return unpack_pages(tile, slot, flags, num_pages, packing)
    _, pages, *_ = tile.shape
    flags = flags[:, :num_pages].flatten().long()
    blocks = torch.arange(2 * pages).view(2, pages)[:, :num_pages].flatten() * 2 * packing.numbers
    same = torch.ones_like(blocks)
    parts = [slot.data_ptr() + blocks, tile.data_ptr() + blocks, 0 * same, packing.num_groups * same, flags]
    unpack(torch.stack(parts, 1)[flags <= 1], packing, kernels)
    return None


def pack_with_torch(numbers: Tensor, packing: Packing) -> Tensor | None:
    """bf16 [numbers] -> uint8 [nbytes], bit for bit what the kernel makes of them; None where it leaves them."""
    bits = numbers.view(torch.int16).int().view(-1, packing.group) & 0xFFFF
    exponents, low = bits >> 7 & 255, bits >> 8 & 128 | bits & 127
    largest = exponents.amax(1, keepdim=True)
    distances = (largest - exponents).clamp(max=ESCAPE)
    escaped = distances == ESCAPE
    counts = escaped.sum(1)
    if counts.sum() > packing.room:
        return None
    first, second = distances.view(len(bits), 2, -1).unbind(1)
    heads = (largest[:, 0] | (counts.cumsum(0) - counts) << 8).int()
    escapes = torch.zeros(packing.room, dtype=torch.uint8)
    escapes[: counts.sum()] = exponents[escaped].to(torch.uint8)
    parts = low.to(torch.uint8).flatten(), (first | second << 4).to(torch.uint8).flatten(), heads.view(torch.uint8)
    return torch.cat([*parts, escapes])


def unpack_with_torch(block: Tensor, packing: Packing) -> Tensor:
    """uint8 [nbytes] -> bf16 [numbers]."""
    low, coded, heads, escapes = block[: packing.nbytes].split(
        [packing.numbers, packing.numbers // 2, _HEAD_BYTES * packing.num_groups, packing.room]
    )
    distances = coded.view(packing.num_groups, -1)
    distances = torch.cat([distances & 15, distances >> 4], 1).int()
    largest = (heads.clone().view(torch.int32) & 255)[:, None]
    exponents, escaped = largest - distances, distances == ESCAPE
    exponents[escaped] = escapes[: escaped.sum()].int()
    rest = low.view(packing.num_groups, -1).int()
    bits = (rest & 128) << 8 | exponents << 7 | rest & 127
    return torch.where(bits < 1 << 15, bits, bits - (1 << 16)).short().view(torch.bfloat16).flatten()
