"""An agent in the foreground: the terminal and its signals are the agent's until it ends."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from offload.errors import TriforceError, UsageError
from offload.interrupts import exit_status, passed_on


class AgentEnded(TriforceError):
    """The end of an agent whose exit code is not 0. It has said why itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command to its end. Raises AgentEnded with its exit code as a shell reports it, UsageError."""
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from error
    with passed_on(process.pid):
        process.returncode = exit_status(process.pid)
    if process.returncode:
        raise AgentEnded(process.returncode if process.returncode > 0 else 128 - process.returncode)
