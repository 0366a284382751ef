"""Tools that a model may call: their definitions, which go into its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from offload import strict_json
from offload.errors import UsageError


def read_tools(text: str) -> list[dict[str, Any]]:
    """Definitions as the OpenAI API has them: {"type": "function", "function": {"name", ...}}, a list of them or one.
    Raises UsageError."""
    try:
        found = strict_json.parse(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the tools are not JSON ({error})") from error
    return checked_tools(found if isinstance(found, list) else [found])


def checked_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """The same. Raises UsageError for one that is no definition."""
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f'tool {number} is not {{"type": "function", "function": {{"name": ...}}}}')
    return tools


def check_variables(template: str, given: Mapping[str, Any]) -> None:
    """Raises UsageError where a chat template has no place for a variable, such as tools."""
    for name in given:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UsageError(
                f"the model's chat template has no place for {name}; leave it out, or choose another model"
            )
