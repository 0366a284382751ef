"""Settings and their origins as text. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triforce_cli import __version__
from triforce_cli.ground.text import NOTHING, line_text
from triforce_cli.settings.prompt_templates import PromptTemplate


@dataclass(frozen=True)
class Setting:
    """An option's value without the command line, its origin, and its commands."""

    name: str
    value: Any
    origin: str
    commands: tuple[str, ...] = ()


def merged(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Settings by name; commands with the same value and origin share one."""
    found: dict[tuple[str, str, str], Setting] = {}
    for setting in settings:
        key = (setting.name, str(setting.value), setting.origin)
        known = found.get(key, replace(setting, commands=()))
        found[key] = replace(known, commands=known.commands + setting.commands)
    return tuple(sorted(found.values(), key=lambda setting: setting.name))


def table(settings: Sequence[Setting]) -> str:
    """A line per setting, with the commands if they differ in it."""
    names = [setting.name for setting in settings]
    widths = max(map(len, names)), max(len(_shown(setting.value)) for setting in settings)
    return "".join(f"{line}\n" for line in _lines(settings, widths, {name for name in names if names.count(name) > 1}))


def templates_table(templates: Sequence[PromptTemplate], *, width: int) -> str:
    """A line per prompt template: its name, its placeholders, and as much of the prompt as there is room for. "" for no
    templates."""
    if not templates:
        return ""
    heads = [(each.name, " ".join(f"{{{name}}}" for name in each.placeholders) or NOTHING) for each in templates]
    widths = [max(len(head[column]) for head in heads) for column in (0, 1)]
    lines = [
        f"  {name:<{widths[0]}}  {placeholders:<{widths[1]}}  {line_text(each.prompt)}"
        for (name, placeholders), each in zip(heads, templates, strict=True)
    ]
    return "\n".join(["", "prompt templates (triforce ask -t NAME):", *(_cut(line, width) for line in lines)]) + "\n"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: max(width - 3, 0)]}..."


def document(
    file: str, settings: Sequence[Setting], templates: Sequence[PromptTemplate], *, found: bool
) -> dict[str, Any]:
    """The JSON of `config show`. found: whether the file exists."""
    return {
        "file": file,
        "found": found,
        "settings": [
            {
                "name": setting.name,
                "value": setting.value if setting.value is None else _shown(setting.value),
                "origin": setting.origin,
                "commands": list(setting.commands),
            }
            for setting in settings
        ],
        "templates": [
            {
                "name": each.name,
                "prompt": each.prompt,
                "system": each.system or None,
                "begin_reply": each.begin_reply or None,
                "placeholders": list(each.placeholders),
            }
            for each in templates
        ],
        "version": __version__,
    }


def _lines(settings: Sequence[Setting], widths: tuple[int, int], varying: set[str]) -> Iterator[str]:
    for setting in settings:
        where = f" ({', '.join(setting.commands)})" if setting.name in varying else ""
        yield f"{setting.name:<{widths[0]}}  {_shown(setting.value):<{widths[1]}}  {setting.origin}{where}"


def _shown(value: Any) -> str:
    if value is None or value == "" or value == []:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
