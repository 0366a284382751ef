"""Reports on the progress of a long stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["load", "pin", "restore", "prefill", "save", "replay"]


@dataclass(frozen=True)
class Progress:
    """`done` of `total` bytes or tokens of a stage."""

    stage: Stage
    done: int
    total: int
    unit: Literal["bytes", "tokens"]


OnProgress = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """An `OnProgress` that does nothing."""


def bytes_of(stage: Stage, total: int, on_progress: OnProgress) -> Callable[[int], None]:
    """A function that is called with numbers of new bytes, and reports their sum of `total` to `on_progress`."""
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        on_progress(Progress(stage, done, total, "bytes"))

    return count
