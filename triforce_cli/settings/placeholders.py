"""Placeholders in texts, {NAME}, and their values: `--var`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from offload.errors import UsageError
from triforce_cli.screen.utf8 import decode_argument, read_text, user_path

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def fillings_of(texts: Sequence[str]) -> dict[str, str]:
    """The placeholders' values, each from NAME=TEXT or NAME=@FILE. Raises UsageError."""
    return dict(map(_variable, texts))


def filled(text: str, variables: Mapping[str, str], what: str) -> str:
    """`text` with its {placeholders} replaced; without variables, unchanged. Raises UsageError for an unknown
    placeholder. {{ and }} stand for braces."""
    return replaced(text, variables, what) if variables else text


def placeholders_in(text: str) -> list[str]:
    """The names of the placeholders in `text`, in their order."""
    return [name for part in _parts(text) for name in _PLACEHOLDER.findall(part)]


def replaced(text: str, variables: Mapping[str, str], what: str) -> str:
    """As `filled`, but without variables no placeholder may be there, and {{ and }} are braces then, too."""
    return "".join(
        part[0] if part in ("{{", "}}") else _PLACEHOLDER.sub(_value(variables, what), part) for part in _parts(text)
    )


def _parts(text: str) -> list[str]:
    """`text`, cut before and behind each {{ and }}."""
    return re.split(r"(\{\{|\}\})", text)


def _value(variables: Mapping[str, str], what: str) -> Callable[[re.Match[str]], str]:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in variables:
            known = ", ".join(variables)
            raise UsageError(f"{what} has the placeholder {{{name}}}; --var names {known}; {{{{ and }}}} are braces")
        return variables[name]

    return value


def _variable(text: str) -> tuple[str, str]:
    """(name, value) from NAME=TEXT or NAME=@FILE."""
    name, equals, value = decode_argument("--var", text).partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"var is {text!r}, it must be NAME=TEXT or NAME=@FILE")
    return name, read_text(user_path(value[1:]), f"the variable {name}") if value.startswith("@") else value
