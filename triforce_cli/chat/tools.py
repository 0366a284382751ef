"""Tools that a model may call: their definitions go into its template, and its calls come out as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from offload import strict_json
from offload.errors import UsageError

# How models write calls: between marks (Hermes, Qwen), behind one (Mistral), or as the whole reply (Llama 3), which
# some put in a fence.
_MARKED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_LISTED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


def read_tools(text: str) -> list[dict[str, Any]]:
    """Definitions as the OpenAI API has them: {"type": "function", "function": {"name", ...}}, a list of them or one.
    Raises UsageError."""
    try:
        found = strict_json.parse(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the tools are not JSON ({error})") from error
    tools = found if isinstance(found, list) else [found]
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f'tool {number} is not {{"type": "function", "function": {{"name": ...}}}}')
    return tools


def check_template(template: str) -> None:
    """Raises UsageError where a chat template has no place for tools."""
    if not re.search(r"\btools\b", template):
        raise UsageError("the model's chat template has no place for tools; leave out --tools, or choose another model")


def calls(reply: str) -> list[dict[str, Any]]:
    """The calls that a reply makes, {"name", "arguments"} each; none where it is an answer."""
    return [call for text in _candidates(reply) for call in _calls(text)]


def _candidates(reply: str) -> Iterator[str]:
    marked, listed = _MARKED.findall(reply), _LISTED.findall(reply)
    whole = reply.strip().removeprefix("<|python_tag|>")
    yield from marked or listed or ([fenced[1]] if (fenced := _FENCED.fullmatch(whole)) else [whole])


def _calls(text: str) -> list[dict[str, Any]]:
    found: Any = None
    with suppress(ValueError, RecursionError):  # an answer is no JSON
        found = json.loads(text)
    given = found if isinstance(found, list) else [found]
    return [
        {"name": each["name"], "arguments": each.get("arguments", each.get("parameters", {}))}
        for each in given
        if isinstance(each, dict) and isinstance(each.get("name"), str) and {"arguments", "parameters"} & each.keys()
    ]
