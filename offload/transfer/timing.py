"""Seconds of passes: by the clock, or on a card by its own events, so that the host need not wait for a pass to end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.metrics import LevelStats


class Timing:
    """Of the passes of one level on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._is_card = device.type == "cuda"
        # Seconds of the stats that are not counted yet: so large a part of those between the events.
        self._open: list[tuple[LevelStats, torch.cuda.Event, torch.cuda.Event, float]] = []

    @contextmanager
    def measure(self, stats: LevelStats, rows: int) -> Iterator[None]:
        """Count one pass of `rows` rows (without padding) and the seconds that the body takes, or on a card those of
        what it launches, from `settle` on."""
        with measured_together([self], [(stats, rows)]):
            yield

    def settle(self) -> None:
        """Count the seconds of all passes that have ended."""
        waiting = []
        for stats, start, end, part in self._open:
            if end.query():
                stats.seconds += part * start.elapsed_time(end) / 1e3
            else:
                waiting.append((stats, start, end, part))
        self._open = waiting

    def _note(self, stats: LevelStats, start: torch.cuda.Event, end: torch.cuda.Event, part: float) -> None:
        self._open.append((stats, start, end, part))


@contextmanager
def measured_together(timings: Sequence[Timing], counted: Sequence[tuple[LevelStats, int]]) -> Iterator[None]:
    """The same of a pass that several levels share, each with its rows: each has an equal part of the seconds."""
    if not timings[0]._is_card:
        began = time.perf_counter()
        yield
        seconds = (time.perf_counter() - began) / len(counted)
        for stats, rows in counted:
            stats.count_pass(rows, seconds)
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    yield
    end.record()
    for timing, (stats, rows) in zip(timings, counted, strict=True):
        stats.count_pass(rows, 0.0)
        timing._note(stats, start, end, 1 / len(counted))
