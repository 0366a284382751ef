"""Anthropic's messages: POST /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from offload import strict_json
from offload.errors import UsageError
from triforce_cli.apis.api import (
    PLACE,
    ApiError,
    Ended,
    Event,
    Fields,
    Head,
    Reading,
    Said,
    ToolCall,
    Usage,
    flag,
    identifier,
    object_of,
    without,
)
from triforce_cli.apis.chat_fields import format_constraint
from triforce_cli.apis.message_input import choice_of, messages_of, tools_of
from triforce_cli.prompts.messages import Note

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_READ = (
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "stop_sequences", "stream"),
    *("context_management", "output_config"),
)
# They do not affect the text, or are hints that no template has a place for.
_IGNORED = (
    *("metadata", "service_tier", "diagnostics", "cache_control", "inference_geo", "speed", "betas", "container"),
    "mcp_servers",
)
_KNOWN = (*_READ, *_IGNORED, "max_tokens", "temperature", "top_p", "top_k")
_WAITS = 20  # of ten seconds in a row, the last with a delta: Claude Code counts no pings and gives up after 300 s


class Messages:
    """The API; see `Api`."""

    path = "/v1/messages"
    names: ClassVar[Mapping[str, str]] = {"thinking_tokens": "thinking.budget_tokens", "stop": "stop_sequences"}

    def fields(self, body: Mapping[str, Any], note: Note) -> Fields:
        if unknown := [name for name, value in body.items() if name not in _KNOWN and value is not None]:
            raise UsageError(f"{PLACE}: there is no field {unknown[0]!r}; there are {', '.join(_KNOWN)}")
        flag(body, "stream")
        if body.get("max_tokens") is None:
            raise UsageError(f"{PLACE}: max_tokens is missing, and this API demands it")
        _check_edits(body)
        if body.get("mcp_servers"):
            note("mcp_servers are left out: only tools that the client runs can be offered")
        return self.prompt_fields(body, note) | without(body, *_READ, *_IGNORED) | _stops(body) | _format(body)

    def prompt_fields(self, body: Mapping[str, Any], note: Note) -> Fields:
        """The fields of the prompt alone. note: see `fields`."""
        tools = tools_of(body, note)
        choice = choice_of(body)
        return {"messages": messages_of(body, note), **({"tools": tools} if tools else {}), **choice, **_thinking(body)}

    def num_choices(self, body: Mapping[str, Any]) -> int:
        return 1

    def reply(self, body: Mapping[str, Any], model: str) -> MessageReply:
        return MessageReply(Head(identifier("msg_"), model))

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _stops(body: Mapping[str, Any]) -> Fields:
    stops = body.get("stop_sequences")
    return {"stop": stops} if stops else {}


def _check_edits(body: Mapping[str, Any]) -> None:
    """Raises UsageError for edits of the messages that would take anything away: the server makes none."""
    edits = object_of(body, "context_management", "edits").get("edits") or []
    for edit in edits if isinstance(edits, list) else [edits]:
        if edit != {"type": "clear_thinking_20251015", "keep": "all"}:
            raise UsageError(f"{PLACE}: context_management has {json.dumps(edit)[:80]}; the server edits no messages")


def _format(body: Mapping[str, Any]) -> Fields:
    """The constraint of `output_config.format`. Its effort is a hint: clients say it to models whose templates know
    none."""
    wanted = object_of(body, "output_config", "format", "effort", "task_budget").get("format")
    return format_constraint(wanted, PLACE)


def _thinking(body: Mapping[str, Any]) -> Fields:
    wanted = object_of(body, "thinking", "type", "budget_tokens", "display")
    budget = wanted.get("budget_tokens")
    kinds: dict[Any, Fields] = {
        None: {},
        "adaptive": {},
        "disabled": {"thinking": "off"},
        "enabled": {"thinking": "show", "thinking_tokens": budget},
    }
    kind = wanted.get("type")
    if (kind == "enabled") is (budget is None):
        raise UsageError(f"{PLACE}: thinking is enabled with budget_tokens, and has none otherwise")
    if not isinstance(kind, str | None) or kind not in kinds:
        raise UsageError(f"{PLACE}: thinking is of the type {json.dumps(kind)[:80]}, which is not understood")
    return kinds[kind]


class MessageReply:
    """A message; see `Reply`. Its content is a list of blocks: thinking, text, tool calls."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._num_blocks = 0  # that have begun
        self._open = ""  # the type of the open block
        self._num_waits = 0  # since the last delta

    def begin(self, usage: Usage) -> Iterator[Event]:
        yield _event("message_start", message=self._object([], _usage(usage)))

    def keep_alive(self) -> Iterator[Event]:
        """A ping, or now and then an empty delta of the open block or of a text, as some clients count no pings."""
        self._num_waits += 1
        if self._num_waits < _WAITS:
            yield _event("ping")
        elif self._open == "tool_use":
            self._num_waits = 0
            yield self._delta({"type": "input_json_delta", "partial_json": ""})
        else:
            kind = self._open or "text"
            yield from self._more(kind, f"{kind}_delta", "")

    def reading(self, reading: Reading) -> Iterator[Event]:
        yield from ()

    def add(self, said: Said) -> Iterator[Event]:
        if said.thoughts:
            yield from self._more("thinking", "thinking_delta", said.thoughts)
        if said.text:
            yield from self._more("text", "text_delta", said.text)
        for piece in said.calls:
            self._num_waits = 0
            if piece.begins:
                yield from self._close()
                yield from self._begin_block(_call(ToolCall(piece.id, piece.name, "{}")))
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def end(self, ended: Ended) -> Iterator[Event]:
        yield from self._close()
        yield _event("message_delta", delta=_stopped(ended), usage=_usage(ended.usage))
        yield _event("message_stop")

    def close(self, ended: Sequence[Ended]) -> Iterator[Event]:
        yield from ()

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield Event(Messages().error(error), "error")

    def document(self, ended: Sequence[Ended]) -> dict[str, Any]:
        (only,), blocks = ended, list[dict[str, Any]]()
        if only.thoughts:
            blocks.append({"type": "thinking", "thinking": only.thoughts, "signature": ""})
        if only.text:
            blocks.append({"type": "text", "text": only.text})
        blocks += [_call(call) for call in only.calls]
        return self._object(blocks, _usage(only.usage)) | _stopped(only)

    def _more(self, kind: str, delta: str, text: str) -> Iterator[Event]:
        """More of a block; the open one is closed if it is of another type."""
        self._num_waits = 0
        if self._open != kind:
            yield from self._close()
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin_block({"type": kind, kind: "", **signature})
        yield self._delta({"type": delta, kind: text})

    def _begin_block(self, block: Mapping[str, Any]) -> Iterator[Event]:
        self._open = block["type"]
        self._num_blocks += 1
        yield _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> Event:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> Iterator[Event]:
        if self._open:
            yield _event("content_block_stop", index=self._num_blocks - 1)
        self._open = ""

    def _object(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _event(name: str, /, **data: Any) -> Event:
    return Event({"type": name, **data}, name)


def _call(call: ToolCall) -> dict[str, Any]:
    given: Any = {"INVALID_JSON": call.arguments}
    with suppress(ValueError, RecursionError):
        given = strict_json.parse(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _stopped(ended: Ended) -> dict[str, Any]:
    """The reason of the end as the API names it."""
    if ended.finish == "length":
        reason = "max_tokens"
    else:
        reason = "tool_use" if ended.calls else "stop_sequence" if ended.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": ended.stop if reason == "stop_sequence" else None}


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt - used.cached,
        "cache_read_input_tokens": used.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": used.answer,
    }
