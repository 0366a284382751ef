"""Progress reports of a long stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from offload.interrupts import poll

Stage = Literal["load", "pin", "restore", "prefill", "save", "replay"]


@dataclass(frozen=True)
class Progress:
    """`done` of `total` bytes or tokens of a stage. stays: nothing of it is lost if the stage is broken off now. held:
    tokens that were there before, besides them."""

    stage: Stage
    done: int
    total: int
    unit: Literal["bytes", "tokens"]
    stays: bool = False
    held: int = 0


OnProgress = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """An `OnProgress` that does nothing."""


class OnBytes(Protocol):
    """A callback for the number of new bytes, and for the number of bytes by which the total shrinks."""

    def __call__(self, num_bytes: int, fewer: int = 0, /) -> None: ...


def bytes_of(stage: Stage, total: int, on_progress: OnProgress) -> OnBytes:
    """An `OnBytes` that reports to `on_progress` the sum of the new bytes, out of a `total` that may shrink."""
    done = 0

    def count(num_bytes: int, fewer: int = 0, /) -> None:
        nonlocal done, total
        poll()
        total -= fewer
        done = min(done + num_bytes, total)
        on_progress(Progress(stage, done, total, "bytes"))

    return count
