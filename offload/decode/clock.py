"""The seconds by which lengths adapt: the machine's, or the plan's.

By the plan's, what is decided is a function of the text: a seed gives the same text on a machine of any speed.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def wind(self, seconds: float) -> None:
        """Something runs that takes so long by the plan."""
        ...


class MachineClock:
    """Runs by itself."""

    def now(self) -> float:
        return time.perf_counter()

    def wind(self, seconds: float) -> None: ...


class PlanClock:
    """Runs where it is wound, and only then: what the plan has no price for takes no time."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        return self._seconds

    def wind(self, seconds: float) -> None:
        self._seconds += seconds
