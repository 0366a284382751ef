"""`--timeout`: a deadline that is checked between two passes, so that the output so far is valid."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from offload.errors import TriforceError

T = TypeVar("T")
P = ParamSpec("P")


class TimedOut(TriforceError):
    """The deadline passed. The output so far is still written."""

    exit_code = 124  # as timeout(1)
    kind = "timeout"


class Deadline:
    """A deadline `seconds` from now; None: never."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._end = math.inf if seconds is None else clock() + seconds

    @property
    def has_passed(self) -> bool:
        return self._clock() >= self._end

    def check(self) -> None:
        """Raises TimedOut once the deadline has passed."""
        if self.has_passed:
            raise TimedOut(f"the {self._seconds:g} s of --timeout are over")

    def heard(self, listener: Callable[P, None]) -> Callable[P, None]:
        """`listener`, with a check after every call."""

        def listen(*news: P.args, **more: P.kwargs) -> None:
            listener(*news, **more)
            self.check()

        return listen

    def within(self, items: Iterable[T], *, is_end: Callable[[T], bool]) -> Iterator[T]:
        """`items`, with a check after each but one that ends them: what is complete was not cut."""
        for item in items:
            yield item
            if not is_end(item):
                self.check()
