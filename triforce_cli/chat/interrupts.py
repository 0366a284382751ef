"""Ctrl-C as a wish, while something runs that has to end in order."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_IMPATIENT = 5  # times Ctrl-C


class Stopped(Exception):
    """The person wished it, before there was anything to keep."""


class Interrupts:
    """Within it Ctrl-C only sets `requested`: a pass may take seconds, and people press again. Who presses so often
    that nothing seems to listen gets a KeyboardInterrupt, wherever that hits."""

    def __init__(self) -> None:
        self._num_pressed = 0

    @property
    def requested(self) -> bool:
        return self._num_pressed > 0

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
        self._num_pressed += 1
        if self._num_pressed >= _IMPATIENT:
            raise KeyboardInterrupt
