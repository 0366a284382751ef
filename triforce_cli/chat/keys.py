"""Keys typed while the program writes: not echoed into its output, and kept as input for the next prompt. And keys that
answer a question by themselves."""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from offload.interrupts import handled, waiting
from triforce_cli.screen.output import Output

_LOCAL = 3  # the index of the local modes in termios' list
_INPUT = 0
_NO_KEYS = ("\r", "\n", "q", "Q", "\x04", "\x1b")  # Enter, q, Ctrl-D, Escape
_SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*.")  # of a key such as an arrow
_MOST_TYPED = 64  # bytes at a time
_LEAVING = (signal.SIGTSTP, signal.SIGQUIT)  # Ctrl-Z and Ctrl-\, after which other programs have the terminal


class Keys:
    """The terminal's echo of standard input. edited: a line editor reads the keys as they are typed; otherwise the
    terminal collects lines."""

    def __init__(self, *, edited: bool) -> None:
        self._edited = edited
        self._terminal = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._modes: list[Any] = []  # as they were at the start
        self._hides = False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Within this context keys are not echoed. The terminal's modes are restored at its end, also after an error,
        while the program is stopped (Ctrl-Z), and after Ctrl-\\. Only SIGKILL leaves them changed."""
        if self._terminal is None:
            yield
            return
        self._modes = termios.tcgetattr(self._terminal)
        with handled({**dict.fromkeys(_LEAVING, self._leave), signal.SIGCONT: self._return}):
            self._hide()
            try:
                yield
            finally:
                self._show()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within this context, inside `hidden`, keys are echoed: while a line is read."""
        self._show()
        try:
            yield
        finally:
            self._hide()

    def _hide(self) -> None:
        self._hides = True
        if self._modes:
            modes = list(self._modes)
            modes[_LOCAL] &= ~termios.ECHO
            if self._edited:
                modes[_LOCAL] &= ~termios.ICANON
                modes[_INPUT] &= ~termios.ICRNL
            self._set(modes)

    def _show(self) -> None:
        self._hides = False
        if self._modes:
            self._set(self._modes)

    def _set(self, modes: list[Any]) -> None:
        assert self._terminal is not None
        with suppress(OSError, termios.error):  # the terminal has gone
            if os.tcgetpgrp(self._terminal) == os.getpgrp():  # a program in the background must not change it
                termios.tcsetattr(self._terminal, termios.TCSANOW, modes)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """Restore the terminal's modes, then do what the signal does by default."""
        self._set(self._modes)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _return(self, number: int, frame: FrameType | None) -> None:
        """Hide keys again after the program was stopped and continued, perhaps in the background at first."""
        if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._leave)
        if self._hides:
            self._hide()


def pressed(keys: Collection[str], output: Output, question: str) -> str:
    """Ask, wait until one of the keys is pressed, without Enter, and return it; "" for one that leaves. What was
    typed before does not count, nor do other keys."""
    terminal = sys.stdin.fileno()
    with Keys(edited=True).hidden(), waiting():
        termios.tcflush(terminal, termios.TCIFLUSH)
        output.question(question)
        while typed := os.read(terminal, _MOST_TYPED).decode(errors="replace"):
            for key in _SEQUENCE.sub("", typed):
                if key in keys or key in _NO_KEYS:
                    return key if key in keys else ""
    return ""
