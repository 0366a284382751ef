"""Being asked to end, by another process or by a terminal that has gone: in order, and with the exit code of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
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
    """Within it signals wait for the end of it. For imports: libraries make another error of what is raised while they
    are being imported, or swallow it and stay half imported."""
    came: list[int] = []
    try:
        with handled(dict.fromkeys((signal.SIGINT, *ENDING), lambda number, frame: came.append(number))):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


def terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)
