"""The billing block that Claude Code puts before its system prompt. It changes from request to request and says nothing
to a model, and behind it nothing could be reused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from triforce_cli.prompts.messages import Note

_BLOCK = re.compile(r"x-anthropic-billing-header: cc_version=[^\s;]+;(?: [a-z_]+=[^\s;]*;)*(?:\s*\n|\Z)")
_SYSTEM = ("system", "developer")  # roles


def without_billing(body: Mapping[str, Any], note: Note) -> Mapping[str, Any]:
    """The request without the block at the front of its system prompt: `system` of Anthropic's messages, else the first
    message. note: hears of it."""
    messages = body.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    if body.get("system") is not None:
        shorter = {**body, "system": _cut(body["system"])}
    elif isinstance(messages, list) and isinstance(first, dict) and first.get("role") in _SYSTEM:
        shorter = {**body, "messages": [{**first, "content": _cut(first.get("content"))}, *messages[1:]]}
    else:
        return body
    if shorter == body:
        return body
    note("the system prompt begins with Claude Code's billing block: it is left out")
    return shorter


def _cut(content: Any) -> Any:
    """A content without the block: a text without its first line, or parts without the first one."""
    if isinstance(content, str):
        return content[found.end() :] if (found := _BLOCK.match(content)) else content
    first = content[0] if isinstance(content, list) and content else None
    if isinstance(first, dict) and first.get("type") == "text" and isinstance(first.get("text"), str):
        return [{**first, "text": _cut(first["text"])}, *content[1:]]
    return content
