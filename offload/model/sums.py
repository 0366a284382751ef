"""Sums over the ranks that share a model: the protocol, and the sums of a model that has one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Due(NamedTuple):
    """An expected sum of [rows, width]. dtype: None for the dtype of the pass's rows."""

    rows: int
    width: int
    dtype: torch.dtype | None = None


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
