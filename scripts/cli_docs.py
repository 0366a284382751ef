#!/usr/bin/env python3
"""Write docs/cli.md from the program itself: every command with its help and its options.

usage: python scripts/cli_docs.py [--check]   (--check writes nothing and exits with 1 if the file is out of date)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from triforce_cli.app import app
from triforce_cli.settings import tree

FILE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# The command line
Written by `python scripts/cli_docs.py` from the program; `triforce COMMAND --help` says the same, but for the options
for experts: `--help-all` shows them too.
"""


def document() -> str:
    """The content of docs/cli.md."""
    root = typer.main.get_command(app)
    sections = [HEAD, f"{_help(root)}\n"]
    for words, command in tree.commands(root).items():
        sections += ["\n".join(_command(" ".join(words), command)) + "\n"]
    return "\n".join(sections)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name != tree.OPTION]
    words = [_argument(argument) for argument in arguments]
    yield f"## triforce {name}"
    yield f"`{' '.join(['triforce', name, '[OPTIONS]', *words])}`\n"
    yield f"{_help(command)}\n"
    for argument in arguments:
        yield f"- `{argument.metavar}`: {argument.help}"
    panels: dict[str, list[Any]] = {}
    for option in tree.options(command).values():
        panels.setdefault(option.rich_help_panel or "Options", []).append(option)
    for panel, options in panels.items():
        yield f"\n**{panel}**\n"
        yield "| option | what it does |"
        yield "|---|---|"
        for option in options:
            yield f"| `{_names(option)}` | {_about(option)} |"


def _help(command: Any) -> str:
    """The command's help, with its example as a code block."""
    text = inspect.cleandoc(command.help or "").replace("\\[", "[")
    before, example, command_line = text.partition("Example: ")
    return f"{before}```\n{command_line.strip()}\n```" if example else text


def _argument(argument: Any) -> str:
    name = str(argument.metavar).strip("[]")
    name = name if argument.required else f"[{name}]"
    return f"{name}..." if argument.nargs == -1 else name


def _names(option: Any) -> str:
    names = ", ".join(option.opts)
    return names if option.is_flag or not option.metavar else f"{names} {option.metavar}".replace("|", "\\|")


def _about(option: Any) -> str:
    kind = option.type_descriptor.annotation
    one_of = f" One of {', '.join(get_args(kind))}." if get_origin(kind) is Literal and not option.metavar else ""
    return f"{option.help}{one_of}".replace("\\[", "[").replace("|", "\\|")


def main() -> int:
    text = document()
    if "--check" in sys.argv[1:]:
        return int(not FILE.exists() or FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
