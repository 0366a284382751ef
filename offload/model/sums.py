"""Sums over the ranks that share a model: the protocol, and the sums of a model that has one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Due(NamedTuple):
    """A sum to come, of [rows, width]. dtype: None, that of the rows that a pass works on."""

    rows: int
    width: int
    dtype: torch.dtype | None = None


class Sums(Protocol):
    """Sums over the ranks that share a model. size: how many they are."""

    @property
    def size(self) -> int: ...

    def due(self, sums: Sequence[Due], like: Tensor) -> AbstractContextManager[None]:
        """In the body, these sums are made on every rank, of tensors on the device of `like` and of its dtype, or
        theirs."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """part [n, hidden] of this rank -> the sum over all, the same bits on each. `part` may be used for it."""
        ...


class OneRank:
    """The sums of a model that one rank has to itself."""

    size = 1

    def due(self, sums: Sequence[Due], like: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def total(self, part: Tensor) -> Tensor:
        return part
