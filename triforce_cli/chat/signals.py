"""Stopped work of a chat: signals as an exception after which the conversation goes on, or is saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.interrupts import Terminated


class Stopped(Exception):
    """A signal stopped work, but the conversation goes on or has something to save. ending: of a signal that ends the
    program."""

    def __init__(self, ending: Terminated | None) -> None:
        self.ending = ending

    def end(self) -> None:
        """Raises Terminated if the program is to end."""
        if self.ending is not None:
            raise self.ending


@contextmanager
def stoppable(*, by_ctrl_c: bool) -> Iterator[None]:
    """Raise Stopped within the context for Ctrl-C at the terminal, unless that is to end the program, and for signals
    that end it."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not by_ctrl_c:
            raise
        raise Stopped(None) from error
    except Terminated as error:
        if error.forced:
            raise
        raise Stopped(error) from error
