"""Callbacks of options, which act while a command line is parsed: debugging, the log, the configuration, aliases."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from offload.errors import UsageError
from triforce_cli.ground import log
from triforce_cli.ground.errors import DEBUG_VARIABLE, FILE_OF_DEFAULTS
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import user_path

if TYPE_CHECKING:
    from triforce_cli.settings.configuration import Configuration


def switch_debugging(wanted: bool) -> bool:
    if wanted:
        os.environ[DEBUG_VARIABLE] = "1"
    return wanted


def use_configuration(context: typer.Context, named: Path | None) -> Path | None:
    """Take the defaults of options from the configuration file."""
    from triforce_cli.settings.configuration import META, Configuration

    configuration = Configuration.read(named, context.find_root().command)
    context.default_map = configuration.of(_words(context), context.command)
    context.meta[FILE_OF_DEFAULTS], context.meta[META] = configuration.file, configuration
    return named


def configuration_of(context: typer.Context) -> Configuration:
    """The configuration that a command reads; an empty one while its options are completed."""
    from triforce_cli.settings.configuration import META, Configuration

    found: Configuration = context.meta.get(META) or Configuration()
    return found


def _named(context: typer.Context, model: str) -> str:
    return model if context.resilient_parsing else configuration_of(context).aliases().model(model)


def without_alias(context: typer.Context, model: Path | None) -> Path | None:
    """The model that --model names, maybe by an alias."""
    return None if model is None else Path(_named(context, str(model)))


def draft_without_alias(context: typer.Context, draft: str | None) -> str | None:
    return None if draft is None else _named(context, draft)


def models_without_aliases(context: typer.Context, models: list[Path] | None) -> list[Path] | None:
    return None if models is None else [Path(_named(context, str(model))) for model in models]


def use_configuration_as_far_as_it_is_one(context: typer.Context, named: Path | None) -> Path | None:
    """Take the defaults from the file, unless it has a fault: the command that changes it can remove that."""
    with suppress(UsageError):
        use_configuration(context, named)
    return named


def _words(context: Any) -> tuple[str, ...]:
    """The command's words without the program's name: ("sessions", "ls")."""
    return () if context.parent is None else (*_words(context.parent), str(context.info_name))


def show_all_help(context: typer.Context, wanted: bool) -> None:
    """Show the help of a command with its hidden options."""
    if wanted:
        hidden: list[Any] = [found for found in context.command.params if getattr(found, "hidden", False)]
        for parameter in hidden:
            parameter.hidden = False
        Output().text(f"{context.get_help()}\n")  # Typer has printed the help itself; this adds the last newline
        for parameter in hidden:
            parameter.hidden = True
        raise typer.Exit


def begin_log(file: Path | None) -> Path | None:
    if file is not None:
        log.begin(user_path(str(file)))
    return file
