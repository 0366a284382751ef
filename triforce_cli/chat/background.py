"""Background work on a thread of its own while the person types. It reports progress and can be cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from offload.interrupts import poll
from offload.progress import OnProgress, Progress, ignore

Work = Callable[[OnProgress], None]  # reports its progress often; may be cancelled at each report
_POLL_SECONDS = 0.1


class _BrokenOff(Exception):
    """The work was cancelled."""


class BackgroundWork:
    """The background work of a chat, at most one piece at a time. Code that touches the same state must `wait` or
    `break_off` first."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._running: Future[None] | None = None
        self._purpose: object = None
        self._unwanted = threading.Event()
        self._began = (0, 0.0)  # amount done, and the time, at the start of the stage
        self.progress: Progress | None = None  # of the running work

    def start(self, work: Work, purpose: object, *, follows: bool = False) -> None:
        """Start `work`, unless work for an equal `purpose` is running or done. Running work is cancelled first; if the
        new work `follows` from it, it is finished instead."""
        if purpose == self._purpose:
            return
        if not follows:
            self.break_off()
        self._unwanted.clear()
        self._running, self._purpose = self._thread.submit(self._run, work), purpose

    def wait(self, on_progress: OnProgress) -> None:
        """Wait until the work is done. Raises the work's error, after which it may be started again, and the errors of
        `on_progress`, after which the work goes on."""
        running = self._join(on_progress)
        if running is not None and running.exception() is not None:
            self._purpose = None
            running.result()

    def break_off(self, on_progress: OnProgress = ignore) -> None:
        """Cancel the work and wait until it has ended. Prefill and save stop at their next report of progress, other
        stages finish. Errors are dropped."""
        self._unwanted.set()
        self._purpose = None
        self._join(on_progress)

    def forget(self) -> None:
        """Forget the last purpose, because its work is about to be undone: work for an equal purpose can then start
        again."""
        self._purpose = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds left in the running stage, at its rate so far; None if unknown."""
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
            poll()
            wait([running], _POLL_SECONDS)
        self._running = None
        return running
