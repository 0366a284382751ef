"""The split of a layer's missed experts between the link and the CPU, by the rates of both, measured as they go.

An expert that crosses the link is in a slot afterwards, and one that the CPU runs where it is occupies no link. A split
changes no bit of what experts make of a row, so it may follow the clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

_FIRST = 5e-11  # seconds in which a CPU runs a byte of an expert, until some are measured
_ABSENT = 0.3  # of an expert's copy, for each expert that does not cross the link: it may be missed again
_ROW = 0.3  # of an expert's seconds, for each of its rows but the first
_SHARE = 0.1  # of the newest measurement in a mean


@dataclass(frozen=True)
class LinkPace:
    """The pace of a link: seconds until all copies asked for are done, and of one expert's copy."""

    ahead: float
    each: float

    def behind(self, number: int) -> LinkPace:
        """The pace once so many more experts are asked for."""
        return replace(self, ahead=self.ahead + number * self.each)


class Split:
    """Which of a layer's missed experts cross the link, so that link and CPU are done with all of them soonest. One for
    the layers of a model."""

    def __init__(self) -> None:
        self._of_byte, self._is_measured, self._gap, self._ended = _FIRST, False, 0.0, 0.0

    def began(self) -> None:
        """Note that a layer knows its experts."""
        if self._ended:
            self._gap += _SHARE * (time.perf_counter() - self._ended - self._gap)

    def ended(self) -> None:
        """Note that the host has done its part of a layer."""
        self._ended = time.perf_counter()

    def crossing(self, rows: Sequence[int], num_bytes: int, link: LinkPace) -> int:
        """How many of the experts, each with its number of rows, the most first, are to cross the link: the first ones.
        num_bytes: of each."""

        def seconds(count: int) -> float:
            end = max(link.ahead + count * link.each if count else 0.0, self._seconds(rows[count:], num_bytes))
            return end + _ABSENT * link.each * (len(rows) - count)

        return min(range(len(rows), -1, -1), key=seconds)

    def following(self, rows: Sequence[int], num_bytes: int, link: LinkPace) -> int:
        """How many more experts can cross the link before the next layer needs it, while the CPU runs experts with so
        many rows."""
        return round(max(self._seconds(rows, num_bytes) + self._gap - link.ahead, 0.0) / link.each)

    def ran(self, rows: Sequence[int], num_bytes: int, seconds: float) -> None:
        """Note the seconds in which the CPU ran experts."""
        measured = seconds / _work(rows, num_bytes)
        self._of_byte += (_SHARE if self._is_measured else 1.0) * (measured - self._of_byte)
        self._is_measured = True

    def _seconds(self, rows: Sequence[int], num_bytes: int) -> float:
        return _work(rows, num_bytes) * self._of_byte


def _work(rows: Sequence[int], num_bytes: int) -> float:
    """Bytes that take as long as experts with so many rows each."""
    return num_bytes * sum(1 + _ROW * (number - 1) for number in rows)
