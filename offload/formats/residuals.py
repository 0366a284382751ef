"""Lossless residuals of bf16 numbers: the information beyond their codes in 4 or 6 bits, about 9 or 8 of 16 bits. Code
and residual together give the exact number.

If the codes are on the device, only the residual has to cross the link. A code gives an interval that contains its
number. The low byte of the number, with one bit of its exponent, identifies the number within the interval; near zero,
4 more bits are needed. The rule is in native/intervals.h. There are two layouts: for a weight matrix
(native/residuals.h), and for the keys or the values of a page (native/kv_residuals.h). The CPU splits residuals off;
the CPU restores the numbers, or a GPU by residuals_gpu.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.layout import KV_CODE_GROUP, RESIDUAL, RESIDUAL_HEAD_BYTES, PageShape
from offload.formats.quantised import GROUP, TILE, Codes
from offload.formats.quantised_kv import Order
from offload.native.interface import Library
from offload.native.interface import PageShape as PageStruct
from offload.native.interface import Residual as WeightStruct

KEYS, VALUES = 0, 1
_ORDERS: dict[Order, int] = {"lanes": 0, "matrices": 1}


@dataclass(frozen=True)
class Residual:
    """The residual of a matrix [outputs, inputs]. content: uint8 [bytes]: low bytes, heads, 4-bit parts, and from
    offset `escapes` on the escapes."""

    content: Tensor
    escapes: int


def split_off(weight: Tensor, codes: Codes, kernels: Library) -> Residual | None:
    """The residual of weight, bf16 [outputs, inputs] contiguous on the host, given its codes, on all threads. None if
    some weight could not be restored, such as a non-finite one."""
    threads, num_groups = torch.get_num_threads(), _num_groups(codes)
    heads = torch.empty(num_groups, 2, dtype=torch.int32)
    struct = _struct(weight, codes, heads=heads.data_ptr())
    if not kernels.library.count_residual(ctypes.byref(struct), threads):
        return None
    heads, escapes, size = _places(heads)
    content = torch.empty(size, dtype=torch.uint8)
    content[-16:] = 0  # padding after the escapes
    content[weight.numel() : weight.numel() + heads.nbytes] = heads.view(torch.uint8).flatten()
    struct = _struct_over(content, escapes, weight, codes)
    kernels.library.split_residual(ctypes.byref(struct), threads)
    return Residual(content, escapes)


def restore(content: Tensor, escapes: int, codes: Codes, out: Tensor, kernels: Library) -> None:
    """Fill out, bf16 [outputs, inputs] contiguous, from a residual's content."""
    assert out.is_contiguous()
    assert codes.shape == out.shape
    struct = _struct_over(content, escapes, out, codes)
    kernels.library.restore_residual(ctypes.byref(struct), torch.get_num_threads())


def split_off_pages(parts: Tensor, shape: PageShape, order: Order, kernels: Library, *, most: int) -> Tensor:
    """Write the residuals of blocks, on the host and on all threads. parts: int64 [n, 5], each: address of a block;
    destination, which does not overlap it; address of the page's codes, in `order`; stride in bytes between the heads'
    codes; KEYS or VALUES. -> int64 [n]: the bytes of each residual, a multiple of 16; 0 if nothing was written, since
    some number could not be restored (such as a non-finite one), or the residual would exceed `most` bytes."""
    parts, sizes = parts.contiguous(), torch.empty(len(parts), dtype=torch.long)
    kernels.library.split_off_kv(
        parts.data_ptr(), len(parts), sizes.data_ptr(), ctypes.byref(_page_struct(shape)), _ORDERS[order], most,
        torch.get_num_threads(),
    )  # fmt: skip
    return sizes


def restore_pages(parts: Tensor, shape: PageShape, order: Order, kernels: Library) -> None:
    """Restore groups of blocks on all threads. parts: int64 [n, 7], each: from, to, codes, stride in bytes between the
    heads' codes, KEYS or VALUES, first, count. `count` groups from group `first` on, of the block whose residual is at
    address `from`, are written to address `to` one after the other."""
    parts = parts.contiguous()
    kernels.library.restore_kv(
        parts.data_ptr(), len(parts), ctypes.byref(_page_struct(shape)), _ORDERS[order], torch.get_num_threads()
    )


def restore_tile(
    tile: Tensor,
    slot: Tensor,
    flags: Tensor,
    starts: Tensor,
    codes: Tensor,
    first_group: int,
    shape: PageShape,
    kernels: Library,
) -> None:
    """Restore the pages of `tile`, bf16 [2, P, H_kv, S, D], whose residuals are in `slot`; other pages are not touched.
    flags, starts: as in `unpack_tile`. codes: uint8 [H_kv, groups, bytes] of the layer, in the kernels' order.
    first_group: the group of a head's codes with which page 0 begins, less than 0 if its first tokens have no codes."""
    kinds, pages = torch.where((flags == RESIDUAL).expand(2, -1))
    to = tile.data_ptr() + 2 * shape.numbers * (kinds * tile.shape[1] + pages)
    per_page, same = shape.page_tokens // KV_CODE_GROUP, torch.ones_like(pages)
    at_codes = codes.data_ptr() + (first_group + pages * per_page) * codes.stride(1)
    parts = [slot.data_ptr() + starts[kinds, pages], to, at_codes, codes.stride(0) * same, kinds, 0 * same]
    restore_pages(torch.stack([*parts, shape.num_groups * same], 1), shape, "lanes", kernels)


def _num_groups(codes: Codes) -> int:
    return codes.blocks.shape[0] * codes.blocks.shape[1]


def _places(counts: Tensor) -> tuple[Tensor, int, int]:
    """The layout of a residual. counts: bytes of 4-bit parts and escapes of each group, int32 [groups, 2] -> (heads,
    offset of the escapes, total bytes: a multiple of 16)."""
    heads = (counts.cumsum(0) - counts).int()
    fours, escapes = (int(total) for total in counts.sum(0))
    begin = (TILE * GROUP + RESIDUAL_HEAD_BYTES) * len(counts) + fours
    return heads, begin, -(-(begin + escapes) // 16) * 16


def _struct(weight: Tensor, codes: Codes, **addresses: int) -> WeightStruct:
    assert weight.is_contiguous()
    assert codes.shape == weight.shape
    outputs, inputs = weight.shape
    places = {"weight": weight.data_ptr(), "blocks": codes.blocks.data_ptr()} | addresses
    return WeightStruct(outputs=outputs, inputs=inputs, bits=codes.bits, **places)


def _struct_over(content: Tensor, escapes: int, weight: Tensor, codes: Codes) -> WeightStruct:
    low, numbers = content.data_ptr(), weight.numel()
    fours = low + numbers + RESIDUAL_HEAD_BYTES * _num_groups(codes)
    return _struct(weight, codes, low=low, heads=low + numbers, fours=fours, escapes=low + escapes)


def _page_struct(shape: PageShape) -> PageStruct:
    assert shape.page_tokens % KV_CODE_GROUP == 0
    assert shape.head_dim % 8 == 0
    return PageStruct(shape.num_kv_heads, shape.page_tokens, shape.head_dim)
