"""`triforce config`: the options' values without the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import UsageError, quoted_line
from triforce_cli import completion, options, tree
from triforce_cli.configuration import Configuration, default_file, file_of, origin, parsed
from triforce_cli.elsewhere import Group
from triforce_cli.flags import ProgramFlags, spread
from triforce_cli.output import Output
from triforce_cli.prompt_templates import PROMPT, PromptTemplate
from triforce_cli.render import config as render_config
from triforce_cli.render.config import Setting

KEY_HELP = "As in the file: model, chat.temperature, aliases.NAME, templates.NAME.prompt."
KeyToSet = Annotated[
    str, typer.Argument(metavar="KEY", help=KEY_HELP, show_default=False, autocompletion=completion.keys)
]
KeyToUnset = Annotated[
    str, typer.Argument(metavar="KEY", help=KEY_HELP, show_default=False, autocompletion=completion.keys_in_the_file)
]
ASKING = ("ask",)  # the command that takes templates

config = typer.Typer(
    cls=Group, no_args_is_help=True, help="Look at the configuration file and what it changes, or change it."
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
class Change:
    """One `triforce config set` or `unset`, parsed. edit: of the file's text. hidden_by: a variable that wins over the
    key, "" if none does."""

    file: Path
    edit: Callable[[str], str]
    done: str
    hidden_by: str = ""
    quiet: bool

    def run(self) -> None:
        from triforce_cli.configuration_file import rewrite

        with Output(quiet=self.quiet) as output:
            rewrite(self.file, self.edit)
            output.note(self.done)
            if self.hidden_by:
                output.note(f"the environment variable {self.hidden_by} is set and wins over it")


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


@config.command("set", context_settings={"ignore_unknown_options": True})  # -3 is a value
@spread
def set_(
    context: typer.Context,
    key: KeyToSet,
    values: Annotated[
        list[str],
        typer.Argument(metavar="VALUE", help="Several for an option that can be repeated.", show_default=False),
    ],
    *,
    quiet: options.Quiet = False,
    config: options.EditedConfig = None,
    log_file: options.LogFile = None,
    debug: options.Debug = False,
) -> Change:
    """Set a key of the configuration file. Everything else in the file stays, comments too.

    The value is checked as that of the option is on the command line. A switch is true or false. The file is made if
    there is none.

    Example: triforce config set chat.temperature 0.8
    """
    from triforce_cli.configuration_edit import with_value
    from triforce_cli.configuration_file import current_text
    from triforce_cli.configuration_key import Key, checked_value

    root, file, named = context.find_root().command, file_of(config), Key.of(key)
    known = Configuration(file, parsed(file, current_text(file)))
    value = checked_value(named, values, known, root)
    variable = next((str(option.envvar) for option in named.options(root).values()), "")
    return Change(
        file=file,
        edit=lambda text: with_value(text, named.parts, value),
        done=f"set {named} in {file}",
        hidden_by=variable if variable and os.environ.get(variable) else "",
        quiet=quiet,
    )


@config.command()
@spread
def unset(
    key: KeyToUnset,
    *,
    quiet: options.Quiet = False,
    config: options.EditedConfig = None,
    log_file: options.LogFile = None,
    debug: options.Debug = False,
) -> Change:
    """Remove a key from the configuration file, also one that no option has. Everything else stays.

    Example: triforce config unset chat.temperature
    """
    from triforce_cli.configuration_edit import value_at, without
    from triforce_cli.configuration_file import current_text
    from triforce_cli.configuration_key import Key

    file, named = file_of(config), Key.of(key)
    found = value_at(parsed(file, current_text(file)), named.parts)
    if found is None:
        raise UsageError(f"{named} is not set in {file}")
    if isinstance(found, dict) and not named.is_of_template:
        raise UsageError(f"{named} is a section of {file}; name one of its keys: {named}.{next(iter(found), 'KEY')}")
    if named.is_of_template and named.parts[2:] == (PROMPT,):
        template = ".".join(named.parts[:2])
        remedy = quoted_line("triforce", "config", "unset", template)
        raise UsageError(f"a template needs its {PROMPT}; {remedy} removes the whole template")
    return Change(
        file=file, edit=lambda text: without(text, named.parts), done=f"removed {named} from {file}", quiet=quiet
    )
