"""Lines of OpenAI's batch format, converted to lines of our own: {"custom_id", "method", "url", "body"}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.errors import UsageError
from triforce_cli.apis.chat_fields import chat_fields
from triforce_cli.prompts.messages import Note

URL = "/v1/chat/completions"
_LINE = ("custom_id", "method", "url", "body")


def is_openai(line: Mapping[str, Any]) -> bool:
    return "body" in line


def own(line: Mapping[str, Any], place: str, note: Note) -> dict[str, Any]:
    """The line with our field names. note: hears of parts that are left out. Raises UsageError for requests that are
    not supported."""
    body = line["body"]
    if line.get("url", URL) != URL or not isinstance(body, dict):
        raise UsageError(f"{place}: only requests to {URL}, with a body, can be answered")
    if further := line.keys() - {*_LINE}:
        raise UsageError(
            f"{place}: {min(further)} stands beside body, where only {', '.join(_LINE)} may; is it a part of it?"
        )
    return ({"id": line["custom_id"]} if "custom_id" in line else {}) | chat_fields(body, place, note)
