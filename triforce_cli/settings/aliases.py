"""Aliases: a person's names of models, from the table [aliases] of the configuration file.

small = "qwen2.5-0.5b-instruct"     # a pulled model's name, a folder, a GGUF file, or another alias
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import ModelError, UsageError
from offload.fields import Kind, checked, is_unicode
from offload.hub.names import tagged
from triforce_cli.settings.own_names import check_name
from triforce_cli.setup.choice import NONE

TABLE = "aliases"
_TARGET = Kind(
    "a model: a text, not empty", lambda value: isinstance(value, str) and value.strip() != "" and is_unicode(value)
)


@dataclass(frozen=True)
class Aliases:
    """Models by their aliases. file: where they are from, None without a file."""

    names: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None

    @classmethod
    def read(cls, table: Any, file: Path | None) -> Aliases:
        """The aliases in a table, in which every name ends at a model. Raises UsageError."""
        if not isinstance(table, Mapping):
            raise UsageError(f'{file}: {TABLE} must be a table of names and models, as small = "OWNER/NAME"')
        aliases = cls({name: _checked(name, target, file) for name, target in table.items()}, file)
        for name in aliases.names:
            aliases.path(name)
        return aliases

    def path(self, name: str) -> tuple[str, ...]:
        """The names on the way from `name` to its model, both with it; `name` alone if it is no alias. Raises
        UsageError for a circle."""
        path = [name]
        while path[-1] in self.names:
            path.append(self.names[path[-1]])
            if path[-1] in path[:-1]:
                raise UsageError(f"{self.file}: {TABLE}.{name} leads to no model: {' -> '.join(path)}")
        return tuple(path)

    def model(self, name: str) -> str:
        """The model that `name` stands for: `name` itself if it is no alias, or a folder or file. Raises ModelError if
        an alias stands for none that can be found; a GGUF file of the hub by its label may still be fetched."""
        path = self.path(name)
        model = next((each for each in path if os.path.exists(each)), path[-1])
        if model != name and tagged(model) is None and (problem := _problem(model)):
            raise ModelError(f"alias {name} ({TABLE} in {self.file}): {problem}")
        return model

    def problem(self, name: str) -> str:
        """The reason why an alias cannot be used, "" if it can."""
        return _problem(self.path(name)[-1])


def _problem(model: str) -> str:
    from offload.hub.library import locate

    try:
        locate(model, weights=False)
    except ModelError as error:
        return str(error)
    return ""


def _checked(name: str, target: Any, file: Path | None) -> str:
    check_name(name, f"{file}: {TABLE}", reserved=NONE)
    model: str = checked(target, f"{file}: {TABLE}.{name}", _TARGET, UsageError)
    return model
