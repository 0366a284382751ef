"""The agents that are installed on this machine."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from triforce_cli.agents.agent import Agent
from triforce_cli.agents.table import AGENTS


@dataclass(frozen=True)
class Installed:
    """An agent with its program here; path: None if there is none. version: "" where no package says it."""

    agent: Agent
    path: Path | None
    version: str = ""


def installed() -> tuple[Installed, ...]:
    """All agents. None is run to be asked for its version: that would take a second each."""
    return tuple(Installed(agent, path := path_of(agent), _version(path)) for agent in AGENTS)


def path_of(agent: Agent) -> Path | None:
    """The agent's program on PATH."""
    found = shutil.which(agent.command)
    return None if found is None else Path(found)


def _version(path: Path | None) -> str:
    """The version of the npm package that a program is of."""
    for folder in () if path is None else path.resolve().parents:
        with suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"])
        if folder.name == "node_modules":
            break
    return ""
