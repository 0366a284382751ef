"""Passes: a model's forwards over new tokens, as decoding asks for them. Whoever drives decoding runs them: alone, or
together with those of other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from offload.metrics import LevelStats

T = TypeVar("T")
# Of a pass's logits [n, V] and of tensors that are given; in a graph more rows may follow, which mean nothing. Equal
# ones compute the same: graphs are told apart by it.
Compute = Callable[..., tuple[Tensor, ...]]


def the_logits(logits: Tensor) -> tuple[Tensor, ...]:
    """Nothing follows the pass."""
    return (logits,)


class Level(Protocol):
    """A model with a cache of one sequence. Decoding sees nothing else of it."""

    @property
    def stats(self) -> LevelStats: ...

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def run(self, passes: Sequence[Pass]) -> None:
        """One pass over the weights for all of `passes`, of this level and of others that differ in their caches alone:
        each one's tokens are appended to its level's cache, and `made` and `is_first` are set. On a GPU they are
        computed after the call returned."""
        ...

    def truncate(self, length: int) -> None:
        """Forget all after the first `length` tokens; nothing happens if there are fewer."""
        ...


@dataclass(eq=False)
class Pass:
    """A pass of `level` over new tokens (1 or more) of its sequence, as numbers or as int64 [n] on the device.

    num_logits: rows of logits, after each of the last tokens; 0 on a rank that has no head. compute, given: what is
    computed from the logits, and with which other tensors; it is part of the pass's graph, if there is one.
    made: what `compute` gives, perhaps with more rows at the end. is_first: the pass's seconds tell nothing of the next
    one's, see `LevelStats.first_passes`. waited: seconds between the question and the answer that were spent on other
    sequences.
    """

    level: Level
    tokens: Sequence[int] | Tensor
    num_logits: int
    compute: Compute = the_logits
    given: tuple[Tensor, ...] = ()
    made: tuple[Tensor, ...] = ()
    waited: float = 0.0
    is_first: bool = False

    def run(self) -> None:
        """Alone."""
        self.level.run([self])


Passes = Generator[Pass, None, T]  # work that is done by passes, and its result at the end
Work = Generator[Pass | T, None, None]  # passes, and items of the work between them


def forward(level: Level, tokens: Sequence[int] | Tensor, num_logits: int) -> Tensor:
    """A pass, run alone -> its logits [num_logits, V]."""
    asked = Pass(level, tokens, num_logits)
    asked.run()
    [logits] = asked.made
    return logits


def result_of(passes: Passes[T]) -> T:
    """The result, each pass run alone."""
    while True:
        try:
            asked = next(passes)
        except StopIteration as end:
            result: T = end.value
            return result
        asked.run()


def alone(work: Work[T]) -> Generator[T, None, None]:
    """The items of `work`, each pass run alone. Closing it, or an error of a pass, ends the work."""
    with closing(work):
        for item in work:
            if isinstance(item, Pass):
                item.run()
            else:
                yield item
