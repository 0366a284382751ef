"""Interrupts: a signal's handler notes that the program is to stop, and long work polls for it.

Ctrl-C (SIGINT), SIGTERM, and SIGHUP of a terminal that has gone. Python runs a handler between any two instructions,
also inside a library's function. An exception raised there may be swallowed, turned into another one, or leave a lock
taken. So a handler raises in two cases only: within `waiting`, where nothing else would end the wait, and when a signal
is repeated after GRACE_SECONDS without a poll. Work that must not be left half done does not poll.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 2.0  # time for the next poll, and for saving work while the program ends
_FIRST_SECONDS, _LISTENING_SECONDS = 0.02, 0.2  # of the timer: to its first tick in a wait, and between ticks
Handler = Callable[[int, "FrameType | None"], object] | int | None


class Terminated(SystemExit):
    """The request to end the program: another process sent it, or a signal was repeated and nothing polled. It is not a
    KeyboardInterrupt, after which a conversation goes on, and not an Exception, which libraries swallow. The exit code
    is the one that a shell reports for a process killed by the signal. forced: raised at an arbitrary instruction, so a
    change may be half done."""

    def __init__(self, number: int, *, forced: bool = False) -> None:
        self.number, self.exit_code, self.forced = number, 128 + number, forced
        super().__init__(self.exit_code)


class _Listener:
    """The state of signal handling: the pending signals, and the exception that was raised last.

    noted: pending signals, whose exceptions are still to be raised, each once. waits: the main thread is within
    `waiting`.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self.waits = False
        self._noted_at = self._raised_at = -math.inf
        self._raised: int | None = None
        self._forced = False

    @property
    def is_ending(self) -> bool:
        """Whether a signal's exception was raised within the last GRACE_SECONDS. Saving the work so far is not
        interrupted in that time."""
        return time.monotonic() - self._raised_at < GRACE_SECONDS

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_ending and (number == signal.SIGINT or self._raised != signal.SIGINT):
            return  # a repetition of the same request
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
        """The exception to report for `error`: that of a signal which was pending or forced before, and so may have
        caused it, or else `error`."""
        if self.noted and not self.is_ending:
            return self._taken()
        return Terminated(self._raised, forced=True) if self._forced and self._raised is not None else error

    def resume(self) -> None:
        self._raised_at = -math.inf

    def leave(self, number: int, frame: FrameType | None) -> None:
        """End the process, whose work is done. The exit code is that of the signal that ended the work, if one did."""
        os._exit(128 + (self._raised or number))

    def wait(self) -> None:
        """Raise signals at once from now on, also one that came right before: a timer checks periodically."""
        self.waits = True
        signal.setitimer(signal.ITIMER_REAL, _FIRST_SECONDS, _LISTENING_SECONDS)

    def end_wait(self) -> None:
        if self.waits:
            self.waits = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _taken(self) -> BaseException:
        """Take the first pending signal off the list, and make its exception."""
        number = self.noted.pop(0)
        _request(self if self.noted else None)
        self.end_wait()
        self._raised, self._raised_at = number, time.monotonic()
        if number == signal.SIGINT and not self._forced:
            return KeyboardInterrupt()
        return Terminated(number, forced=self._forced)


_listener: _Listener | None = None  # within `interruptible`
_requested: _Listener | None = None  # while a signal is noted


class Abandoned(BaseException):
    """The end of work in a thread for whose result nobody waits any more. No Exception, which libraries swallow."""


_here = threading.local()


def poll() -> None:
    """Stop here if that was asked for: raises KeyboardInterrupt or Terminated in the main thread because of a signal,
    Abandoned within `abandoned_if`. Call it in every iteration of a long loop, at a point where nothing is half
    done."""
    if _requested is not None:
        _requested.deliver()
    if (is_asked_for := getattr(_here, "is_asked_for", None)) is not None and is_asked_for():
        raise Abandoned


@contextmanager
def abandoned_if(is_asked_for: Callable[[], bool]) -> Iterator[None]:
    """A context in which `poll` in this thread raises Abandoned once `is_asked_for` is true."""
    _here.is_asked_for = is_asked_for
    try:
        poll()
        yield
    finally:
        _here.is_asked_for = None


@contextmanager
def waiting() -> Iterator[None]:
    """A context in which a signal raises at once. For waits that nothing else ends: for the user, a pipe, the network
    or another process.

    Python runs handlers between two instructions, and when the kernel interrupts a wait. A signal that arrives after
    the last instruction before a wait, or in another thread, does not interrupt it. So a timer interrupts the wait
    periodically.
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
    """Continue after a KeyboardInterrupt: the next signal is handled at once."""
    if _listener is not None:
        _listener.resume()


@contextmanager
def interruptible(*, last: bool = False) -> Iterator[None]:
    """A context in which signals are noted, and raised by the next `poll` or in `waiting`; a signal that is still
    pending at the end is raised there. For GRACE_SECONDS after a signal's exception, another Ctrl-C counts as a
    repetition, and a request to end waits.

    last: the process ends after the context, and a signal that arrives then ends it at once.
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
        if not last:  # a timer signal may be pending
            signal.signal(signal.SIGALRM, alarm)


@contextmanager
def heard(listener: Callable[[int], None]) -> Iterator[None]:
    """A context in which signals call `listener` with their number, in place of raising, for programs that end in their
    own time."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        listener(number)

    with handled(dict.fromkeys((signal.SIGINT, *ENDING), on_signal)):
        yield


def ending_of(number: int) -> BaseException:
    """The exception of a signal that was heard, for a program that it ends."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


@contextmanager
def handled(handlers: Mapping[signal.Signals, Handler], *, then: Handler = None) -> Iterator[None]:
    """A context in which signals go to `handlers`, except signals that were ignored when the program started (as under
    nohup); afterwards they go to `then`, by default to their previous handlers."""
    before = {number: signal.getsignal(number) for number in handlers}
    heard = [number for number in handlers if before[number] not in (signal.SIG_IGN, None)]
    for number in heard:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number] if then is None else then)


def ctrl_c_ignored() -> AbstractContextManager[None]:
    """A context in which Ctrl-C is for another program in the same terminal."""
    return handled({signal.SIGINT: signal.SIG_IGN})


@contextmanager
def in_foreground(start: Callable[[], int]) -> Iterator[int]:
    """A context in which the terminal and its signals are a child process's, which is asked to end where this one is.
    start: starts the child and returns its id, which the context has. Signals are the child's from before its start;
    they are not ignored here, since a child would inherit that."""
    pid, early = 0, list[int]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(pid, number) if pid else early.append(number)

    def leave(number: int, frame: FrameType | None) -> None:
        """The child has it, too."""

    with handled({signal.SIGINT: leave, signal.SIGTSTP: leave, **dict.fromkeys(ENDING, pass_on)}):
        pid = start()
        for number in early:
            os.kill(pid, number)
        yield pid


def exit_status(pid: int) -> int:
    """The exit status of a child process once it has ended, negative for a signal. While it is stopped this process is,
    too, so that the shell notices."""
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        os.kill(os.getpid(), signal.SIGSTOP)  # until the shell goes on with both
        os.kill(pid, signal.SIGCONT)


def _request(listener: _Listener | None) -> None:
    global _requested
    _requested = listener


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ignore_all() -> None:
    """Ignore the signals for the rest of the process, in which Python no longer runs handlers."""
    for number in (signal.SIGINT, *ENDING, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
