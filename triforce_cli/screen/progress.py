"""Display of a long stage's progress (load, prefill): a bar at a terminal, otherwise a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from triforce_cli.ground import text

LINE_SECONDS, MOST_SECONDS = 5.0, 60.0  # before a stage's first line; between two later ones at most
BAR_WIDTH = 16


class ProgressDisplay(Protocol):
    def wait(self, label: str) -> None:
        """Show that something of unknown length runs, until the next call."""
        ...

    def update(self, stage: str, done: int, total: int, unit: str) -> None:
        """`done` of `total` "bytes" or "tokens" of `stage`. A new stage replaces the one before. A total that has
        changed since the stage began is not certain, and not shown."""
        ...

    def stop(self) -> None:
        """Leave the screen to others. Idempotent."""
        ...


class SilentDisplay:
    def wait(self, label: str) -> None: ...

    def update(self, stage: str, done: int, total: int, unit: str) -> None: ...

    def stop(self) -> None: ...


class PlainDisplay:
    """Lines on a stage that takes a while: how far it is, ever more seldom, and one when it is done."""

    def __init__(self, write_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write_line = write_line
        self._clock = clock
        self._stage = ""
        self._started = self._next = 0.0
        self._first = self._total = 0

    def wait(self, label: str) -> None: ...

    def update(self, stage: str, done: int, total: int, unit: str) -> None:
        now = self._clock()
        if stage != self._stage or (self._next == math.inf and done < total):  # or it begins again
            self._stage, self._started, self._next = stage, now, now + LINE_SECONDS
            self._first, self._total = done, total
        seconds = now - self._started
        if done >= total:
            if seconds >= LINE_SECONDS and self._next < math.inf:
                self._write_line(text.stage_done(stage, total, unit, seconds, first=self._first))
            self._next = math.inf
        elif now >= self._next:
            self._next = now + min(seconds, MOST_SECONDS)
            pace = text.pace(done, total, unit, seconds, first=self._first, is_certain=total == self._total)
            self._write_line(f"{stage}: {text.percent(done, total)}% {pace}")

    def stop(self) -> None: ...


class TerminalDisplay:
    """A progress bar for each stage, removed at its end; a spinner for work of unknown length.

    Both are Rich's Progress, which draws its first frame at once. Rich's Status draws it on a thread, so a line printed
    in the meantime would leave the frame on the screen.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._bar: Progress | None = None
        self._spinner: Progress | None = None

    def wait(self, label: str) -> None:
        self.stop()
        self._spinner = self._new(SpinnerColumn(), TextColumn("{task.description}", markup=False))
        self._spinner.add_task(label, total=None)
        self._spinner.start()

    def update(self, stage: str, done: int, total: int, unit: str) -> None:
        if self._bar is None or stage != self._stage:
            self._start(stage, done, total, unit)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
        if done >= total:
            self.stop()

    def stop(self) -> None:
        for shown in (self._bar, self._spinner):
            if shown is not None:
                shown.stop()
        self._bar = self._spinner = None

    def _start(self, stage: str, first: int, total: int, unit: str) -> None:
        self.stop()
        self._stage = stage
        self._bar = self._new(TextColumn("{task.description}"), BarColumn(BAR_WIDTH), _PaceColumn())
        self._bar.add_task(stage, completed=first, total=total, unit=unit, first=first, foreseen=total)
        self._bar.start()

    def _new(self, *columns: ProgressColumn) -> Progress:
        return Progress(*columns, console=self._console, transient=True, redirect_stdout=False)


class _PaceColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        total = task.total or 0
        first, is_certain = task.fields["first"], total == task.fields["foreseen"]
        pace = text.pace(
            task.completed, total, task.fields["unit"], task.elapsed or 0.0, first=first, is_certain=is_certain
        )
        return Text(f"{text.percent(task.completed, total):3d}% {pace}", no_wrap=True)


class TimeLeft:
    """Estimated seconds left for a series of steps. prices: of each step, in any unit; past steps give its worth in
    seconds."""

    def __init__(self, prices: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._prices, self._clock = prices, clock
        self._num_done = -1
        self._started = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the first step began."""
        return self._clock() - self._started

    def next_step(self) -> float | None:
        """Begin the next step. Returns the seconds left, None until one step has ended."""
        now = self._clock()
        if self._num_done < 0:
            self._started = now
        self._num_done += 1
        done, left = sum(self._prices[: self._num_done]), sum(self._prices[self._num_done :])
        return (now - self._started) * left / done if done else None
