"""Runs that are timed in turns, so that other load does not fall on one of them alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf

from offload.interrupts import poll

MAX_TURNS, ENOUGH_SECONDS = 4, 0.25  # of all runs

Point = tuple[str, int]  # the measured part, and its rows or tokens
Run = Callable[[], object]


def least_seconds(points: Mapping[Point, Run], limit: float) -> dict[Point, float] | None:
    """The seconds of the shortest run of each point, since other load only makes runs longer. Points take turns, since
    a machine has pauses. None where two turns took more than `limit` seconds."""
    taken, start, num_turns = dict.fromkeys(points, inf), time.perf_counter(), 0
    while num_turns < 2 or (num_turns < MAX_TURNS and time.perf_counter() - start < ENOUGH_SECONDS):
        for point, run in points.items():
            poll()
            begun = time.perf_counter()
            run()
            end = time.perf_counter()
            taken[point] = min(taken[point], end - begun)
            if num_turns < 2 and end - start > limit:
                return None
        num_turns += 1
    return taken
