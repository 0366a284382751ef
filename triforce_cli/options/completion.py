"""A shell's completions besides commands and options: names of sessions, models, aliases, templates, agents. Nothing
heavy is imported, and a fault completes nothing.

Where nothing fits, the shell offers files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from offload.errors import TriforceError

if TYPE_CHECKING:
    from triforce_cli.settings.configuration import Configuration

Complete = Callable[[typer.Context, str], list[str]]


def _completing(names: Callable[[typer.Context], Iterable[str]]) -> Complete:
    """The function that Typer calls for the names. Typer offers the names that begin with the typed text."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with suppress(TriforceError, OSError):
            return list(dict.fromkeys(names(ctx)))
        return []

    return complete


def _configuration(context: typer.Context) -> Configuration:
    from triforce_cli.settings.configuration import Configuration

    return Configuration.read(context.params.get("config"), context.find_root().command)


def _sessions(context: typer.Context) -> Iterator[str]:
    import os

    from offload.session.names import is_name, sessions_folder

    yield from sorted(filter(is_name, os.listdir(sessions_folder())))


def _aliases(context: typer.Context) -> Iterable[str]:
    with suppress(TriforceError, OSError):  # of the file, which is no reason to complete no pulled model
        return _configuration(context).aliases().names
    return ()


def _stored(context: typer.Context) -> Iterator[str]:
    from offload.hub.library import stored_ids
    from offload.hub.names import short_name

    yield from map(short_name, stored_ids())


def _models(context: typer.Context) -> Iterator[str]:
    yield from _aliases(context)
    yield from _stored(context)


def _drafts(context: typer.Context) -> Iterator[str]:
    from triforce_cli.setup.choice import NONE

    yield from (NONE, *_models(context))


def _pullable(context: typer.Context) -> Iterator[str]:
    from offload.hub.names import ALIASES

    yield from (alias.name for alias in ALIASES)


def _templates(context: typer.Context) -> Iterable[str]:
    return _configuration(context).templates().templates


def _agents(context: typer.Context) -> Iterator[str]:
    from triforce_cli.agents.table import AGENTS

    yield from (agent.name for agent in AGENTS)


sessions = _completing(_sessions)
stored = _completing(_stored)
models = _completing(_models)
drafts = _completing(_drafts)
pullable = _completing(_pullable)
templates = _completing(_templates)
agents = _completing(_agents)
