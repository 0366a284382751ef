"""Seconds of passes: by the clock, or on a card by its own events, so that the host need not wait for a pass to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.metrics import LevelStats


class Timing:
    """Of the passes of one level on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._is_card = device.type == "cuda"
        self._open: list[tuple[LevelStats, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, stats: LevelStats, rows: int) -> Iterator[None]:
        """Count one pass of `rows` rows (without padding) and the seconds that the body takes, or on a card those of
        what it launches, from `settle` on."""
        if not self._is_card:
            with stats.measure(rows):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        stats.passes += 1
        stats.rows += rows
        self._open.append((stats, start, end))

    def settle(self) -> None:
        """Count the seconds of all passes that have ended."""
        waiting = []
        for stats, start, end in self._open:
            if end.query():
                stats.seconds += start.elapsed_time(end) / 1e3
            else:
                waiting.append((stats, start, end))
        self._open = waiting
