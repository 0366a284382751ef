"""The input of OpenAI's responses as messages: texts, tool calls and their results, thoughts of earlier replies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from offload.errors import UsageError
from triforce_cli.apis.api import PLACE, text_of

_TEXTS = ("input_text", "output_text", "text")
_ABOUT_TOOLS = ("name", "description", "parameters", "strict")


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request's instructions and input. Raises UsageError."""
    instructions, given = body.get("instructions"), body.get("input")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise UsageError(f"{PLACE}: input is {json.dumps(given)[:80]}, it must be a text or a list of items")
    thoughts = ""
    for number, item in enumerate(given, start=1):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            thoughts += _thoughts(item)
            continue
        message = _message(item, kind, number)
        if kind == "function_call" and messages and messages[-1]["role"] == "assistant" and not thoughts:
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"] = thoughts
        thoughts = ""
        messages.append(message)
    return messages


def _message(item: Any, kind: Any, number: int) -> dict[str, Any]:
    """The message of an item other than reasoning."""
    if kind == "message":
        return {"role": item.get("role"), "content": text_of(item.get("content"), f"item {number} of input", _TEXTS)}
    if kind == "function_call":
        call = {name: item.get(name) for name in ("name", "arguments")}
        calls = [{"id": item.get("call_id"), "type": "function", "function": call}]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    if kind == "function_call_output":
        text = text_of(item.get("output"), f"item {number} of input", _TEXTS)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    raise UsageError(
        f"{PLACE}: item {number} of input is of the type {json.dumps(kind)[:80]}, which cannot be read; only "
        "message, function_call, function_call_output and reasoning can"
    )


def _thoughts(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item; encrypted ones have none."""
    parts = item.get("content") or item.get("summary") or []
    texts = (part.get("text") for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()
    return "".join(text for text in texts if isinstance(text, str))


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The offered tools in the form of chat completions. Raises UsageError for tools that the server would run."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise UsageError(f"{PLACE}: tools are no list")
    return [_tool(tool, number) for number, tool in enumerate(tools, start=1)]


def _tool(tool: Any, number: int) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise UsageError(
            f"{PLACE}: tool {number} is of the type {json.dumps(kind)[:80]}; only tools of the type function can be "
            "offered, which the client runs"
        )
    function = {name: tool[name] for name in _ABOUT_TOOLS if tool.get(name) is not None}
    return {"type": "function", "function": function}
