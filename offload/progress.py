"""How far a long stage is, for whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["load", "restore", "prefill", "save", "replay"]


@dataclass(frozen=True)
class Progress:
    """`done` of `total`."""

    stage: Stage
    done: int
    total: int
    unit: Literal["bytes", "tokens"]


OnProgress = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """Nobody waits."""


def bytes_of(stage: Stage, total: int, on_progress: OnProgress) -> Callable[[int], None]:
    """Hears of bytes as they come, and tells how many they are by now."""
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        on_progress(Progress(stage, done, total, "bytes"))

    return count
