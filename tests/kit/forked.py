"""Ranks of an engine that are forked from a process that has torch: a new one would take a second to import it. With
faults, where wanted. No tests in here.

The real way to start them is tested with the command line (test_ranks_killed).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any

import pytest

from offload.ranks import rendezvous

PROCESSES = multiprocessing.get_context("forkserver")
LIBRARIES = [
    *("torch", "xxhash", "hypothesis", "transformers", "transformers.tokenization_utils_tokenizers"),
    *("offload.ranks.follower", "offload.engine.engine", "triforce_cli.commands.generate", "kit.forked", "kit.faults"),
    *("triforce_cli.app", "prompt_toolkit.shortcuts", "kit.programs"),
]
PROCESSES.set_forkserver_preload(LIBRARIES)
TESTS = Path(__file__).parents[1]
PATIENCE_SECONDS = 300.0  # a loaded machine is slow
Fault = Callable[[int], None]  # called with its number in the process of a rank, before it follows


def sound(rank: int) -> None:
    """No fault."""


def forked(target: Callable[..., None], *args: Any, daemon: bool = True) -> BaseProcess:
    """A process that runs `target`, started by a server that has loaded the libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)  # where it looks for modules of the tests
        forkserver.ensure_running()
    process = PROCESSES.Process(target=target, args=args, daemon=daemon)
    process.start()
    return process


def pytest_in_a_fork(args: Sequence[str], said: Path, **variables: str) -> int | None:
    """Its exit code, with these variables; what it says goes to the file `said`."""
    process = forked(_be_pytest, list(args), said, dict(os.environ) | variables)
    process.join()
    return process.exitcode


def said_in_a_fork(code: str, *args: str, **variables: str) -> str:
    """What a program's text writes to standard output, with these arguments and variables. Not for what is decided when
    the interpreter or torch begins."""
    with TemporaryFile() as file:
        process = forked(_run, Connection(os.dup(file.fileno())), code, args, dict(os.environ) | variables)
        process.join()
        assert process.exitcode == 0
        return os.pread(file.fileno(), 1 << 20, 0).decode()


def _run(written: Connection, code: str, args: Sequence[str], variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    os.dup2(written.fileno(), 1)
    sys.argv = ["", *args]
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    exec(code, {})
    sys.stdout.flush()


def _be_pytest(args: list[str], said: Path, variables: Mapping[str, str]) -> None:
    os.chdir(TESTS.parent)
    os.environ.update(variables)
    with said.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(pytest.main(args))


class Forked:
    """As much of `subprocess.Popen` as rank 0 uses."""

    def __init__(
        self, command: Sequence[str], fault: Fault, *, stderr: IO[bytes], pass_fds: Sequence[int], **_: object
    ) -> None:
        with (
            socket.socket(fileno=os.dup(pass_fds[0])) as channel,
            Connection(os.dup(pass_fds[1])) as file,
            Connection(os.dup(pass_fds[2])) as memory,
            Connection(os.dup(stderr.fileno())) as words,
        ):
            arguments = (channel, file, memory, words, command[-3:], dict(os.environ), fault)
            self._process = forked(_follow, *arguments)
        self._waiting = threading.Lock()
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        with self._waiting:
            self._process.join(timeout)
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _follow(
    channel: socket.socket,
    file: Connection,
    memory: Connection,
    words: Connection,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    fault: Fault,
) -> None:
    from offload.ranks.follower import main

    os.environ.update(variables)
    os.dup2(words.fileno(), 2)
    fault(int(arguments[1]))
    main([str(channel.detach()), str(file.fileno()), str(os.dup(memory.fileno())), *arguments])


@contextmanager
def forked_ranks(fault: Fault = sound) -> Iterator[list[Forked]]:
    """Within it engines start their ranks so; those that were started. At the end all of them have ended."""
    started: list[Forked] = []

    def start(command: Sequence[str], **settings: Any) -> Forked:
        started.append(Forked(command, fault, **settings))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        names = ("DEVNULL", "TimeoutExpired")
        stand_in = SimpleNamespace(Popen=start, **{name: getattr(subprocess, name) for name in names})
        patch.setattr(rendezvous, "subprocess", stand_in)
        yield started
    for process in started:
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
