"""A pseudo-terminal with a screen, and a program that runs at it. No tests in here."""

from __future__ import annotations

import codecs
import errno
import os
import re
import select
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pexpect
import pyte

from kit.hearing import hear_signals

PATIENCE_SECONDS = 300.0  # a loaded machine is slow; a test that passes waits for nothing
PROMPT_BEGINS, PROMPT_ENDS = "\x1b[?2004h", "\x1b[?2004l"  # bracketed paste is on while a line is edited
CTRL_C, CTRL_D, CTRL_U, ENTER, ALT_ENTER, UP, TAB = "\x03", "\x04", "\x15", "\r", "\x1b\r", "\x1b[A", "\t"
_CURSOR_ASKED = b"\x1b[6n"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """A program at a terminal. written: its output; lines: the screen. Waits for conditions instead of sleeping."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        rows: int = 24,
        columns: int = 80,
        begin: Callable[[], None] = hear_signals,
    ) -> None:
        """begin: in the child, before its program starts, or instead of it."""
        self.written = ""
        self._screen = pyte.HistoryScreen(columns, rows, history=2000)
        self._lines: list[str] | None = None  # of the screen as it is
        self._stream = pyte.ByteStream(self._screen)
        self._begin = begin
        self._child = self._start(command, env, rows, columns)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _start(self, command: Sequence[str], env: Mapping[str, str], rows: int, columns: int) -> Any:
        program, *args = command

        def prepare() -> None:
            keep_output(0)
            self._begin()

        child = pexpect.spawn(program, args, dimensions=(rows, columns), env=dict(env), preexec_fn=prepare)
        child.delaybeforesend, child.ptyproc.delayafterclose = None, 0
        return child

    @property
    def lines(self) -> list[str]:
        """The screen, without white space at the ends of lines."""
        if self._lines is None:
            self._lines = [self._line(row) for row in range(self._screen.lines)]
        return self._lines

    def _line(self, row: int) -> str:
        """As the screen's own `display` has it, which takes milliseconds for all of them."""
        cells = self._screen.buffer.get(row)
        return "".join(cells[column].data for column in range(max(cells) + 1)).rstrip() if cells else ""

    @property
    def shown(self) -> str:
        return "\n".join(self.lines).rstrip("\n")

    @property
    def toolbar(self) -> str:
        """The last line of the screen that is not empty."""
        return next((line for line in reversed(self.lines) if line), "")

    @property
    def is_at_line_start(self) -> bool:
        return bool(self._screen.cursor.x == 0)

    @property
    def is_cursor_hidden(self) -> bool:
        return bool(self._screen.cursor.hidden)

    @property
    def is_alive(self) -> bool:
        return bool(self._child.isalive())

    def send(self, keys: str) -> None:
        self._child.send(keys)

    def signal(self, number: int) -> None:
        self._child.kill(number)

    def resize(self, rows: int, columns: int) -> None:
        """The program gets SIGWINCH."""
        self._screen.resize(rows, columns)
        self._lines = None
        self._child.setwinsize(rows, columns)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Read until it holds. Fails with the screen where it does not in time, or the program ends."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"never saw {what} on\n{self.shown}"
            assert self._read() or condition(), f"the program ended before {what} on\n{self.shown}"

    def until_shown(self, text: str) -> None:
        self.until(lambda: text in self.shown, repr(text))

    def until_prompt(self, number: int) -> None:
        """The `number`-th prompt is there, and the toolbar, which is drawn last."""
        self.until(lambda: self.num_prompts >= number, f"prompt {number}")
        self.until(lambda: self.toolbar.startswith("context"), "the toolbar")

    @property
    def num_prompts(self) -> int:
        return self.written.count(PROMPT_BEGINS)

    def type(self, keys: str) -> None:
        """Keys that do not end the line: they are all there when it shows their last word."""
        self.send(keys)
        self.until_shown(keys.split()[-1])

    def ask(self, line: str) -> str:
        """Send a line; what was written until the next prompt, without control sequences."""
        number = self.num_prompts + 1
        self.send(line + ENTER)
        self.until_prompt(number)
        return self.reply

    @property
    def reply(self) -> str:
        """The output since the last line that was sent, up to the next prompt if there is one."""
        begin = self.written.rindex(PROMPT_ENDS) + len(PROMPT_ENDS)
        return plain(self.written[begin:].partition(PROMPT_BEGINS)[0])

    def until_ended(self) -> None:
        """Nobody holds the terminal any more."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._read():
            assert time.monotonic() < deadline, f"the program does not end:\n{self.shown}"

    def finish(self) -> int:
        """The exit code, once the program has ended by itself."""
        self.until_ended()
        self._child.wait()  # it has let go of the terminal, and may take its time to end: closing would kill it
        self._child.close()
        return int(self._child.exitstatus if self._child.exitstatus is not None else -self._child.signalstatus)

    def close(self) -> None:
        self._child.close(force=True)

    def _read(self) -> bool:
        """Show what came within a moment, and answer like a terminal; False at the end.

        The end is told by the terminal, not by the process: its last words may come after it has gone.
        """
        if not select.select([self._child.child_fd], [], [], 0.05)[0]:
            return True
        try:
            data = os.read(self._child.child_fd, 65536)
        except OSError as error:  # nobody holds the other side any more
            if error.errno != errno.EIO:
                raise
            return False
        self.written += self._decoder.decode(data)
        self._stream.feed(data)
        self._lines = None
        if _CURSOR_ASKED in data:
            self._child.send(f"\x1b[{self._screen.cursor.y + 1};{self._screen.cursor.x + 1}R")
        return bool(data)


def plain(written: str) -> str:
    """Without control sequences."""
    return _CONTROL.sub("", written)


def keep_output(terminal: int) -> None:
    """Else the kernel drops what is written and not read yet when Ctrl-C comes, and a loaded machine reads late."""
    modes = termios.tcgetattr(terminal)
    modes[3] |= termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
