"""Lossless packing of bf16 numbers into about 12 of 16 bits, in which pages of keys and values, and weights, cross a
link. The CPU packs; the CPU unpacks, or a GPU by packed_gpu.py.

Neighbouring numbers have few distinct exponents. The sign and mantissa of a number are stored raw in a byte, and the
distance of its exponent below the largest of its group in 4 bits. A number with a larger distance is an escape, whose
exponent is stored in a byte of its own. A block with more escapes than there is room for stays raw.
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
    """Pack the bf16 blocks at host addresses `addresses`, int64 [n], on all threads -> int64 [n]: the packed bytes of
    each; 0 means that nothing was written. to: destination addresses, of [packing.nbytes] bytes each, if not in
    place."""
    addresses = addresses.contiguous()
    to = addresses if to is None else to.contiguous()
    sizes = torch.empty(len(addresses), dtype=torch.long)
    shape, threads = PackedShape(packing.numbers, packing.group, packing.room), torch.get_num_threads()
    kernels.library.pack(
        addresses.data_ptr(), to.data_ptr(), len(addresses), sizes.data_ptr(), ctypes.byref(shape), threads
    )
    return sizes


def unpack(parts: Tensor, packing: Packing, kernels: Library) -> None:
    """Unpack parts of blocks on all threads. parts: int64 [n, 5], each: from, to, first, count, packed. `count` groups
    from group `first` on of the block at address `from` are written to address `to` as bf16. packed: 0 if the block is
    raw."""
    parts = parts.contiguous()
    shape = PackedShape(packing.numbers, packing.group, packing.room)
    kernels.library.unpack(parts.data_ptr(), len(parts), ctypes.byref(shape), torch.get_num_threads())


def pack_numbers(numbers: Tensor, packing: Packing, kernels: Library) -> tuple[Tensor, Tensor]:
    """Pack bf16 [n], whole blocks on the host, which are overwritten -> (content, uint8: the blocks one after the
    other, each at its minimal size; the offsets of the blocks and of the end, int64 [blocks + 1], multiples of 16)."""
    blocks = numbers.view(-1, packing.numbers)
    sizes = pack(blocks.data_ptr() + torch.arange(len(blocks)) * blocks.stride(0) * 2, packing, kernels)
    sizes = torch.where(sizes > 0, -(-sizes // 16) * 16, 2 * packing.numbers)
    parts = zip(blocks.view(torch.uint8), sizes.tolist(), strict=True)
    return torch.cat([block[:size] for block, size in parts]), pad(sizes.cumsum(0), (1, 0))


def unpack_numbers(content: Tensor, starts: Tensor, out: Tensor, packing: Packing, kernels: Library) -> None:
    """Fill out, bf16 [n], from the result of `pack_numbers`."""
    sizes, number = starts.diff(), torch.arange(len(starts) - 1)
    same = torch.ones_like(number)
    parts = [content.data_ptr() + starts[:-1], out.data_ptr() + number * 2 * packing.numbers, 0 * same]
    is_packed = (sizes < 2 * packing.numbers).long()
    unpack(torch.stack([*parts, packing.num_groups * same, is_packed], 1), packing, kernels)


def unpack_tile(tile: Tensor, slot: Tensor, flags: Tensor, starts: Tensor, packing: Packing, kernels: Library) -> None:
    """Unpack the PACKED and RAW pages of a staging slot to `tile`, bf16 [2, P, H_kv, S, D]; RESIDUAL pages are not
    touched. flags: uint8 [num_pages], the encodings of the tile's first pages. slot: of the tile's size. starts: int64
    [2, num_pages], the offsets in bytes of each page's keys and values in the slot, multiples of 16."""
    kinds, pages = torch.where((flags != RESIDUAL).expand(2, -1))
    same = torch.ones_like(pages)
    to = tile.data_ptr() + (kinds * tile.shape[1] + pages) * 2 * packing.numbers
    parts = [slot.data_ptr() + starts[kinds, pages], to, 0 * same, packing.num_groups * same, flags[pages].long()]
    unpack(torch.stack(parts, 1), packing, kernels)


def unpack_with_torch(block: Tensor, packing: Packing) -> Tensor:
    """Unpack a block with torch: uint8 [nbytes] -> bf16 [numbers], bit for bit the kernel's result, if `check` accepts
    the block."""
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
    """Raises ValueError if the packed block, uint8 [nbytes], refers to escapes outside its room. For any other block,
    even a forged one, the kernel reads at most the block and the bytes of one group after it."""
    starts = _heads(block, packing) >> 8
    if ((starts < 0) | (starts > packing.room)).any():
        raise ValueError(f"its packed numbers name escapes beyond the {packing.room} that there is room for")


def _heads(block: Tensor, packing: Packing) -> Tensor:
    """The group heads of a packed block, int32 [groups]."""
    return block[packing.heads : packing.escapes].clone().view(torch.int32)
