"""Fields of OpenAI's chat completions, as fields of our own records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from offload.errors import UsageError
from offload.fields import shown
from triforce_cli.apis.api import joined
from triforce_cli.prompts.messages import Note

_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "chat_template_kwargs": "template_args"}
SAME = {"n": 1, "stream": False, "store": False, "modalities": ["text"]}  # fields with a single allowed value
# The command chooses the model; the other fields do not affect the text, or are hints that no template has a place for.
IGNORED = (
    *("model", "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "stream_options", "verbosity"),
)
_FORMAT_FIELDS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}  # of response_format


def chat_fields(body: Mapping[str, Any], place: str, note: Note) -> dict[str, Any]:
    """The body of a request for a chat completion, with our field names. place: of the request, in messages. note:
    hears of parts that are left out. Raises UsageError for requests that are not supported; fields that are not known
    stay as they are."""
    _check_pairs(body, place)
    parts: list[Mapping[str, Any]] = []
    without = ("tools", "tool_choice") if body.get("tool_choice") == "none" else ()
    for name, value in body.items():
        if name in without or name in ("logprobs", "top_logprobs", "reasoning_effort", *IGNORED) or value is None:
            continue
        if name in SAME:
            check_same(body, name, SAME[name], place)
        elif name == "response_format":
            parts.append(constraint(value, place))
        elif name == "tools" and isinstance(value, list):
            parts.append({"tools": functions(value, place, note)})
        elif name != "max_completion_tokens" or body.get("max_tokens") is None:
            parts.append({_OTHER_NAMES.get(name, str(name)): value})
    found = joined(place, *parts)
    if (effort := body.get("reasoning_effort")) is not None:
        further = found.get("template_args", {})
        if isinstance(further, dict):
            found["template_args"] = {**further, "reasoning_effort": effort}
            if "reasoning_effort" in further:
                raise UsageError(f"{place}: reasoning_effort is said twice, by itself and by the template's variables")
    if body.get("logprobs"):
        top = body.get("top_logprobs")
        found["logprobs"] = 0 if top is None else top
    return found


def functions(tools: Any, place: str, note: Note, *, kind: str = "function") -> list[Any]:
    """The tools that can be offered: those of this type, and those of none. Tools of other types, for which a model
    needs a description that the request lacks, or which a provider's server would run, are left out with a note. Raises
    UsageError if no other tool is there: the model would answer without what was asked for."""
    if not isinstance(tools, list):
        raise UsageError(f"{place}: tools are no list")
    found = list[Any]()
    refused = ""
    for number, tool in enumerate(tools, start=1):
        other = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(other, str) or other == kind:
            found.append(tool)
            continue
        named = f"tool {number} is of the type {json.dumps(other)[:80]}"
        refused = refused or named
        note(f"{named} and is left out: only tools of the type {kind} can be offered, which the client runs")
    if refused and not found:
        raise UsageError(f"{place}: {refused}; only tools of the type {kind} can be offered, which the client runs")
    return found


def check_same(body: Mapping[str, Any], name: str, value: object, place: str) -> None:
    """Raises UsageError unless a field has the single allowed value, or is null or absent."""
    given = body.get(name)
    if given is not None and (given != value or type(given) is not type(value)):
        raise UsageError(f"{place}: {name} is {shown(given)}, it can only be {json.dumps(value)}")


def _check_pairs(body: Mapping[str, Any], place: str) -> None:
    """Raises UsageError for fields that contradict each other."""
    most, of_answer = body.get("max_tokens"), body.get("max_completion_tokens")
    if most is not None and of_answer is not None and most != of_answer:
        raise UsageError(
            f"{place}: max_tokens and max_completion_tokens are one limit, and say {shown(most)} and {shown(of_answer)}"
        )
    if not isinstance(body.get("logprobs"), bool | None):
        raise UsageError(f"{place}: logprobs is {shown(body['logprobs'])}, it can only be true or false")
    if body.get("top_logprobs") and body.get("logprobs") is None:
        raise UsageError(f"{place}: top_logprobs needs logprobs, which is to be true then")


def constraint(value: Any, place: str) -> dict[str, Any]:
    """Our field for a response_format. Raises UsageError."""
    value = {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else {}
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        kinds = ", ".join(_FORMAT_FIELDS)
        raise UsageError(f"{place}: response_format is not understood; its type may be one of {kinds}")
    if further := value.keys() - {"type", *_FORMAT_FIELDS[kind]}:
        raise UsageError(f"{place}: response_format of type {kind} has {min(further)!r}, which is not understood")
    if kind == "text":
        return {}
    holder = value if kind == "json_object" else value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if schema is None and kind == "json_schema":
        raise UsageError(f'{place}: response_format of type json_schema needs {{"json_schema": {{"schema": ...}}}}')
    return {"json_schema": {"type": "object"} if schema is None else schema}


def format_constraint(wanted: Any, place: str) -> dict[str, Any]:
    """Our field for a format whose schema stands beside its type, as in the newer APIs; None: no constraint. Raises
    UsageError."""
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    return {} if wanted is None else constraint(wanted, place)
