"""The input of Anthropic's messages as messages of chat completions: blocks of text, tool calls and their results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from offload.errors import UsageError
from triforce_cli.apis.api import PLACE, flag, object_of
from triforce_cli.apis.chat_fields import functions
from triforce_cli.prompts.messages import LEFT_OUT, Note, num_old, result_of, text_of

Message = dict[str, Any]


def messages_of(body: Mapping[str, Any], note: Note) -> list[Message]:
    """The messages of a request's system prompt and messages. note: hears of blocks that are left out. Raises
    UsageError for new messages, behind the last reply, that are no texts."""
    system, given = body.get("system"), body.get("messages")
    if not isinstance(given, list):
        raise UsageError(f"{PLACE}: messages are {json.dumps(given)[:80]}, they must be a list")
    found: list[Message] = []
    if system is not None:
        found.append({"role": "system", "content": text_of(system or "", f"{PLACE}: system", None)})
    first_new = num_old(given)
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict):
            raise UsageError(f"{PLACE}: message {number} is no object with role and content")
        found += _messages(message, f"message {number}", note, is_new=number > first_new)
    return found


def _messages(message: Mapping[str, Any], place: str, note: Note, *, is_new: bool) -> Iterator[Message]:
    """The messages of one with blocks: results of tools, each by itself, then the text with the tool calls."""
    role, content = message.get("role"), message.get("content")
    if content is None and role == "assistant":
        content = ""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    others: list[Any] = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            result = result_of(_readable(block.get("content")), f"a tool_result of {place}", note)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        else:
            others.append(block)
    if others or not blocks:
        yield _said(role, others, place, note, is_new=is_new)


def _said(role: Any, blocks: list[Any], place: str, note: Note, *, is_new: bool) -> Message:
    texts, thoughts, calls = "", "", list[dict[str, Any]]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts += block["thinking"]
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif is_new:
            texts += text_of(_readable([block]), f"{PLACE}: {place}", None)
        else:
            texts += text_of(_readable([block]), place, note, instead="" if role == "assistant" else LEFT_OUT)
    return {
        "role": role,
        "content": texts if texts or not calls else None,
        **({"reasoning_content": thoughts} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _readable(content: Any) -> Any:
    """The content with a text in place of each document and search result that is one."""
    return [_text_block(block) for block in content] if isinstance(content, list) else content


def _text_block(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    source = block.get("source") if kind == "document" else None
    if kind == "search_result":
        parts = block.get("content")
        heads = [block.get("title"), block.get("source")]
    elif isinstance(source, dict) and source.get("type") in ("text", "content"):
        parts = source.get("data") if source["type"] == "text" else source.get("content")
        heads = [block.get("title"), block.get("context")]
    else:
        return block
    texts = [parts] if isinstance(parts, str) else [each.get("text") for each in _objects(parts)]
    lines = [text for text in (*heads, *texts) if isinstance(text, str) and text]
    return {"type": "text", "text": "\n".join(lines) + "\n\n"} if lines else block


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def choice_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of tools as our fields. Raises UsageError."""
    choice = object_of(body, "tool_choice", "type", "disable_parallel_tool_use", "name")
    kind = choice.get("type", "auto")
    named = {"type": "function", "name": choice.get("name")}
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": named}
    if not isinstance(kind, str) or kind not in kinds:
        raise UsageError(f"{PLACE}: tool_choice is of the type {json.dumps(kind)[:80]}, it can be {', '.join(kinds)}")
    is_one = flag(choice, "disable_parallel_tool_use")
    return {} if not choice else {"tool_choice": kinds[kind], "parallel_tool_calls": not is_one}


def tools_of(body: Mapping[str, Any], note: Note) -> list[dict[str, Any]]:
    """The offered tools in the form of chat completions. note: hears of others. Raises UsageError if there are only
    such as have no schema, or as the server would run."""
    if choice_of(body).get("tool_choice") == "none":
        return []
    tools = functions(body.get("tools") or [], PLACE, note, kind="custom")
    return [_tool(tool, number) for number, tool in enumerate(tools, start=1)]


def _tool(tool: Any, number: int) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise UsageError(f"{PLACE}: tool {number} is no object with a name and an input_schema")
    about = {
        "name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }  # fmt: skip
    return {"type": "function", "function": {name: value for name, value in about.items() if value is not None}}
