"""`triforce config`: the options' values without the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.errors import UsageError, quoted_line
from triforce_cli.options import options
from triforce_cli.options.flags import ProgramFlags, spread
from triforce_cli.options.other_programs import Group
from triforce_cli.render import config as render_config
from triforce_cli.render.config import Setting
from triforce_cli.screen.output import Output
from triforce_cli.settings import tree
from triforce_cli.settings.configuration import Configuration, default_file, file_of, origin
from triforce_cli.settings.prompt_templates import PromptTemplate

ASKING = ("ask",)  # the command that takes templates

config = typer.Typer(
    cls=Group, no_args_is_help=True, help="Look at the configuration file and what it changes, or edit it."
)


@dataclass(frozen=True, kw_only=True)
class Showing:
    """One `triforce config show`, parsed."""

    file: str
    found: bool
    settings: tuple[Setting, ...]
    templates: tuple[PromptTemplate, ...]
    as_json: bool

    def run(self) -> None:
        with Output() as output:
            if self.as_json:
                output.document(render_config.document(self.file, self.settings, self.templates, found=self.found))
                return
            output.note(f"configuration file: {self.file}{'' if self.found else ' (there is none)'}")
            output.text(render_config.table(self.settings))
            output.text(render_config.templates_table(self.templates, width=output.width))


@dataclass(frozen=True, kw_only=True)
class Location:
    """One `triforce config path`, parsed."""

    file: Path

    def run(self) -> None:
        with Output() as output:
            output.text(f"{self.file}\n")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One `triforce config edit`, parsed. root: the group of all commands, whose options the file may set."""

    file: Path
    root: Any
    quiet: bool

    def run(self) -> None:
        from triforce_cli.settings.configuration_file import edit

        edit(self.file)
        with Output(quiet=self.quiet) as output:
            try:
                aliases = Configuration.read(self.file, self.root).aliases()
            except UsageError as error:
                named = () if self.file == default_file() else ("--config", str(self.file))
                again = quoted_line("triforce", "config", "edit", *named)
                raise UsageError(f"{error}; the file is kept as it is; edit it again: {again}") from error
            output.note(f"{self.file} has no fault")
            for name in aliases.names:
                if problem := aliases.problem(name):
                    output.note(f"alias {name}: {problem}")


@config.command()
@spread
def show(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]",
            help="Options of this command alone: generate, or sessions ls.",
            show_default=False,
        ),
    ] = None,
    *,
    json: options.AsJson = False,
    program: ProgramFlags,
) -> Showing:
    """Show every option's value and its origin: an environment variable, the configuration file, or the default. Then
    the prompt templates (triforce ask --prompt-template).

    The file is TOML. A line "temperature = 0.8" applies to every command that has the option; lines below "[chat]"
    apply to that command. Paths in it are relative to the current folder. An option on the command line wins over its
    variable, a variable over the file.

    Example: triforce config show generate
    """
    root = context.find_root().command
    wanted, commands = tuple(command or ()), tree.commands(root)
    chosen = {words: found for words, found in commands.items() if words[: len(wanted)] == wanted}
    if not chosen:
        names = ", ".join(" ".join(words) for words in commands)
        raise UsageError(f"there is no command {' '.join(wanted)!r}; there are {names}")
    configuration = Configuration.read(program.config, root)
    settings = [
        Setting(name, *origin(option, configuration.of(words, found), configuration.file), commands=(" ".join(words),))
        for words, found in chosen.items()
        for name, option in tree.options(found).items()
        if option.envvar
    ]
    return Showing(
        file=str(configuration.file or default_file()),
        found=configuration.file is not None,
        settings=render_config.merged(settings),
        templates=tuple(configuration.templates().templates.values()) if ASKING in chosen else (),
        as_json=json,
    )


@config.command()
@spread
def path(*, config: options.EditedConfig = None, debug: options.Debug = False) -> Location:
    """Print the path of the configuration file, which need not exist.

    Example: triforce config path
    """
    return Location(file=file_of(config))


@config.command()
@spread
def edit(
    context: typer.Context,
    *,
    quiet: options.Quiet = False,
    config: options.EditedConfig = None,
    log_file: options.LogFile = None,
    debug: options.Debug = False,
) -> Edit:
    """Open the configuration file in your editor (VISUAL, or EDITOR), and check it afterwards.

    The file is made if there is none. A fault is named with its line or key, and the file is kept as it is.

    Example: triforce config edit
    """
    return Edit(file=file_of(config), root=context.find_root().command, quiet=quiet)
