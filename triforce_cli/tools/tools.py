"""Definitions of the tools that a model may call, for its chat template."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from offload import strict_json
from offload.errors import UsageError
from triforce_cli.tools.calls import MAX_DEPTH

_OWN = ("messages", "tools", "add_generation_prompt")  # variables that every template gets


def read_tools(text: str) -> list[dict[str, Any]]:
    """The tool definitions in a JSON text, as in the OpenAI API: {"type": "function", "function": {"name", ...}}, a
    list of them or one. Raises UsageError."""
    try:
        found = strict_json.parse(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the tools are not JSON ({error})") from error
    return checked_tools(found if isinstance(found, list) else [found])


def checked_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """The tool definitions, checked. Raises UsageError for an invalid one."""
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f'tool {number} is not {{"type": "function", "function": {{"name": ...}}}}')
        try:
            strict_json.check_writable(tool, MAX_DEPTH, f"tool {number}")
        except ValueError as error:
            raise UsageError(str(error)) from error
    return tools


def checked_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Additional variables of a chat template, checked. Raises UsageError for a variable that every template gets, and
    for values that JSON cannot hold."""
    if own := [name for name in _OWN if name in given]:
        raise UsageError(f"{own[0]} is no variable to set: the chat template gets it anyway")
    try:
        strict_json.check_writable(given, MAX_DEPTH, "a variable of the chat template")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return given


def has_place(template: str, name: str) -> bool:
    """Whether the chat template uses a variable, or a field of messages."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def check_variables(template: str, given: Collection[str]) -> None:
    """Raises UsageError if the chat template does not use a variable, such as tools."""
    for name in given:
        if not has_place(template, name):
            raise UsageError(
                f"the model's chat template has no place for {name}; leave it out, or choose another model"
            )
