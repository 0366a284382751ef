"""Passes: a model's forwards over new tokens, which decoding yields. The driver of decoding runs each pass alone, or
together with passes of other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from offload.metrics import LevelStats

T = TypeVar("T")
# A function of a pass's logits [n, V] and of the tensors given with the pass. In a graph, logits may have meaningless
# rows at the end. Equal functions must compute the same: graphs are keyed by it.
Compute = Callable[..., tuple[Tensor, ...]]


def the_logits(logits: Tensor) -> tuple[Tensor, ...]:
    """The logits themselves: the `Compute` of a pass without further computation."""
    return (logits,)


class Level(Protocol):
    """A model with a cache of one sequence, as decoding sees it."""

    @property
    def stats(self) -> LevelStats: ...

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def run(self, passes: Sequence[Pass]) -> None:
        """One pass over the weights for all of `passes`, of this level and of levels that differ from it in their
        caches alone. Appends each pass's tokens to its level's cache, and sets its `made` and `is_first`. A GPU may
        compute them after the call has returned."""
        ...

    def truncate(self, length: int) -> None:
        """Drop all tokens after the first `length`; no effect if there are fewer."""
        ...


@dataclass(eq=False)
class Pass:
    """A pass of `level` over new tokens (1 or more) of its sequence, as numbers or as int64 [n] on the device.

    num_logits: rows of logits, one after each of the last tokens; 0 on a rank without the head. compute, given: a
    function of the logits and of further tensors; it is part of the pass's graph, if there is one. made: the result of
    `compute`, perhaps with more rows at the end. is_first: the pass's time includes one-time work, so it does not
    predict the next pass, see `LevelStats.first_passes`. waited: seconds between yielding the pass and its result that
    were spent on other sequences.
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
        """Run this pass alone."""
        self.level.run([self])


Passes = Generator[Pass, None, T]  # yields the passes to run, returns the result
Work = Generator[Pass | T, None, None]  # yields the passes to run, and result items between them


def forward(level: Level, tokens: Sequence[int] | Tensor, num_logits: int) -> Tensor:
    """The logits [num_logits, V] of a pass, run alone."""
    asked = Pass(level, tokens, num_logits)
    asked.run()
    [logits] = asked.made
    return logits


def result_of(passes: Passes[T]) -> T:
    """The result of `passes`, each run alone."""
    while True:
        try:
            asked = next(passes)
        except StopIteration as end:
            result: T = end.value
            return result
        asked.run()


def alone(work: Work[T]) -> Generator[T, None, None]:
    """The items of `work`, each pass run alone. Closing this generator, or an error in a pass, closes `work`."""
    with closing(work):
        for item in work:
            if isinstance(item, Pass):
                item.run()
            else:
                yield item
