"""`triforce ARGS` in a fork of a process that has loaded the libraries, which takes a new one two seconds. No tests in
here.

Not for how the interpreter begins and ends: its locale, streams that are closed, what the first imports are.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from tempfile import TemporaryFile

from kit.forked import forked
from kit.terminals import Terminal, keep_output
from test_cli_fake import ROOT, forget_the_tests


def begin(args: Sequence[str], *, env: Mapping[str, str], streams: Sequence[int], session: bool = False) -> BaseProcess:
    """Start it with these standard streams. session: the first of them is the terminal that it is at."""
    copies = [Connection(os.dup(stream)) for stream in streams]
    try:
        return forked(_be, copies, list(args), dict(env), session)
    finally:
        for copy in copies:
            copy.close()


def run(args: Sequence[str], *, env: Mapping[str, str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """To its end. stdin: no more than a pipe takes."""
    reading, writing = os.pipe()
    os.write(writing, stdin.encode())
    os.close(writing)
    with TemporaryFile() as out, TemporaryFile() as err:
        process = begin(args, env=env, streams=(reading, out.fileno(), err.fileno()))
        os.close(reading)
        process.join()
        written = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)]
    assert process.exitcode is not None
    return subprocess.CompletedProcess(list(args), process.exitcode, *written)


def _be(streams: Sequence[Connection], args: Sequence[str], variables: Mapping[str, str], session: bool) -> None:
    """In a fork: be the program."""
    from triforce_cli.__main__ import run

    os.chdir(ROOT)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the server may have been started where signals wait
    os.environ.clear()
    os.environ.update(variables)
    if session:
        os.setsid()
        fcntl.ioctl(streams[0].fileno(), termios.TIOCSCTTY, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    for stream in streams:
        stream.close()
    forget_the_tests()
    sys.argv = ["triforce", *args]
    sys.exit(run())


class ProgramTerminal(Terminal):
    """`triforce ARGS`, at a terminal. stdout: of a file, where standard output is one."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        rows: int = 24,
        columns: int = 80,
        stdout: int | None = None,
    ) -> None:
        self._stdout = stdout
        super().__init__(args, env=env, rows=rows, columns=columns)

    @property
    def is_as_it_was(self) -> bool:
        """Whether the terminal has the settings of before, as `stty` would say them."""
        return bool(termios.tcgetattr(self._child.child_fd) == self._child.settings)

    def _start(self, args: Sequence[str], env: Mapping[str, str], rows: int, columns: int) -> _Child:
        return _Child(args, env, rows, columns, self._stdout)


class _Child:
    """As much of `pexpect.spawn` as a Terminal uses."""

    delaybeforesend = None

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], rows: int, columns: int, stdout: int | None
    ) -> None:
        self.child_fd, inside = os.openpty()
        self.setwinsize(rows, columns)
        keep_output(inside)
        self.settings = termios.tcgetattr(inside)
        self._process = begin(
            args, env=env, streams=(inside, inside if stdout is None else stdout, inside), session=True
        )
        os.close(inside)

    @property
    def exitstatus(self) -> int | None:
        code = self._process.exitcode
        return code if code is not None and code >= 0 else None

    @property
    def signalstatus(self) -> int | None:
        code = self._process.exitcode
        return -code if code is not None and code < 0 else None

    def isalive(self) -> bool:
        return self._process.is_alive()

    def send(self, keys: str) -> None:
        data = keys.encode()
        while data:
            data = data[os.write(self.child_fd, data) :]

    def kill(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def setwinsize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.child_fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def wait(self) -> None:
        self._process.join()

    def close(self, force: bool = True) -> None:
        self._process.kill()
        self._process.join()
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1
