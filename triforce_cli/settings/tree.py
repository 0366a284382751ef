"""The program's commands and their options, from Typer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OPTION = "option"


def commands(root: Any) -> dict[tuple[str, ...], Any]:
    """Every command below the group `root` by its words: ("generate",), ("sessions", "ls")."""
    return dict(_below(root, ()))


def options(command: Any) -> dict[str, Any]:
    """The options of a command by their long names without dashes, such as "max-tokens"; without those that only show
    help."""
    listed = (found for found in command.params if found.param_type_name == OPTION and found.envvar)
    return {_long_name(parameter): parameter for parameter in listed}


def _long_name(parameter: Any) -> str:
    return str(next(name for name in parameter.opts if name.startswith("--")).removeprefix("--"))


def _below(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            if command.invoke_without_command:  # a command itself
                yield (*words, name), command
            yield from _below(command, (*words, name))
        else:
            yield (*words, name), command
