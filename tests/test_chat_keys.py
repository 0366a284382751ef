"""Keys pressed while a chat writes: the terminal's modes, however the program is left. See test_chat_terminal.py."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.terminals import Terminal

ROOT = Path(__file__).resolve().parent.parent
WRITER = """
import time
from offload.interrupts import interruptible, poll
from triforce_cli.chat.keys import Keys

class Told(Keys):
    def _return(self, *args):
        super()._return(*args)
        print("goes on", flush=True)

def main():
    with interruptible():
        with Told(edited=EDITED).hidden():
            print("writes", flush=True)
            while True:
                time.sleep(0.02)
                poll()
try:
    main()
except KeyboardInterrupt:
    pass
"""


class Shell:
    """A shell with jobs, at a terminal that has none of the tests' modes."""

    def __init__(self, folder: Path, *, edited: bool = True) -> None:
        program = folder / "writer.py"
        program.write_text(WRITER.replace("EDITED", str(edited)))
        run = shlex.join([sys.executable, str(program)])
        script = (
            f'trap : INT QUIT; echo "before $(stty -g)"; {run}; echo "after $(stty -g)"; fg; echo "over $(stty -g)"'
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self.terminal = Terminal(["bash", "--norc", "-mc", script], env=environment, columns=200)
        self.terminal.until_shown("writes")

    def modes(self, when: str) -> str:
        """What stty said then."""
        return next(line.split()[1] for line in self.terminal.lines if line.startswith(when))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    opened = Shell(tmp_path)
    yield opened
    opened.terminal.close()


@pytest.mark.parametrize("key", ["\x03", "\x1c"])  # Ctrl-C and Ctrl-\
def test_the_terminal_is_as_it_was_after_a_key_that_ends_the_program(shell: Shell, key: str) -> None:
    shell.terminal.send("typed early")
    shell.terminal.send(key)
    shell.terminal.finish()
    assert shell.modes("after") == shell.modes("before")
    assert "typed early" not in shell.terminal.shown.partition("after")[0]


def test_the_terminal_is_as_it_was_while_the_program_is_stopped(shell: Shell) -> None:
    shell.terminal.send("\x1a")
    shell.terminal.until_shown("goes on")  # fg
    assert shell.modes("after") == shell.modes("before")
    shell.terminal.send("typed early")
    shell.terminal.send("\x03")
    shell.terminal.finish()
    assert "typed early" not in shell.terminal.shown
    assert shell.modes("over") == shell.modes("before")
