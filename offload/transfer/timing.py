"""Timing of passes: by the clock, or on a GPU by its events, so that the host need not wait for a pass to end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.metrics import LevelStats


class Timing:
    """The timing of one level's passes on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        # Measured stretches not yet counted, and the share of each that belongs to the stats.
        self._open: list[tuple[LevelStats, _Stretch, float]] = []

    @contextmanager
    def measure(self, stats: LevelStats, rows: int) -> Iterator[None]:
        """Count one pass of `rows` rows (without padding) and the seconds of the body. On a GPU they are the seconds of
        the launched work, counted by `settle`."""
        with measured_together([self], [(stats, rows)]):
            yield

    def settle(self) -> None:
        """Count the seconds of all passes that have ended."""
        waiting = []
        for stats, measured, part in self._open:
            if measured.has_ended:
                stats.seconds += part * measured.seconds
            else:
                waiting.append((stats, measured, part))
        self._open = waiting


@contextmanager
def measured_together(timings: Sequence[Timing], counted: Sequence[tuple[LevelStats, int]]) -> Iterator[None]:
    """Count one pass that several levels share, each with its rows: the seconds are divided equally."""
    measured = _Stretch(timings[0]._is_gpu)
    yield
    measured.end()
    for timing, (stats, rows) in zip(timings, counted, strict=True):
        stats.count_pass(rows, 0.0)
        timing._open.append((stats, measured, 1 / len(counted)))
        if not timing._is_gpu:
            timing.settle()


class _Stretch:
    """A stretch of time from its creation to its end; on a GPU both are points of the compute stream."""

    def __init__(self, on_gpu: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        self._seconds = 0.0
        if on_gpu:
            self._events[0].record()
        self._began = time.perf_counter()

    def end(self) -> None:
        if self._events:
            self._events[1].record()
        else:
            self._seconds = time.perf_counter() - self._began

    @property
    def has_ended(self) -> bool:
        """Whether the end has passed, so that `seconds` are known."""
        return not self._events or bool(self._events[1].query())

    @property
    def seconds(self) -> float:
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3 if self._events else self._seconds
