"""Ctrl-C as a wish, while something runs that has to end in order."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Stopped(Exception):
    """The person wished it, before there was anything to keep."""


class Interrupts:
    """Within it the first Ctrl-C only sets `requested`; a second one is a KeyboardInterrupt, wherever that hits."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise Stopped if it was requested: where work can be broken off."""
        if self.requested:
            raise Stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
