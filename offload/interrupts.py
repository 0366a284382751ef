"""Interrupts: a signal's handler notes that the program is to stop, and long work polls for it.

Ctrl-C (SIGINT), SIGTERM, and SIGHUP of a terminal that has gone. Python runs a handler between any two instructions,
also inside a library's function. An exception raised there may be swallowed, turned into another one, or leave a lock
taken. So a handler raises in two cases only: within `waiting`, where nothing else would end the wait, and where a
signal comes again after the first has found no poll for GRACE_SECONDS. Whatever must be done whole does not poll.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 2.0  # for the next poll to come, and for an end that was begun to be kept
_FIRST_SECONDS, _LISTENING_SECONDS = 0.02, 0.2  # from the begin of a wait, and from then on
Handler = Callable[[int, "FrameType | None"], object] | int | None


class Terminated(SystemExit):
    """Another process asked this one to end, or nothing polled for a signal that was repeated. No interrupt, which a
    conversation goes on after; no Exception, which libraries swallow. The exit code is what a shell reports of a
    process that the signal killed. forced: raised wherever the program was; what it was changing may be half done."""

    def __init__(self, number: int, *, forced: bool = False) -> None:
        self.number, self.exit_code, self.forced = number, 128 + number, forced
        super().__init__(self.exit_code)


class _Listener:
    """The signals that were noted and the exception that was raised last.

    noted: those whose exceptions are still to be raised, each once. waits: the main thread is within `waiting`.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self.waits = False
        self._noted_at = self._raised_at = -math.inf
        self._raised: int | None = None
        self._forced = False

    @property
    def is_ending(self) -> bool:
        """Was an exception raised a moment ago? Whatever keeps the work so far is not broken off then."""
        return time.monotonic() - self._raised_at < GRACE_SECONDS

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_ending and (number == signal.SIGINT or self._raised != signal.SIGINT):
            return  # the same wish again
        now, is_first = time.monotonic(), not self.noted
        if is_first:
            self._noted_at = now
        if number not in self.noted:
            self.noted.append(number)
        _request(self)
        if self.waits:
            self.deliver()
        elif not is_first and not self.is_ending and now - self._noted_at >= GRACE_SECONDS:
            self._forced = True
            raise self._taken()

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.waits:
            self.deliver()

    def deliver(self) -> None:
        """Raise the exception of the first signal that is noted, if this is the main thread."""
        if self.noted and not self.is_ending and _is_main_thread():
            raise self._taken()

    def error_of(self, error: Exception) -> BaseException:
        """`error`, or the exception of the signal that was noted or raised by force before it came of that."""
        if self.noted and not self.is_ending:
            return self._taken()
        return Terminated(self._raised, forced=True) if self._forced and self._raised is not None else error

    def resume(self) -> None:
        self._raised_at = -math.inf

    def leave(self, number: int, frame: FrameType | None) -> None:
        """End the process, whose work is done. The exit code is that of the signal that ended the work, if one did."""
        os._exit(128 + (self._raised or number))

    def wait(self) -> None:
        """From now on a signal is raised at once, also one that came right before: a timer asks again and again."""
        self.waits = True
        signal.setitimer(signal.ITIMER_REAL, _FIRST_SECONDS, _LISTENING_SECONDS)

    def end_wait(self) -> None:
        if self.waits:
            self.waits = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _taken(self) -> BaseException:
        """The exception of the first signal that is noted, which is noted no longer."""
        number = self.noted.pop(0)
        _request(self if self.noted else None)
        self.end_wait()
        self._raised, self._raised_at = number, time.monotonic()
        if number == signal.SIGINT and not self._forced:
            return KeyboardInterrupt()
        return Terminated(number, forced=self._forced)


_listener: _Listener | None = None  # within `interruptible`
_requested: _Listener | None = None  # while a signal is noted


def poll() -> None:
    """Stop here if a signal asked for it: raises KeyboardInterrupt or Terminated, in the main thread. For every turn of
    a long loop, where nothing is half done."""
    if _requested is not None:
        _requested.deliver()


@contextmanager
def waiting() -> Iterator[None]:
    """Within it a signal raises at once. For a wait that nothing else ends: for a person, a pipe, the network, another
    process.

    Python runs handlers between two instructions, and when the kernel breaks off a wait. A signal that comes after the
    last instruction before a wait, or that another thread gets, breaks off none. So a timer breaks off the wait again
    and again.
    """
    listener = _listener
    if listener is None or listener.waits or not _is_main_thread():
        yield
        return
    try:
        listener.wait()
        yield
    finally:
        listener.end_wait()


def resume() -> None:
    """The program goes on after a KeyboardInterrupt: the next signal is heard at once."""
    if _listener is not None:
        _listener.resume()


@contextmanager
def interruptible(*, last: bool = False) -> Iterator[None]:
    """Within it signals are noted, and raised by the next `poll` or in `waiting`; one that is still noted at the end is
    raised there. An exception of a signal is under way for GRACE_SECONDS: until then another Ctrl-C is the same wish,
    and what asks to end waits.

    last: the process ends after it, and a signal that comes then ends it at once.
    """
    global _listener
    listener = _Listener()
    alarm = signal.signal(signal.SIGALRM, listener.on_alarm)
    if last:
        atexit.register(_ignore_all)
    try:
        then = listener.leave if last else None
        with handled(dict.fromkeys((signal.SIGINT, *ENDING), listener.on_signal), then=then):
            _listener = listener
            yield
            listener.deliver()
    except Exception as error:
        if (cause := listener.error_of(error)) is error:
            raise
        raise cause from error
    finally:
        _listener = None
        _request(None)
        if not last:  # an alarm may be on its way
            signal.signal(signal.SIGALRM, alarm)


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


def _request(listener: _Listener | None) -> None:
    global _requested
    _requested = listener


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ignore_all() -> None:
    """For the rest of the process, in which Python no longer runs handlers."""
    for number in (signal.SIGINT, *ENDING, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
