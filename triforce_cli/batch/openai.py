"""Lines of OpenAI's batch format, as lines of our own: {"custom_id", "method", "url", "body"}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.errors import UsageError

URL = "/v1/chat/completions"
_OTHER_NAMES = {"max_completion_tokens": "max_tokens"}
_SAME = {"n": 1, "stream": False, "store": False}  # what may be said, as long as it is this
_IGNORED = ("model", "user", "metadata")  # the command says which model; the others change no text


def is_openai(line: Mapping[str, Any]) -> bool:
    return "body" in line


def own(line: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The line with the names of our own. Raises UsageError for what it asks and is not to be had."""
    body = line["body"]
    if line.get("url", URL) != URL or not isinstance(body, dict):
        raise UsageError(f"{place}: only requests to {URL}, with a body, can be answered")
    found: dict[str, Any] = {"id": line["custom_id"]} if "custom_id" in line else {}
    for name, value in body.items():
        if name in _SAME:
            if value not in (_SAME[name], None):
                raise UsageError(f"{place}: {name} is {value!r}, it can only be {_SAME[name]!r}")
        elif name == "response_format":
            found |= _constraint(value, place)
        elif name not in ("logprobs", "top_logprobs", *_IGNORED) and value is not None:
            found[_OTHER_NAMES.get(name, str(name))] = value
    if body.get("logprobs"):
        found["logprobs"] = body.get("top_logprobs") or 0
    return found


def _constraint(value: Any, place: str) -> dict[str, Any]:
    kind = str(value.get("type")) if isinstance(value, dict) else ""
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = value["json_schema"].get("schema") if kind == "json_schema" and _has_schema(value) else None
    if schema is None:
        raise UsageError(
            f"{place}: response_format is not understood; its type may be text, json_object or json_schema"
        )
    return {"json_schema": schema}


def _has_schema(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("json_schema"), dict)
