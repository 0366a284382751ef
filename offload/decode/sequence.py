"""A growing sequence of tokens that does not copy its beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload


@dataclass
class Extended(Sequence[int]):
    """The tokens of `head`, which must not change, then the tokens of `tail`. Copying a prompt of 120,000 tokens in
    every round would take .2 ms."""

    head: Sequence[int]
    tail: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """A token, or a slice in time proportional to its own tokens. Raises ValueError for a slice with a step."""
        cut = len(self.head)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice with a step of {step}")
            return [*self.head[start : min(stop, cut)], *self.tail[max(start - cut, 0) : max(stop - cut, 0)]]
        at = range(len(self))[index]
        return self.head[at] if at < cut else self.tail[at - cut]


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of leading tokens that both sequences share."""
    most = min(len(first), len(second))
    if list(first[:most]) == list(second[:most]):  # the usual case, faster than token by token
        return most
    return next(at for at in range(most) if first[at] != second[at])
