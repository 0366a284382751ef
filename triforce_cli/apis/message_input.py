"""The input of Anthropic's messages as messages of chat completions: blocks of text, tool calls and their results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from offload.errors import UsageError
from triforce_cli.apis.api import PLACE, object_of, text_of

Message = dict[str, Any]


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The messages of a request's system prompt and messages. Raises UsageError."""
    system, given = body.get("system"), body.get("messages")
    if not isinstance(given, list):
        raise UsageError(f"{PLACE}: messages are {json.dumps(given)[:80]}, they must be a list")
    first = [] if system is None else [{"role": "system", "content": text_of(system, "system")}]
    return [*first, *(each for number, message in enumerate(given, start=1) for each in _messages(message, number))]


def _messages(message: Any, number: int) -> Iterator[Message]:
    """The messages of one with blocks: results of tools, each by itself, then the text with the tool calls."""
    place = f"message {number}"
    if not isinstance(message, dict):
        raise UsageError(f"{PLACE}: {place} is no object with role and content")
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    others: list[Any] = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            result = text_of(block.get("content") or "", f"a tool_result of {place}")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        else:
            others.append(block)
    if others or not blocks:
        yield _said(message.get("role"), others, place)


def _said(role: Any, blocks: list[Any], place: str) -> Message:
    texts, thoughts, calls = "", "", list[dict[str, Any]]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts += text_of([block], place)
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts += block["thinking"]
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            raise UsageError(f"{PLACE}: {place} has a block of the type {json.dumps(kind)[:80]}, which cannot be read")
    return {
        "role": role,
        "content": texts if texts or not calls else None,
        **({"reasoning_content": thoughts} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def choice_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice of tools. Raises UsageError for one that a chat template cannot force."""
    choice = object_of(body, "tool_choice", "type", "disable_parallel_tool_use", "name")
    if choice.get("type", "auto") not in ("auto", "none"):
        raise UsageError(
            f"{PLACE}: tool_choice is of the type {json.dumps(choice['type'])[:80]}, it can only be auto or none"
        )
    return choice


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The offered tools in the form of chat completions. Raises UsageError for tools that the server would run."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise UsageError(f"{PLACE}: tools are no list")
    found = [_tool(tool, number) for number, tool in enumerate(tools, start=1)]
    return [] if choice_of(body).get("type") == "none" else found


def _tool(tool: Any, number: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise UsageError(f"{PLACE}: tool {number} is not one that the client runs; only such tools can be offered")
    about = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": {name: value for name, value in about.items() if value is not None}}
