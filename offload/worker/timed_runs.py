"""Runs that are timed in turns, so that other load does not fall on one of them alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import psutil
import torch

from offload.interrupts import poll

LEAST_TURNS, MOST_TURNS = 3, 9
ENOUGH_SECONDS = 1.5  # of turns
# Times a second that the kernel takes the core from a thread of ours while it works. On two cores 12 to 18 with nothing
# else running, 150 to 240 beside as many other busy threads, which double what a run takes.
MOST_PREEMPTIONS = 60.0
NOTICED_SECONDS = 0.25  # after which they are looked at

Point = tuple[str, int]  # the measured part, and its rows or tokens
Run = Callable[[], object]


def median_seconds(points: Mapping[Point, Run], limit: float) -> dict[Point, float] | None:
    """The median seconds of some runs of each point. Points take turns, since a machine has pauses. None where
    LEAST_TURNS take more than `limit` seconds, or other programs take this one's cores."""
    taken: dict[Point, list[float]] = {point: [] for point in points}
    before, start = _preemptions(), time.perf_counter()
    for turn in range(MOST_TURNS):
        seconds = time.perf_counter() - start
        if seconds > NOTICED_SECONDS and _preemptions() - before > MOST_PREEMPTIONS * torch.get_num_threads() * seconds:
            return None
        if turn >= LEAST_TURNS and seconds > ENOUGH_SECONDS:
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


def _preemptions() -> int:
    """Times that the kernel has taken the core from a thread of this process; 0 where it does not count them. A
    container sees how busy its host is in all, and not whether that disturbs it."""
    return int(psutil.Process().num_ctx_switches().involuntary)
