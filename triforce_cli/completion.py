"""A shell's completions besides commands and options: names of sessions, models, aliases and templates, keys of the
configuration file. Nothing heavy is imported, and a fault completes nothing.

Where nothing fits, the shell offers files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from offload.errors import TriforceError
from triforce_cli import tree

if TYPE_CHECKING:
    from triforce_cli.configuration import Configuration

Complete = Callable[[typer.Context, str], list[str]]


def _completing(names: Callable[[typer.Context], Iterable[str]]) -> Complete:
    """The function that Typer calls for the names. Typer offers the names that begin with the typed text."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with suppress(TriforceError, OSError):
            return list(dict.fromkeys(names(ctx)))
        return []

    return complete


def _configuration(context: typer.Context) -> Configuration:
    from triforce_cli.configuration import Configuration

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
    from triforce_cli.choice import NONE

    yield from (NONE, *_models(context))


def _pullable(context: typer.Context) -> Iterator[str]:
    from offload.hub.names import ALIASES

    yield from (alias.name for alias in ALIASES)


def _templates(context: typer.Context) -> Iterable[str]:
    return _configuration(context).templates().templates


def _keys(context: typer.Context) -> Iterator[str]:
    """Keys of all commands first, then those of one."""
    commands = tree.commands(context.find_root().command)
    yield from sorted({name for command in commands.values() for name in tree.options(command)})
    for words, command in commands.items():
        yield from (".".join((*words, name)) for name in tree.options(command))


def _keys_in_the_file(context: typer.Context) -> Iterator[str]:
    from triforce_cli.configuration import file_of, parsed, text_of

    file = file_of(context.params.get("config"))
    yield from _flat(parsed(file, text_of(file)))


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield from _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else [f"{before}{name}"]


def keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """The keys that can be set: of one command only where its name has been begun, since there are a thousand."""
    found = _completing(_keys)(ctx, incomplete)
    return found if incomplete else [name for name in found if "." not in name]


sessions = _completing(_sessions)
stored = _completing(_stored)
models = _completing(_models)
drafts = _completing(_drafts)
pullable = _completing(_pullable)
templates = _completing(_templates)
keys_in_the_file = _completing(_keys_in_the_file)
