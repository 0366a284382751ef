"""Bytes that take a set time on a machine whose memory is faster: the schedule of a rehearsal on a CPU."""

from __future__ import annotations

import time

from offload.metrics import HostStats
from offload.plan.sizing import host_slowdown


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


class HostReads:
    """What the CPU reads of tiles that it attends to where they live, while the link brings others.

    On a CPU that computes what a device would, paced to what the host's memory is said to give besides, and to what a
    desktop's CPU computes meanwhile.
    """

    def __init__(self, bytes_per_second: float | None = None, *, group: int = 1) -> None:
        """group: query heads for each KV head."""
        self._pace, self._group, self._began, self._end = Pace(bytes_per_second), group, 0.0, 0.0
        self._stats = HostStats()

    @property
    def stats(self) -> HostStats:
        """Totals since it was made, a snapshot."""
        return self._stats

    def begin(self) -> None:
        """A tile is attended to from now on."""
        self._began = time.perf_counter()

    def end(self, num_bytes: int, *, rows: int) -> None:
        """That was done for `rows` rows, and it read `num_bytes`."""
        took = time.perf_counter() - self._began
        paced = round(num_bytes * host_slowdown(rows, self._group))
        start, self._end = self._pace.schedule(paced, ready=self._began, least=took)
        self._stats += HostStats(num_bytes, self._end - start)

    def wait(self) -> None:
        """Return when all that was read is due."""
        sleep_until(self._end)
