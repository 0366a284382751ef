"""Work done ahead, in a thread of its own, while the person types: what it has come to, and an end to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from offload.progress import OnProgress, Progress, ignore

Work = Callable[[OnProgress], None]  # tells how far it is, often; may be broken off wherever it does
_POLL_SECONDS = 0.1


class _BrokenOff(Exception):
    """Nobody needs it any more."""


class BackgroundWork:
    """One piece of work at a time. Whoever touches what it works on waits for it, or breaks it off, first."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._running: Future[None] | None = None
        self._purpose: object = None
        self._unwanted = threading.Event()
        self._began = (0, 0.0)  # how much was done at which time, as the stage began
        self.progress: Progress | None = None  # of what runs now

    def start(self, work: Work, purpose: object, *, follows: bool = False) -> None:
        """Unless it was started for an equal `purpose` before: then it runs on, or is done. What runs is broken off, or
        waited for, where this `follows` from it."""
        if purpose == self._purpose:
            return
        if not follows:
            self.break_off()
        self._unwanted.clear()
        self._running, self._purpose = self._thread.submit(self._run, work), purpose

    def wait(self, on_progress: OnProgress) -> None:
        """Until it is done. Raises an error of the work, which may be started again then; and what `on_progress`
        raises: the work goes on."""
        running = self._join(on_progress)
        if running is not None and running.exception() is not None:
            self._purpose = None
            running.result()

    def break_off(self, on_progress: OnProgress = ignore) -> None:
        """Until nothing runs. A prefill and a save end at once, what is read is read first. Errors are dropped."""
        self._unwanted.set()
        self._purpose = None
        self._join(on_progress)

    def forget(self) -> None:
        """Forget the last purpose, because its work is about to be undone: an equal one is then started again."""
        self._purpose = None

    @property
    def seconds_left(self) -> float | None:
        """Of the stage that runs, as it went so far."""
        progress, (first, began) = self.progress, self._began
        if progress is None or progress.done <= first:
            return None
        return (progress.total - progress.done) * (time.monotonic() - began) / (progress.done - first)

    def close(self) -> None:
        self.break_off()
        self._thread.shutdown()

    def _run(self, work: Work) -> None:
        try:
            work(self._note)
        except _BrokenOff:
            return
        finally:
            self.progress = None

    def _note(self, progress: Progress) -> None:
        if self.progress is None or progress.stage != self.progress.stage:
            self._began = progress.done, time.monotonic()
        self.progress = progress
        if self._unwanted.is_set() and progress.stage in ("prefill", "save"):
            raise _BrokenOff

    def _join(self, on_progress: OnProgress) -> Future[None] | None:
        """Wait for the running work and return it."""
        running, told = self._running, None
        while running is not None and not running.done():
            if (progress := self.progress) is not None and progress is not told:
                on_progress(progress)
                told = progress
            wait([running], _POLL_SECONDS)
        self._running = None
        return running
