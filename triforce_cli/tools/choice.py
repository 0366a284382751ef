"""The choice of tools that a request makes: whether the reply has to be calls, of which tools, and of how many."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import UsageError
from offload.fields import shown

_MODES = ("auto", "required")


@dataclass(frozen=True)
class ToolChoice:
    """is_due: the reply is calls. names: of the tools that may be called; None: all that are offered. is_one: the reply
    has one call at most."""

    is_due: bool = False
    names: frozenset[str] | None = None
    is_one: bool = False


ANY = ToolChoice()


def read_choice(value: Any, offered: Collection[str], *, is_one: bool) -> ToolChoice:
    """The choice in OpenAI's words: auto, required, one function, or allowed_tools with a mode. The object of each type
    may stand in a field of the type's name. offered: names of tools. Raises UsageError."""
    kind = value.get("type") if isinstance(value, Mapping) else value
    mode: Any
    names: list[Any] | None
    about = value.get(kind, value) if isinstance(value, Mapping) and isinstance(kind, str) else {}
    if kind == "function" and isinstance(about, Mapping):
        mode, names = "required", [about.get("name")]
    elif kind == "allowed_tools" and isinstance(about, Mapping):
        mode, names = about.get("mode", "auto"), _named(about.get("tools"))
    else:
        mode, names = kind, None
    if mode not in _MODES or names == []:
        raise UsageError(
            f'tool_choice is {shown(value)}, it can be "none", "auto", "required", {{"type": "function", "name": '
            "...}, or allowed_tools with a mode and tools"
        )
    if unknown := [name for name in names or () if name not in offered]:
        raise UsageError(f"tool_choice names {shown(unknown[0])}, which is none of the functions that are offered")
    if mode == "required" and not offered:
        raise UsageError("tool_choice demands a call, and no functions are offered")
    return ToolChoice(mode == "required", None if names is None else frozenset(map(str, names)), is_one)


def _named(tools: Any) -> list[Any]:
    """The names of the functions in a list."""
    found = (
        [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    )
    return [each.get("name") if isinstance(each, Mapping) else None for each in found]
