"""`triforce config`: the options' values without the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from offload.errors import UsageError
from triforce_cli import options, tree
from triforce_cli.configuration import Configuration, default_file, origin
from triforce_cli.flags import ProgramFlags, spread
from triforce_cli.output import Output
from triforce_cli.render import config as render_config
from triforce_cli.render.config import Setting

config = typer.Typer(no_args_is_help=True, help="Look at the configuration file and what it changes.")


@dataclass(frozen=True, kw_only=True)
class Showing:
    """One `triforce config show`, parsed."""

    file: str
    found: bool
    settings: tuple[Setting, ...]
    as_json: bool

    def run(self) -> None:
        with Output() as output:
            if self.as_json:
                output.document(render_config.document(self.file, self.settings, found=self.found))
                return
            output.note(f"configuration file: {self.file}{'' if self.found else ' (there is none)'}")
            output.text(render_config.table(self.settings))


@config.command()
@spread
def show(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]", help="Of this command alone: generate, or sessions ls.", show_default=False
        ),
    ] = None,
    *,
    json: options.AsJson = False,
    program: ProgramFlags,
) -> Showing:
    """Show every option's value and its origin: an environment variable, the configuration file, or the default.

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
        as_json=json,
    )
