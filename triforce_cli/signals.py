"""Signals that end the program: Ctrl-C (SIGINT), SIGTERM, and SIGHUP of a terminal that has gone.

Python runs a signal's handler between any two instructions, also inside a library's function. An exception raised there
may be swallowed, turned into another one, or leave a lock taken. So `interruptible` raises only where all code that
runs, from the innermost frame out to `main`, is this program's own, and waits for that moment elsewhere. It waits, too,
for the functions of own modules that say they are UNINTERRUPTED. While the exception of one signal is under way, what
keeps the work so far runs, and no other signal breaks that off.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)
UNINTERRUPTED = True  # handlers are changed all or none
GRACE_SECONDS = 2.0  # a library, or an end, that takes longer is interrupted wherever it is
_RETRY_SECONDS = 0.02
_LISTENING_SECONDS = 0.2
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


class _Raised:
    """Lives as long as the exception of a signal, which refers to it. seconds: when it was raised."""

    def __init__(self) -> None:
        self.seconds = time.monotonic()


def _nothing() -> None:
    """Stands for a reference to what no longer lives."""


_latest: Callable[[], _Raised | None] = _nothing
_is_listening = False


@contextmanager
def handled(handlers: Mapping[signal.Signals, Handler], *, then: Handler = None) -> Iterator[None]:
    """Within it signals go to these handlers, unless whoever started the program had them ignored (nohup does);
    afterwards to `then`, by default to whoever had them before."""
    before = {number: signal.getsignal(number) for number in handlers}
    heard = [number for number in handlers if before[number] not in (signal.SIG_IGN, None)]
    for number in heard:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number] if then is None else then)


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
def listening() -> Iterator[None]:
    """Within it, and within `interruptible`, a wait for ever hears each signal: a timer breaks it off again and again.

    For standard input. Python runs handlers between two instructions, and when the kernel breaks off a wait. A signal
    that comes after the last instruction before a wait, or that another thread gets, breaks off none: its handler would
    run once the wait is over.
    """
    global _is_listening
    if not isinstance(getattr(signal.getsignal(signal.SIGALRM), "__self__", None), _Arrival):  # another's timer
        yield
        return
    _is_listening = True
    signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS, _LISTENING_SECONDS)
    try:
        yield
    finally:
        _is_listening = False


@contextmanager
def interruptible(main: CodeType, *, last: bool = False) -> Iterator[None]:
    """Within it a signal raises KeyboardInterrupt or Terminated, after at most GRACE_SECONDS and the library call that
    is running then. Until that exception has come to its end, but for GRACE_SECONDS at most, another Ctrl-C is the same
    wish, and what asks to end waits.

    main: the function that runs the program; frames outside of it do not count. last: the process ends after it, and a
    signal that comes then ends it at once.
    """
    _forget()
    arrival = _Arrival(main)
    before = sys.unraisablehook

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        """Python drops what a finaliser raises, and says of a signal that nobody listens to any more that it did."""
        if not arrival.revive(lost.exc_value) and not _came_too_late(lost.exc_value):
            before(lost)

    sys.unraisablehook = unraisable
    if last:
        atexit.register(_ignore_all)
    try:
        then = arrival.leave if last else None
        with handled(dict.fromkeys((signal.SIGINT, *ENDING), arrival.on_signal), then=then):
            yield
    except Exception as error:
        if arrival.forced is None:
            raise
        raise exception_of(arrival.forced) from error  # a library was interrupted and made this of it
    finally:
        try:
            arrival.finish(for_good=last)
        finally:
            if not last:
                sys.unraisablehook = before


def exception_of(number: int) -> BaseException:
    """The exception to raise, now, for this signal."""
    global _latest
    error = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
    raised = _Raised()
    error.__dict__["raised"] = raised
    _latest = weakref.ref(raised)
    return error


def _forget() -> None:
    """No exception is under way, whoever refers to one."""
    global _latest
    _latest = _nothing


def is_under_way(within: float = math.inf) -> bool:
    """Is an exception that was raised for a signal, in these last seconds, not yet at its end?"""
    raised = _latest()
    return raised is not None and time.monotonic() - raised.seconds < within


def _is_repeated(number: int) -> bool:
    """Who presses Ctrl-C twice wants nothing else."""
    return number == signal.SIGINT and is_under_way(GRACE_SECONDS)


def _came_too_late(lost: BaseException | None) -> bool:
    return isinstance(lost, OSError) and str(lost).endswith("ignored due to race condition")


def _ignore_all() -> None:
    """For the rest of the process, in which Python no longer runs handlers."""
    for number in (signal.SIGINT, *ENDING, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


class _Arrival:
    """A signal that came and is raised as soon as it may be. A timer asks again and again while it may not.

    forced: the signal that was raised inside a library, since there was no end of it.
    """

    def __init__(self, main: CodeType) -> None:
        self._main = main
        self._waiting: int | None = None
        self._latest = 0.0
        self._alarm: Handler = signal.signal(signal.SIGALRM, self.on_alarm)  # whose it was
        self._raised: int | None = None
        self.forced: int | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if _is_repeated(number):
            return
        if self._may_raise(frame):
            self._raise(number)
        self._wait(number)

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is None:
            self._stop_timer()
        elif _is_repeated(self._waiting):  # it came while the first was about to be raised
            self._stop_waiting()
        elif self._may_raise(frame):
            self._raise(self._waiting)
        elif time.monotonic() >= self._latest:
            self.forced = self._waiting
            self._raise(self._waiting)

    def revive(self, lost: BaseException | None) -> bool:
        """Have a signal whose exception was lost wait again. False for other exceptions."""
        if not isinstance(lost, KeyboardInterrupt | Terminated):
            return False
        _forget()  # whoever lost it may still refer to it
        self._wait(lost.number if isinstance(lost, Terminated) else signal.SIGINT)
        return True

    def finish(self, *, for_good: bool) -> None:
        """Raise a signal that is still deferred, unless another's exception is what ends the program. for_good: SIGALRM
        stays ours, since one may be on its way."""
        number = self._waiting
        self._stop_waiting()
        if not for_good:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm)
        if number is not None and not is_under_way():
            self._raise(number)

    def leave(self, number: int, frame: FrameType | None) -> None:
        """End the process, whose work is done. The exit code is that of the signal that ended the work, if one did."""
        os._exit(128 + (self._raised or number))

    def _wait(self, number: int) -> None:
        if self._waiting is None:
            self._latest = time.monotonic() + GRACE_SECONDS
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS, _RETRY_SECONDS)
        if self._waiting is None or number != signal.SIGINT:  # a conversation goes on after an interrupt
            self._waiting = number

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting = None
            self._stop_timer()

    def _stop_timer(self) -> None:
        if not _is_listening:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _raise(self, number: int) -> NoReturn:
        self._raised = number
        self._stop_waiting()
        raise exception_of(number)

    def _may_raise(self, frame: FrameType | None) -> bool:
        if is_under_way(GRACE_SECONDS):
            return False
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
