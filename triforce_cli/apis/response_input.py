"""The input of OpenAI's responses as messages: texts, tool calls and their results, thoughts of earlier replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import UsageError
from triforce_cli.apis.api import PLACE
from triforce_cli.apis.chat_fields import functions
from triforce_cli.prompts.messages import LEFT_OUT, Note, num_old, result_of, text_of

_ABOUT_TOOLS = ("name", "description", "parameters", "strict")
_ARGUMENTS = ("arguments", "input", "action")  # of calls of functions, of custom tools, of others that the client ran


def messages_of(body: Mapping[str, Any], note: Note) -> list[dict[str, Any]]:
    """The messages of a request's instructions and input. note: hears of items that are left out. Raises UsageError for
    new messages, behind the last reply, that are no texts."""
    instructions, given = body.get("instructions"), body.get("input")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise UsageError(f"{PLACE}: input is {json.dumps(given)[:80]}, it must be a text or a list of items")
    return [*messages, *_Reading(given, note).messages()]


class _Reading:
    """The reading of an input's items."""

    def __init__(self, items: Sequence[Any], note: Note) -> None:
        self._items, self._note, self._first_new = items, note, num_old(items)
        self._called = set[str]()  # ids of calls so far

    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        thoughts = ""
        for number, item in enumerate(self._items, start=1):
            kind = item.get("type", "message") if isinstance(item, dict) else None
            if kind == "reasoning":
                thoughts += _thoughts(item)
                continue
            message = self._message(item, kind, number)
            if message is None:
                continue
            is_call = "tool_calls" in message
            if is_call and messages and messages[-1]["role"] == "assistant" and not thoughts:
                messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
            if thoughts and message["role"] == "assistant":
                message["reasoning_content"] = thoughts
            thoughts = ""
            messages.append(message)
        return messages

    def _message(self, item: Any, kind: Any, number: int) -> dict[str, Any] | None:
        """The message of an item other than reasoning; None for one that is left out."""
        place = f"item {number} of input"
        if not isinstance(kind, str) or kind == "item_reference":
            raise UsageError(
                f"{PLACE}: {place} is of the type {json.dumps(kind)[:80]}, which cannot be read; the server keeps no "
                "items: send each one whole, as clients do with store false"
            )
        if kind == "message":
            return self._said(item, place, is_new=number > self._first_new)
        name, call = item.get("name", kind.removesuffix("_call")), item.get("call_id")
        if kind.endswith("_call") and isinstance(name, str) and (kind == "function_call" or isinstance(call, str)):
            self._called.add(call if isinstance(call, str) else "")
            function = {"name": name, "arguments": _arguments(item)}
            calls = [{"id": call, "type": "function", "function": function}]
            return {"role": "assistant", "content": None, "tool_calls": calls}
        if kind == "function_call_output" or (
            kind.endswith("_output") and isinstance(call, str) and call in self._called
        ):
            return {"role": "tool", "tool_call_id": call, "content": result_of(item.get("output"), place, self._note)}
        self._note(f"{place} is of the type {json.dumps(kind)[:80]} and is left out: it has no text for a model")
        return None

    def _said(self, item: Mapping[str, Any], place: str, *, is_new: bool) -> dict[str, Any]:
        role, content = item.get("role"), item.get("content")
        if is_new:
            return {"role": role, "content": text_of(content or "", f"{PLACE}: {place}", None)}
        instead = "" if role == "assistant" else LEFT_OUT
        return {"role": role, "content": text_of(content or "", place, self._note, instead=instead)}


def _arguments(item: Mapping[str, Any]) -> Any:
    """The arguments of a call; those of a custom tool are one text."""
    name = next((name for name in _ARGUMENTS if item.get(name) is not None), _ARGUMENTS[0])
    return {name: item[name]} if name == "input" else item.get(name)


def _thoughts(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item; encrypted ones have none."""
    parts = item.get("content") or item.get("summary") or []
    texts = (part.get("text") for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()
    return "".join(text for text in texts if isinstance(text, str))


def tools_of(body: Mapping[str, Any], note: Note) -> list[dict[str, Any]]:
    """The offered tools in the form of chat completions. note: hears of others. Raises UsageError if there are only
    such as the server would run."""
    tools = functions(body.get("tools") or [], PLACE, note)
    return [_tool(tool, number) for number, tool in enumerate(tools, start=1)]


def _tool(tool: Any, number: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or "type" not in tool:
        raise UsageError(f"{PLACE}: tool {number} is no object of the type function")
    function = {name: tool[name] for name in _ABOUT_TOOLS if tool.get(name) is not None}
    return {"type": "function", "function": function}
