"""`triforce config`: the options' values without the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from offload.errors import UsageError, quoted_line
from triforce_cli.options import callbacks, options
from triforce_cli.options.call import spread
from triforce_cli.options.other_programs import Group
from triforce_cli.render import config as render_config
from triforce_cli.render.config import Setting
from triforce_cli.screen.output import Output
from triforce_cli.settings import tree
from triforce_cli.settings.configuration import Configuration, default_file, file_of, origin

ASKING = ("ask",)  # the command that takes templates

config = typer.Typer(
    cls=Group, no_args_is_help=True, help="Look at the configuration file and what it changes, or edit it."
)


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
) -> None:
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
    configuration = callbacks.configuration_of(context)
    every = [
        Setting(name, *origin(option, configuration.of(words, found), configuration.file), commands=(" ".join(words),))
        for words, found in chosen.items()
        for name, option in tree.options(found).items()
        if option.envvar
    ]
    settings = render_config.merged(every)
    templates = tuple(configuration.templates().templates.values()) if ASKING in chosen else ()
    file, is_there = str(configuration.file or default_file()), configuration.file is not None
    with Output() as output:
        if json:
            output.document(render_config.document(file, settings, templates, found=is_there))
            return
        output.note(f"configuration file: {file}{'' if is_there else ' (there is none)'}")
        output.text(render_config.table(settings))
        output.text(render_config.templates_table(templates, width=output.width))


@config.command()
@spread
def path(*, config: options.EditedConfig = None, debug: options.Debug = False) -> None:
    """Print the path of the configuration file, which need not exist.

    Example: triforce config path
    """
    with Output() as output:
        output.text(f"{file_of(config)}\n")


@config.command()
@spread
def edit(
    context: typer.Context,
    *,
    quiet: options.Quiet = False,
    config: options.EditedConfig = None,
    log_file: options.LogFile = None,
    debug: options.Debug = False,
) -> None:
    """Open the configuration file in your editor (VISUAL, or EDITOR), and check it afterwards.

    The file is made if there is none. A fault is named with its line or key, and the file is kept as it is.

    Example: triforce config edit
    """
    file = file_of(config)
    from triforce_cli.settings import configuration_file

    configuration_file.edit(file)
    with Output(quiet=quiet) as output:
        try:
            aliases = Configuration.read(file, context.find_root().command).aliases()
        except UsageError as error:
            named = () if file == default_file() else ("--config", str(file))
            again = quoted_line("triforce", "config", "edit", *named)
            raise UsageError(f"{error}; the file is kept as it is; edit it again: {again}") from error
        output.note(f"{file} has no fault")
        for name in aliases.names:
            if problem := aliases.problem(name):
                output.note(f"alias {name}: {problem}")
