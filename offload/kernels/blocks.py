"""Blocks of consecutive tokens in tiles of keys and values, for the CPU's kernels (native/chosen.h).

Letters are those of kernels/runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from offload.native.interface import Tiles


def described(tiles: Sequence[Tensor], size: int) -> Tiles:
    """Tiles one after the other, [2, P, H_kv, S, D] or, as one page, [2, H_kv, S, D], in blocks of `size` tokens, a
    divisor of S. They are alike, but the last may have fewer pages. Valid as long as they exist."""
    first = tiles[0]
    page, head_stride = first.shape[-2], first.stride(-3)
    num_pages, page_stride = (first.shape[1], first.stride(1)) if first.dim() == 5 else (1, 0)
    assert page % size == 0
    assert all(tile.stride(-3) == head_stride for tile in tiles)
    keys, values = (_array(each) for each in zip(*map(halves, tiles), strict=True))
    found = Tiles(
        ctypes.addressof(keys), ctypes.addressof(values), head_stride, page_stride, page, num_pages * page, size
    )
    found.kept = keys, values
    return found


def halves(held: Tensor) -> tuple[int, int]:
    """The addresses of a tile's keys and of its values."""
    keys = held.data_ptr()
    return keys, keys + held.stride(0) * held.itemsize


def _array(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
