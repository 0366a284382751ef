"""Estimate of the seconds left for a series of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class TimeLeft:
    """prices: of each step, in any unit; what past steps took says what it is worth in seconds."""

    def __init__(self, prices: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._prices, self._clock = prices, clock
        self._num_done = -1
        self._started = 0.0

    def next_step(self) -> float | None:
        """A step begins, and the one before has ended: seconds left, None as long as nothing is known."""
        now = self._clock()
        if self._num_done < 0:
            self._started = now
        self._num_done += 1
        done, left = sum(self._prices[: self._num_done]), sum(self._prices[self._num_done :])
        return (now - self._started) * left / done if done else None
