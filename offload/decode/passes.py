"""Passes that decoding asks for. Whoever drives it runs them: alone, or together with those of other sequences."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from offload.decode.on_gpu import Draw, Judge
    from offload.decode.speculation import Level

T = TypeVar("T")


@dataclass(eq=False)
class Pass:
    """A pass of `level` over new tokens of one sequence; the arguments are those of `Level.forward`, or with `compute`
    of `Level.then`.

    made: what comes of it, (logits,) or what `compute` gives, perhaps with more rows at the end: set before whoever
    asked goes on. waited: seconds between the question and the answer that were spent on other sequences. is_first: its
    seconds tell nothing of those of the next one, see `LevelStats.first_passes`.
    """

    level: Level
    tokens: Sequence[int] | Tensor
    num_logits: int
    compute: Draw | Judge | None = None
    given: tuple[Tensor, ...] = ()
    made: tuple[Tensor, ...] = ()
    waited: float = 0.0
    is_first: bool = False

    def run(self) -> None:
        """Alone."""
        first_passes = self.level.stats.first_passes
        if self.compute is None:
            assert not isinstance(self.tokens, Tensor)
            self.made = (self.level.forward(self.tokens, self.num_logits),)
        else:
            self.made = self.level.then(self.tokens, self.num_logits, self.compute, *self.given)
        self.is_first = self.level.stats.first_passes > first_passes


Passes = Generator[Pass, None, T]  # what is done by passes, and its result at the end
Work = Generator[Pass | T, None, None]  # passes, and what comes meanwhile


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
    """What comes of `work`, each pass run alone. Closing it, or an error of a pass, ends the work."""
    with closing(work):
        for item in work:
            if isinstance(item, Pass):
                item.run()
            else:
                yield item
