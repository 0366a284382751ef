"""Coding agents, and how one would be run, as text. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from offload.errors import shell_line
from triforce_cli.ground.text import path_text

if TYPE_CHECKING:
    from triforce_cli.agents.agent import Agent, Endpoint, Settings
    from triforce_cli.agents.installed import Installed

_WANTED_CONTEXT = 32_768


def table(found: Sequence[Installed]) -> str:
    """A line for each agent: its program, or how to install it."""
    return "".join(f"{each.agent.name:<10}  {_about(each)}\n" for each in found)


def _about(each: Installed) -> str:
    if each.path is None:
        return f"not installed: {each.agent.install}"
    return f"{' '.join(filter(None, (each.agent.title, each.version)))}, {path_text(each.path)}"


def running(agent: Agent, endpoint: Endpoint) -> list[str]:
    """The lines before an agent runs."""
    context = f"{endpoint.context:,} tokens of context"
    is_short = endpoint.context < _WANTED_CONTEXT
    advice = (
        f"agents want {_WANTED_CONTEXT:,} tokens of context or more (--context): with less they shorten all the time"
    )
    return [f"{agent.title}: {endpoint.model} at {endpoint.url}, {context}", *[advice] * is_short]


def dry_run(
    serve: Sequence[str] | None, settings: Settings, folder: str, removed: Iterable[str], command: Sequence[str]
) -> str:
    """The server that would be started, the files of the run, and its command, for a shell. removed: variables that are
    not passed on."""
    lines = [] if serve is None else ["# the server, which ends with the agent", shell_line(*serve), ""]
    for name, text in settings.files.items():
        lines += [f"# {folder}/{name}, which is removed at the end", text]
    given = [f"{name}={value}" for name, value in settings.variables.items()]
    unset = [word for name in sorted(removed) for word in ("-u", name)]
    lines += ["# the agent", shell_line("env", *unset, *given, *command)]
    return "\n".join(lines) + "\n"
