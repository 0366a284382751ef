"""The configuration file: values of options that neither the command line nor the environment gives.

temperature = 0.8            # of every command that has the option
[chat]
model = "~/models/llama"     # of this command
[sessions.ls]
quiet = true
[aliases]                    # names of models (triforce_cli/settings/aliases.py)
small = "qwen2.5-0.5b-instruct"
[templates.short]            # a prompt (triforce_cli/settings/prompt_templates.py)
prompt = "In one sentence: {input}"
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import UsageError
from offload.fields import TRUTH, Kind, checked, list_of
from offload.files import user_folder
from triforce_cli.screen.utf8 import user_path
from triforce_cli.settings import aliases, prompt_templates, tree
from triforce_cli.settings.aliases import Aliases
from triforce_cli.settings.prompt_templates import PromptTemplates

VARIABLE = "TRIFORCE_CONFIG"
META = "triforce.configuration"  # key of a context's meta: the configuration that its command reads
NAME = "config.toml"
MAX_BYTES = 1 << 20

Words = tuple[str, ...]

_VALUE = Kind("a text or a number", lambda value: isinstance(value, str) or type(value) in (int, float))


@dataclass(frozen=True)
class Configuration:
    """The settings in a configuration file. file: None if there is none."""

    file: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, named: Path | None, root: Any) -> Configuration:
        """The settings in the file `named`, else in the user's own file if there is one. Raises UsageError, which names
        the fault.

        root: the group of all commands; an option that no command has is refused.
        """
        file = file_of(named)
        if named is None and not _is_there(file):
            return cls()
        configuration = cls(file, parsed(file, text_of(file)))
        configuration.check(root)
        return configuration

    def check(self, root: Any) -> None:
        """Raises UsageError for a key that is none, or a value of another kind. root: the group of all commands."""
        self._check(self.values, (), tree.commands(root))

    def aliases(self) -> Aliases:
        """The aliases of models. Raises UsageError."""
        return Aliases.read(self.values.get(aliases.TABLE, {}), self.file)

    def templates(self) -> PromptTemplates:
        """The prompt templates. Raises UsageError."""
        return PromptTemplates.read(self.values.get(prompt_templates.TABLE, {}), self.file)

    def of(self, words: Words, command: Any) -> dict[str, Any]:
        """The settings of one command's options, by the names of their parameters."""
        known = tree.options(command)
        return {known[name].name: _typed(known[name], value) for name, value in self._said(words) if name in known}

    def _said(self, words: Words) -> Iterator[tuple[str, Any]]:
        """Yield (option, value): the settings for all commands first, then those of this command."""
        node: Any = self.values
        for word in (*words, None):
            yield from ((name, value) for name, value in node.items() if not isinstance(value, dict))
            below = node.get(word) if word is not None else None
            node = below if isinstance(below, dict) else {}  # "store" is a command and an option

    def _check(self, node: Mapping[str, Any], words: Words, commands: Mapping[Words, Any]) -> None:
        """Raises UsageError for unknown commands and options. commands: the ones below `words`."""
        depth = len(words)
        sections = {path[depth] for path in commands if len(path) > depth}
        known = {name: option for command in commands.values() for name, option in tree.options(command).items()}
        for name, value in node.items():
            place = f"{self.file}: {'.'.join((*words, name))}"
            if not words and name == aliases.TABLE:
                self.aliases()
            elif not words and name == prompt_templates.TABLE:
                self.templates()
            elif isinstance(value, dict):
                if name not in sections:
                    raise UsageError(f"{place} is no command{nearest(name, sections)}")
                below = {path: command for path, command in commands.items() if path[depth : depth + 1] == (name,)}
                self._check(value, (*words, name), below)
            elif name not in known:
                where = f"triforce {' '.join(words)}" if words else "any command"
                raise UsageError(f"{place} is no option of {where}{nearest(name, known)}")
            else:
                _check_kind(place, known[name], value)


def file_of(named: Path | None) -> Path:
    """The file `named`, else the user's own, which need not exist."""
    return user_path(str(named)) if named is not None else default_file()


def default_file() -> Path:
    """The user's own configuration file, which need not exist."""
    return user_folder("config") / NAME


def origin(option: Any, said: Mapping[str, Any], file: Path | None) -> tuple[Any, str]:
    """The value of `option` without the command line, and its origin: a variable, `file` or "default".

    said: the command's settings from `Configuration.of`.
    """
    if option.envvar and os.environ.get(option.envvar):
        return os.environ[option.envvar], str(option.envvar)
    if option.name in said:
        return said[option.name], str(file)
    return option.default, "default"


def text_of(file: Path) -> str:
    """The content of a configuration file. Raises UsageError."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _not_readable(file, error) from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{file} is over {MAX_BYTES:,} bytes; is it a configuration file?")
    try:
        return data.decode("utf-8")
    except ValueError as error:
        raise _no_toml(file, error) from error


def parsed(file: Path, text: str) -> dict[str, Any]:
    """The values in `text`, the content of `file`. Raises UsageError."""
    try:
        values: dict[str, Any] = tomllib.loads(text)
        repr(values)  # a number too long to be written is refused as one too long to be read
        return values
    except (ValueError, RecursionError) as error:
        raise _no_toml(file, error) from error


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:  # a folder above it that may not be entered
        raise _not_readable(file, error) from error


def _no_toml(file: Path, error: Exception) -> UsageError:
    return UsageError(f"{file} is not TOML: {error}")


def _not_readable(file: Path, error: OSError) -> UsageError:
    return UsageError(f"the configuration file {file} cannot be read: {error.strerror}")


def _check_kind(place: str, option: Any, value: Any) -> None:
    several = option.multiple and isinstance(value, list)
    checked(value, place, TRUTH if option.is_flag else list_of(_VALUE) if several else _VALUE, UsageError)


def _typed(option: Any, value: Any) -> Any:
    """`value` as an environment variable would give it, so that both get the same checks."""
    if isinstance(value, bool):
        return value
    if option.multiple:
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return str(value)


def nearest(name: str, known: Collection[str], *, prefix: str = "") -> str:
    """The end of a message about an unknown name: the most similar known name. prefix: common to all names."""
    near = difflib.get_close_matches(
        name.removeprefix(prefix), sorted(each.removeprefix(prefix) for each in known), n=1
    )
    return f"; did you mean {prefix}{near[0]}?" if near else "; 'triforce config show' lists all there are"
