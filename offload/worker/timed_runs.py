"""Runs that are timed in turns, so that other load does not fall on one of them alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

from offload.interrupts import poll

LEAST_TURNS, MOST_TURNS = 3, 9
ENOUGH_SECONDS = 1.5  # of turns

Point = tuple[str, int]  # the measured part, and its rows or tokens
Run = Callable[[], object]


def median_seconds(points: Mapping[Point, Run], limit: float) -> dict[Point, float] | None:
    """The median seconds of some runs of each point. Points take turns, since a machine has pauses. None where
    LEAST_TURNS take more than `limit` seconds."""
    taken: dict[Point, list[float]] = {point: [] for point in points}
    start = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() - start > ENOUGH_SECONDS:
            break
        for point, run in points.items():
            poll()
            begun = time.perf_counter()
            run()
            end = time.perf_counter()
            taken[point].append(end - begun)
            if turn < LEAST_TURNS and end - start > limit:
                return None
    return {point: median(seconds) for point, seconds in taken.items()}
