"""Sums over the ranks that share a model: the protocol, and the sums of a model that has one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class Sums(Protocol):
    """Sums over the ranks that share a model."""

    def due(self, shapes: Sequence[tuple[int, int]], like: Tensor) -> AbstractContextManager[None]:
        """In the body, sums of these shapes are made on every rank, of tensors of the dtype and device of `like`."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """part [n, hidden] of this rank -> the sum over all, the same bits on each. `part` may be used for it."""
        ...


class OneRank:
    """The sums of a model that one rank has to itself."""

    def due(self, shapes: Sequence[tuple[int, int]], like: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def total(self, part: Tensor) -> Tensor:
        return part
