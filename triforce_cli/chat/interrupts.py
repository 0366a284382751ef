"""Ctrl-C as a request to stop, while something runs that has to end in order."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

from triforce_cli.signals import ENDING, exception_of, handled, is_under_way

_IMPATIENT = 5  # times Ctrl-C


class Stopped(Exception):
    """The person stopped the work before there was a result to keep."""


class Interrupts:
    """Within it Ctrl-C only sets `requested`, where there is a `person`: a pass may take seconds, and people press
    again. Who presses so often that nothing seems to listen gets a KeyboardInterrupt, wherever that hits. Being asked
    to end is the same wish, and raises Terminated at the end of it, or at once if asked again."""

    def __init__(self, *, person: bool) -> None:
        self._num_pressed = 0
        self._ending: int | None = None
        pressed = {signal.SIGINT: self._on_interrupt} if person else {}
        self._handled: AbstractContextManager[None] = handled({**pressed, **dict.fromkeys(ENDING, self._on_ending)})

    @property
    def requested(self) -> bool:
        return self._num_pressed > 0 or self._ending is not None

    def __enter__(self) -> Interrupts:
        self._handled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._handled.__exit__(None, None, None)
        if self._ending is not None:
            raise exception_of(self._ending)

    def check(self) -> None:
        """Raise Stopped if it was requested: where work can be broken off."""
        if self.requested:
            raise Stopped

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._num_pressed += 1
        if self._num_pressed % _IMPATIENT == 0:
            raise exception_of(number)

    def _on_ending(self, number: int, frame: FrameType | None) -> None:
        if self._ending is not None and not is_under_way():
            raise exception_of(number)
        self._ending = number
