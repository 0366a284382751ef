"""Sums over the ranks that share a model: the protocol, and the sums of a model that has one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from offload.config.block import Block


class Due(NamedTuple):
    """An expected sum of [rows, width]. dtype: None for the dtype of the pass's rows."""

    rows: int
    width: int
    dtype: torch.dtype | None = None


def dues_of(block: Block, rows: int, hidden: int, *, squares: bool) -> tuple[list[Due], list[Due]]:
    """The sums of a layer of `rows` rows: those of its mixers, and of its network. squares: heads are normed over
    ranks, so that sums of squares come before attention."""
    mixers = [Due(rows, 2, torch.float32)] * (squares and block.attends)
    mixers += [Due(rows, hidden)] * (block.has_mixer + (block.beside is not None))
    return mixers, [Due(rows, hidden * (1 + block.joins))] * block.has_network


class Sums(Protocol):
    """Sums over the ranks that share a model. size: the number of ranks."""

    @property
    def size(self) -> int: ...

    def due(self, sums: Sequence[Due], like: Tensor) -> AbstractContextManager[None]:
        """Expect `sums` in the body: every rank makes them there, in this order, of tensors on the device of `like`, in
        its dtype unless a sum names its own."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """part [n, hidden] of this rank -> the sum over all ranks, the same bits on each. `part` may be overwritten."""
        ...


class OneRank:
    """The sums of a model on one rank: each part is its own sum."""

    size = 1

    def due(self, sums: Sequence[Due], like: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def total(self, part: Tensor) -> Tensor:
        return part
