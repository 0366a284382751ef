"""An agent in the foreground: the terminal and its signals are the agent's until it ends."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from offload.errors import TriforceError, UsageError
from offload.interrupts import exit_status, in_foreground


class AgentEnded(TriforceError):
    """The end of an agent whose exit code is not 0. It has said why itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command to its end. Raises AgentEnded with its exit code as a shell reports it, UsageError."""
    started = list[subprocess.Popen[bytes]]()

    def start() -> int:
        try:
            started.append(subprocess.Popen(command, env=environment))
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from error
        return started[0].pid

    with in_foreground(start) as pid:
        started[0].returncode = status = exit_status(pid)
    if status:
        raise AgentEnded(status if status > 0 else 128 - status)
