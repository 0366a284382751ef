"""What cached keys and values of bf16 have beside their codes in 4 bits: about 9 of 16 bits. Together they are the
numbers.

Where the codes are on the device, this alone has to cross the link. The rule is in native/intervals.h, the order of the
parts in native/kv_residuals.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.kernels.gpu import GpuKernels
from offload.kernels.kv_codes import GROUP, Order
from offload.kernels.native import Kernels
from offload.kernels.native.interface import PageShape as Struct
from offload.kernels.packing import RESIDUAL
from offload.kernels.residuals import HEAD_BYTES

KEYS, VALUES = 0, 1
_ORDERS: dict[Order, int] = {"lanes": 0, "matrices": 1}


@dataclass(frozen=True)
class PageShape:
    """Of a block, the keys or the values of a page: [num_kv_heads, page_tokens, head_dim].

    Groups are `GROUP` tokens of a head, those of the codes; they count through a head's tokens, then through the heads.
    A residual has the numbers' low bytes [numbers], heads [num_groups + 1, 2] int32, the last of which says where all
    ends, 4 bits each of those near zero, and escapes.
    """

    num_kv_heads: int
    page_tokens: int
    head_dim: int

    @property
    def num_groups(self) -> int:
        return self.num_kv_heads * self.page_tokens // GROUP

    @property
    def numbers(self) -> int:
        """Of a block; and where the heads begin, in bytes."""
        return self.num_kv_heads * self.page_tokens * self.head_dim

    @property
    def fours(self) -> int:
        """Where they begin, in bytes."""
        return self.numbers + HEAD_BYTES * (self.num_groups + 1)


def split_off(parts: Tensor, shape: PageShape, order: Order, kernels: Kernels, *, most: int) -> Tensor:
    """The residuals of blocks, on the host and on all threads. parts int64 [n, 5], each: address of a block; where its
    residual goes, which is elsewhere; address of the page's codes, in this order; bytes from a head's codes to the
    next one's; KEYS or VALUES. -> int64 [n]: the bytes that each fills, a multiple of 16. Of those of 0 nothing is
    written: not every number would come back, as of those that are not finite, or they would fill more than `most`."""
    assert kernels.library is not None
    parts, sizes = parts.contiguous(), torch.empty(len(parts), dtype=torch.long)
    kernels.library.split_off_kv(
        parts.data_ptr(), len(parts), sizes.data_ptr(), ctypes.byref(_struct(shape)), _ORDERS[order], most,
        torch.get_num_threads(),
    )  # fmt: skip
    return sizes


def restore(parts: Tensor, shape: PageShape, order: Order, kernels: Kernels) -> None:
    """Parts int64 [n, 7], each: from, to, codes, bytes from head to head of these, KEYS or VALUES, first, count. Of the
    block whose residual is at address `from`, `count` groups from number `first` on are written to address `to` one
    after the other, on all threads."""
    assert kernels.library is not None
    parts = parts.contiguous()
    kernels.library.restore_kv(
        parts.data_ptr(), len(parts), ctypes.byref(_struct(shape)), _ORDERS[order], torch.get_num_threads()
    )


def restore_tile(
    tile: Tensor,
    slot: Tensor,
    flags: Tensor,
    starts: Tensor,
    codes: Tensor,
    first_group: int,
    shape: PageShape,
    kernels: Kernels | GpuKernels,
) -> None:
    """Those pages of `tile`, bf16 [2, P, H_kv, S, D], whose residuals are in `slot`; of the others nothing is touched.
    flags, starts: as of `unpack_tile`. codes: uint8 [H_kv, groups, bytes] of that layer, in the kernels' order; page 0
    begins with a head's group number `first_group`, less than 0 where its first tokens have none. All are on the
    kernels' device."""
    if isinstance(kernels, GpuKernels):
        from offload.kernels.gpu.kv_residuals import restore_pages  # it imports Triton

        return restore_pages(tile, slot, flags, starts, codes, first_group, shape)
    kinds, pages = torch.where((flags == RESIDUAL).expand(2, -1))
    to = tile.data_ptr() + 2 * shape.numbers * (kinds * tile.shape[1] + pages)
    per_page, same = shape.page_tokens // GROUP, torch.ones_like(pages)
    at_codes = codes.data_ptr() + (first_group + pages * per_page) * codes.stride(1)
    parts = [slot.data_ptr() + starts[kinds, pages], to, at_codes, codes.stride(0) * same, kinds, 0 * same]
    restore(torch.stack([*parts, shape.num_groups * same], 1), shape, "lanes", kernels)
    return None


def _struct(shape: PageShape) -> Struct:
    assert shape.page_tokens % GROUP == 0
    assert shape.head_dim % 8 == 0
    return Struct(shape.num_kv_heads, shape.page_tokens, shape.head_dim)
