"""Numbers of bf16 in about 12 of their 16 bits, none of them lost: so pages of keys and values, and weights, cross a
link. Packed by the CPU; unpacked by it, or on a GPU by packed_gpu.py.

Numbers near each other have few exponents. Of each number its sign and mantissa are kept as they are, in a byte, and in
4 bits how far its exponent is below the largest of its group; one that is further below is an escape, whose exponent is
kept in a byte of its own. A block with more escapes than there is room for stays as it is.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.formats.layout import RESIDUAL, Packing
from offload.native.interface import Library, PackedShape

ESCAPE = 15  # the distance of a number whose exponent is an escape


def pack(addresses: Tensor, packing: Packing, kernels: Library, *, to: Tensor | None = None) -> Tensor:
    """Pack the blocks of bf16 at `addresses`, int64 [n], on the host and on all threads -> int64 [n]: the bytes that
    each fills now; of 0 nothing was written. to: addresses where they lie packed, for each [packing.nbytes] bytes, if
    not in their places."""
    addresses = addresses.contiguous()
    to = addresses if to is None else to.contiguous()
    sizes = torch.empty(len(addresses), dtype=torch.long)
    shape, threads = PackedShape(packing.numbers, packing.group, packing.room), torch.get_num_threads()
    kernels.library.pack(
        addresses.data_ptr(), to.data_ptr(), len(addresses), sizes.data_ptr(), ctypes.byref(shape), threads
    )
    return sizes


def unpack(parts: Tensor, packing: Packing, kernels: Library) -> None:
    """Parts int64 [n, 5], each: from, to, first, count, packed. `count` groups from number `first` on of the block at
    address `from`, packed or, where that is 0, as it is, are written to address `to` as bf16, on all threads."""
    parts = parts.contiguous()
    shape = PackedShape(packing.numbers, packing.group, packing.room)
    kernels.library.unpack(parts.data_ptr(), len(parts), ctypes.byref(shape), torch.get_num_threads())


def pack_numbers(numbers: Tensor, packing: Packing, kernels: Library) -> tuple[Tensor, Tensor]:
    """bf16 [n], whole blocks on the host, which are overwritten -> (content, uint8: block after block, each no longer
    than it has to be; where each begins and the last ends, int64 [blocks + 1], multiples of 16)."""
    blocks = numbers.view(-1, packing.numbers)
    sizes = pack(blocks.data_ptr() + torch.arange(len(blocks)) * blocks.stride(0) * 2, packing, kernels)
    sizes = torch.where(sizes > 0, -(-sizes // 16) * 16, 2 * packing.numbers)
    parts = zip(blocks.view(torch.uint8), sizes.tolist(), strict=True)
    return torch.cat([block[:size] for block, size in parts]), pad(sizes.cumsum(0), (1, 0))


def unpack_numbers(content: Tensor, starts: Tensor, out: Tensor, packing: Packing, kernels: Library) -> None:
    """Fill out, bf16 [n], from what `pack_numbers` gave."""
    sizes, number = starts.diff(), torch.arange(len(starts) - 1)
    same = torch.ones_like(number)
    parts = [content.data_ptr() + starts[:-1], out.data_ptr() + number * 2 * packing.numbers, 0 * same]
    is_packed = (sizes < 2 * packing.numbers).long()
    unpack(torch.stack([*parts, packing.num_groups * same, is_packed], 1), packing, kernels)


def unpack_tile(tile: Tensor, slot: Tensor, flags: Tensor, starts: Tensor, packing: Packing, kernels: Library) -> None:
    """The first pages of `tile`, bf16 [2, P, H_kv, S, D], as many as `flags`, uint8 [num_pages], has: those that are
    PACKED, or RAW, in `slot`, of the same size, where each page's keys, a block, and its values begin at these bytes,
    int64 [2, num_pages], multiples of 16. Of RESIDUAL nothing is touched."""
    kinds, pages = torch.where((flags != RESIDUAL).expand(2, -1))
    same = torch.ones_like(pages)
    to = tile.data_ptr() + (kinds * tile.shape[1] + pages) * 2 * packing.numbers
    parts = [slot.data_ptr() + starts[kinds, pages], to, 0 * same, packing.num_groups * same, flags[pages].long()]
    unpack(torch.stack(parts, 1), packing, kernels)


def unpack_with_torch(block: Tensor, packing: Packing) -> Tensor:
    """uint8 [nbytes] -> bf16 [numbers], bit for bit what the kernel makes of it, if `check` finds nothing."""
    low, coded = block[: packing.numbers], block[packing.numbers : packing.heads].view(packing.num_groups, -1)
    heads, escapes = _heads(block, packing)[:, None], block[packing.escapes : packing.nbytes]
    distances = torch.cat([coded & 15, coded >> 4], 1).int()
    escaped = distances == ESCAPE
    places = (heads >> 8) + escaped.cumsum(1) - 1
    kept_apart = pad(escapes, (0, packing.group))[places.clamp(min=0)].int()
    rest = low.view(packing.num_groups, -1).int()
    bits = (rest & 128) << 8 | rest & 127 | ((heads & 255) - distances & 511) << 7
    bits = torch.where(escaped, bits & 0x807F | kept_apart << 7, bits)
    return (bits & 0xFFFF).to(torch.uint16).view(torch.bfloat16).flatten()


def check(block: Tensor, packing: Packing) -> None:
    """Raises ValueError if the packed block, uint8 [nbytes], names places of escapes for which it has no room. Of any
    other, whoever wrote it, the kernel reads no more than the block and the bytes of a group behind it."""
    starts = _heads(block, packing) >> 8
    if ((starts < 0) | (starts > packing.room)).any():
        raise ValueError(f"its packed numbers name escapes beyond the {packing.room} that there is room for")


def _heads(block: Tensor, packing: Packing) -> Tensor:
    """int32 [groups]."""
    return block[packing.heads : packing.escapes].clone().view(torch.int32)
