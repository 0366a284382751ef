"""Bytes that take a set time on a machine whose memory is faster: the schedule of a rehearsal on a CPU."""

from __future__ import annotations

import time


class Pace:
    """A schedule of its own for reads or copies, one after the other, each of at least bytes / rate seconds.

    A delay of the thread that carries them out makes that one late and does not slow the ones after it.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        """bytes_per_second: None for as fast as it goes."""
        self._seconds_per_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._idle_from = 0.0

    def schedule(self, num_bytes: int, *, ready: float, least: float, delay: float = 0.0) -> tuple[float, float]:
        """(start, end) of what could begin at `ready` and takes `least` seconds or more, and `delay` on top. Times are
        those of `time.perf_counter`."""
        start = max(ready, self._idle_from)
        self._idle_from = start + max(num_bytes * self._seconds_per_byte, least) + delay
        return start, self._idle_from


def sleep_until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
