"""Blocks of rows that several sequences share: each holds others' rows where one sequence would leave padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.kernels.rows import Blocks
from offload.transfer.memory import sent


@dataclass(frozen=True)
class SharedBlocks:
    """sizes: of the blocks, T rows in all: the sequences' rows one after the other, then padding.

    Caches see each sequence's rows in blocks of its own, with padding: S rows in all. `apart` and `joined` go from one
    order to the other. A row's bits depend neither on its place in a block nor on the rows beside it, so they are those
    that the sequence has alone (docs/exactness.md).
    """

    sizes: list[int]
    _apart: Tensor  # int64 [S], rows of the blocks; padding repeats a sequence's last row
    _joined: Tensor  # int64 [T], rows of the sequences; padding repeats the first one

    @classmethod
    def of(cls, counts: Sequence[int], blocks: Blocks, device: torch.device) -> SharedBlocks:
        """counts: each sequence's rows, without padding."""
        sizes, apart, joined = blocks.cut(sum(counts)), list[int](), list[int]()
        for count in counts:
            first = len(joined)
            joined += range(len(apart), len(apart) + count)
            apart += [*range(first, first + count), *[first + count - 1] * (blocks.padded(count) - count)]
        joined += [0] * (sum(sizes) - len(joined))
        indices = [sent(torch.tensor(each), device) for each in (apart, joined)]
        return cls(sizes, *indices)

    def apart(self, rows: Tensor) -> Tensor:
        """rows [T, ...] -> [S, ...]"""
        return rows.index_select(0, self._apart)

    def joined(self, rows: Tensor) -> Tensor:
        """rows [S, ...] -> [T, ...]"""
        return rows.index_select(0, self._joined)
