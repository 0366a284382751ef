"""Pacing: bytes take a set time although memory is faster, to emulate a slower link or disk on a CPU."""

from __future__ import annotations

import time


class Pace:
    """A schedule of reads or copies in sequence, each of at least bytes / rate seconds.

    A delay of the executing thread makes one operation late and does not slow the later ones.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        """bytes_per_second: None for unpaced."""
        self._seconds_per_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._idle_from = 0.0

    def schedule(self, num_bytes: int, *, ready: float, least: float, delay: float = 0.0) -> tuple[float, float]:
        """The (start, end) of an operation that can begin at `ready` and takes at least `least` seconds, plus `delay`.
        Times are from `time.perf_counter`."""
        start = max(ready, self._idle_from)
        self._idle_from = start + max(num_bytes * self._seconds_per_byte, least) + delay
        return start, self._idle_from


def sleep_until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
