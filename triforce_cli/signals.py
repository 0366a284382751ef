"""Signals that end the program: Ctrl-C (SIGINT), SIGTERM, and SIGHUP of a terminal that has gone.

Python runs a signal's handler between any two instructions, also inside a library's function. An exception raised there
may be swallowed, turned into another one, or leave a lock taken. So `interruptible` raises only where all code that
runs, from the innermost frame out to `main`, is this program's own, and waits for that moment elsewhere. It waits, too,
for the functions of own modules that say they are UNINTERRUPTED.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 2.0  # a library that takes longer is interrupted wherever it is
_RETRY_SECONDS = 0.02
_OWN = {"triforce_cli", "offload", "__main__"}
# Libraries that wait for files, sockets and terminals, which may last for ever. They are made to be interrupted.
_WAITING = {"pathlib", "selectors", "socket", "ssl", "httpcore"}
_UNINTERRUPTED = "UNINTERRUPTED"  # true in a module of this program whose functions are done whole or not at all
_CALLING_BACK = {"contextlib"}  # made to pass on whatever the program's code raises in it
Handler = Callable[[int, "FrameType | None"], object] | int | None


class Terminated(SystemExit):
    """Another process asked this one to end. No interrupt, which a conversation goes on after; no Exception, which
    libraries swallow. The exit code is what a shell reports of a process that the signal killed."""

    def __init__(self, number: int) -> None:
        self.number, self.exit_code = number, 128 + number
        super().__init__(self.exit_code)


@contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Within it signals go to these handlers, unless whoever started the program had them ignored (nohup does)."""
    before = {number: signal.getsignal(number) for number in handlers}
    heard = [number for number in handlers if before[number] not in (signal.SIG_IGN, None)]
    for number in heard:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


@contextmanager
def deferred() -> Iterator[None]:
    """Within it signals wait for the end of it. For imports: a library that was interrupted stays half imported."""
    came: list[int] = []
    try:
        with handled(dict.fromkeys((signal.SIGINT, *ENDING), lambda number, frame: came.append(number))):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def interruptible(main: CodeType) -> Iterator[None]:
    """Within it a signal raises KeyboardInterrupt or Terminated, after at most GRACE_SECONDS and the library call that
    is running then. main: the function that runs the program; frames outside of it do not count."""
    arrival = _Arrival(main)
    before = sys.unraisablehook

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        """Python drops what a finaliser raises."""
        if not arrival.revive(lost.exc_value):
            before(lost)

    sys.unraisablehook = unraisable
    try:
        with handled(dict.fromkeys((signal.SIGINT, *ENDING), arrival.on_signal)):
            yield
    except Exception as error:
        if arrival.forced is None:
            raise
        raise exception_of(arrival.forced) from error  # a library was interrupted and made this of it
    finally:
        sys.unraisablehook = before
        arrival.finish()


def exception_of(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


class _Arrival:
    """A signal that came and is raised as soon as it may be. A timer asks again and again while it may not.

    forced: the signal that was raised inside a library, since there was no end of it.
    """

    def __init__(self, main: CodeType) -> None:
        self._main = main
        self._waiting: int | None = None
        self._latest = 0.0
        self.forced: int | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._may_raise(frame):
            self._raise(number)
        self._wait(number)

    def revive(self, lost: BaseException | None) -> bool:
        """Have a signal whose exception was lost wait again. False for other exceptions."""
        if not isinstance(lost, KeyboardInterrupt | Terminated):
            return False
        self._wait(lost.number if isinstance(lost, Terminated) else signal.SIGINT)
        return True

    def finish(self) -> None:
        """Raise a signal that is still deferred."""
        if self._waiting is not None:
            self._raise(self._waiting)

    def _wait(self, number: int) -> None:
        if self._waiting is None:
            self._latest = time.monotonic() + GRACE_SECONDS
            self._alarm = signal.signal(signal.SIGALRM, self._on_alarm)
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS, _RETRY_SECONDS)
        self._waiting = number

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is None:
            return
        if self._may_raise(frame):
            self._raise(self._waiting)
        elif time.monotonic() >= self._latest:
            self.forced = self._waiting
            self._raise(self._waiting)

    def _raise(self, number: int) -> None:
        if self._waiting is not None:
            self._waiting = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm)
        raise exception_of(number)

    def _may_raise(self, frame: FrameType | None) -> bool:
        if frame is None or _package(frame) in _WAITING:
            return True
        if _package(frame) not in _OWN:
            return False
        while frame is not None and frame.f_code is not self._main:
            if _package(frame) not in _OWN | _CALLING_BACK or frame.f_globals.get(_UNINTERRUPTED):
                return False
            frame = frame.f_back
        return True


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
