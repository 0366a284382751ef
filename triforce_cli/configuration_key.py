"""A key of the configuration file, as chat.temperature, and the check of a value for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import typer

from offload.errors import TriforceError, UsageError
from triforce_cli import aliases, prompt_templates, tree
from triforce_cli.configuration import Configuration, default_file
from triforce_cli.utf8 import decode_argument

_SWITCH = {"true": True, "false": False}
_OPTION_OF_THE_FILE = "config"


@dataclass(frozen=True)
class Key:
    """The sections of a key and its name in them: ("chat", "temperature")."""

    parts: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Key:
        """The key that is written so. Raises UsageError."""
        text = decode_argument("KEY", text)
        parts = _parts(text)
        if not all(parts):
            raise UsageError(f"{text!r} is no key; it is an option's name, or COMMAND.OPTION: model, chat.temperature")
        return cls(parts)

    @property
    def is_alias(self) -> bool:
        return len(self.parts) == 2 and self.parts[0] == aliases.TABLE

    @property
    def is_of_template(self) -> bool:
        """True for a template, and for a text of one."""
        return len(self.parts) > 1 and self.parts[0] == prompt_templates.TABLE

    def __str__(self) -> str:
        return ".".join(self.parts)

    def nested(self, value: Any) -> dict[str, Any]:
        """The values of a file with this key alone."""
        return reduce(lambda inner, part: {part: inner}, reversed(self.parts), value)

    def options(self, root: Any) -> dict[tuple[str, ...], Any]:
        """The options that the key sets, by their commands' words. root: the group of all commands."""
        *words, name = self.parts
        known = {path: tree.options(command) for path, command in tree.commands(root).items()}
        return {
            path: options[name]
            for path, options in known.items()
            if list(path[: len(words)]) == words
            if name in options
        }


def _parts(text: str) -> tuple[str, ...]:
    """The sections and the name in a key. Names of aliases and templates may have dots."""
    table, dot, name = text.partition(".")
    if dot and table == aliases.TABLE:
        return (table, name)
    if dot and table == prompt_templates.TABLE:
        before, _, last = name.rpartition(".")
        return (table, before, last) if before and last in prompt_templates.TEXTS else (table, name)
    return tuple(text.split("."))


def checked_value(key: Key, texts: Sequence[str], known: Configuration, root: Any) -> Any:
    """The value for the file, from what was typed. known: the file's own values, which may have faults. Raises the
    error of the option or the alias, and UsageError for a key that is none."""
    if key.is_of_template and len(key.parts) == 2:
        known_texts = ", ".join(prompt_templates.TEXTS)
        raise UsageError(
            f"{key} is no text of a template; it has the texts {known_texts}: {key}.{prompt_templates.PROMPT}"
        )
    if key.is_alias or key.is_of_template:
        value = _single(key, [decode_argument("VALUE", text) for text in texts])
        if key.is_alias:
            known.aliases().with_alias(key.parts[1], value)
        else:
            known.templates().with_text(key.parts[1], key.parts[2], value)
        return value
    file = known.file or default_file()
    value = _value_of(key, texts, file, root)
    _try_value(key, value, file, root)
    return value


def _value_of(key: Key, texts: Sequence[str], file: Path, root: Any) -> Any:
    Configuration(file, key.nested("")).check_names(root)
    if key.parts[-1] == _OPTION_OF_THE_FILE:
        raise UsageError("a configuration file does not name another one; TRIFORCE_CONFIG and --config do")
    option = next(iter(key.options(root).values()))
    values = [decode_argument("VALUE", text) for text in texts]
    if option.multiple:
        return values
    value = _single(key, values)
    if option.is_flag:
        if value not in _SWITCH:
            raise UsageError(f"{key} is {value!r}, it must be true or false")
        return _SWITCH[value]
    return _number(value, option.type_descriptor.annotation)


def _single(key: Key, values: Sequence[str]) -> str:
    if len(values) > 1:
        raise UsageError(f"{key} takes one value and {len(values)} are given; put a text with spaces in quotes")
    return values[0]


def _number(text: str, kind: Any) -> Any:
    """A number for an option that takes one, else the text, which the option itself refuses if it wants a number."""
    if kind in (int, float):
        with suppress(ValueError):
            number = kind(text)
            return number if kind is int or number - number == 0 else text
    return text


def _try_value(key: Key, value: Any, file: Path, root: Any) -> None:
    """Raises the error that a command has with the option typed so, and does not have without it."""
    beside = _faultless(file, root)
    for words, option in key.options(root).items():
        typed = list(_typed(key.parts[-1], option, value))
        error = _error_of([*words, *beside, *typed], root)
        if error is not None and str(error) != str(_error_of([*words, *beside], root)):
            raise error


def _typed(name: str, option: Any, value: Any) -> Iterator[str]:
    """`value` on the command line."""
    if isinstance(value, bool):
        names = [f"--{name}"] if value else option.secondary_opts[:1]
        yield from names
    else:
        yield from (f"--{name}={each}" for each in (value if isinstance(value, list) else [value]))


def _faultless(file: Path, root: Any) -> list[str]:
    """The option for the file's other values; for none of them if there is no file or it has a fault."""
    try:
        Configuration.read(file, root)
    except UsageError:
        return [f"--config={os.devnull}"]
    return [f"--config={file}"]


def _error_of(args: Sequence[str], root: Any) -> Exception | None:
    """The error of a command line, which is parsed and not run."""
    try:
        root.main(list(args), prog_name="triforce", standalone_mode=False)
    except (TriforceError, typer.TyperException) as error:
        return error
    return None
