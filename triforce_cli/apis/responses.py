"""OpenAI's responses: POST /v1/responses, without anything that a server would have to keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from offload.errors import UsageError
from triforce_cli.apis.api import (
    PLACE,
    ApiError,
    CallPiece,
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
    joined,
    object_of,
    without,
)
from triforce_cli.apis.chat_fields import IGNORED, check_same, format_constraint
from triforce_cli.apis.openai_style import OpenAiApi, logprob
from triforce_cli.apis.response_input import messages_of, tools_of
from triforce_cli.prompts.messages import Note

_SAME = {
    "store": False, "background": False, "cite": False, "truncation": "disabled",
    "previous_response_id": None, "conversation": None, "prompt": None, "messages": None,
}  # fmt: skip
_OF_WRITING = ("stream", "include", "client_metadata", "max_tool_calls")
_READ = ("instructions", "input", "tools", "text", "reasoning", "max_output_tokens", "top_logprobs")
_LOGPROBS = "message.output_text.logprobs"  # in `include`


class Responses(OpenAiApi):
    """The API; see `Api`."""

    path = "/v1/responses"
    names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "messages": "input",
        "response_format": "text.format",
    }  # fmt: skip

    def fields(self, body: Mapping[str, Any], note: Note) -> Fields:
        for name in ("stream", "parallel_tool_calls"):
            flag(body, name)
        offers = body.get("tool_choice") != "none"
        for name, value in _SAME.items():
            check_same(body, name, value, PLACE)
        tools = tools_of(body, note) if offers else []
        limit, logprobs = body.get("max_output_tokens"), _logprobs(body)
        return joined(
            PLACE,
            {"messages": messages_of(body, note)},
            {"tools": tools} if tools else {},
            {} if limit is None else {"max_tokens": limit},
            {} if logprobs is None else {"logprobs": logprobs},
            _format(body),
            _effort(body),
            without(body, *_OF_WRITING, *_READ, *_SAME, *IGNORED),
        )

    def reply(self, body: Mapping[str, Any], model: str) -> ResponseReply:
        return ResponseReply(Head(identifier("resp_"), model), body)


def _logprobs(body: Mapping[str, Any]) -> Any:
    include = body.get("include")
    if not isinstance(include, list | None):
        raise UsageError(f"{PLACE}: include is no list of texts")
    if _LOGPROBS not in (include or ()):
        return None
    return 0 if (top := body.get("top_logprobs")) is None else top


def _format(body: Mapping[str, Any]) -> Fields:
    """The constraint of `text.format`."""
    wanted = object_of(body, "text", "format", "verbosity").get("format")
    return format_constraint(wanted, PLACE)


def _effort(body: Mapping[str, Any]) -> Fields:
    effort = object_of(body, "reasoning", "effort", "summary", "generate_summary").get("effort")
    return {} if effort is None else {"template_args": {"reasoning_effort": effort}}


class ResponseReply:
    """A response; see `Reply`. Its output is a list of items: reasoning, a message, tool calls."""

    def __init__(self, head: Head, body: Mapping[str, Any]) -> None:
        self._head, self._body = head, body
        self._number = 0  # of the next event
        self._output: list[dict[str, Any]] = []  # items that have ended
        self._open: _Item | None = None
        self._call: dict[str, Any] | None = None  # that is open, with its arguments so far

    def begin(self, usage: Usage) -> Iterator[Event]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._object("in_progress"))

    def keep_alive(self) -> Iterator[Event]:
        yield self._event("response.in_progress", response=self._object("in_progress", output=self._output))

    def reading(self, reading: Reading) -> Iterator[Event]:
        yield from ()

    def add(self, said: Said) -> Iterator[Event]:
        if said.thoughts:
            yield from self._more("reasoning", said.thoughts, ())
        if said.text or said.scores:
            yield from self._more("message", said.text, said.scores)
        for piece in said.calls:
            yield from self._called(piece)

    def end(self, ended: Ended) -> Iterator[Event]:
        yield from self._close()
        if not self._output:
            yield from self._more("message", "", ())
            yield from self._close()
        status, more = _status(ended)
        whole = self._object(status, output=self._output, usage=_usage(ended.usage), **more)
        yield self._event(f"response.{status}", response=whole)

    def close(self, ended: Sequence[Ended]) -> Iterator[Event]:
        yield from ()

    def fail(self, error: ApiError) -> Iterator[Event]:
        said = {"code": error.code or "server_error", "message": str(error)}
        yield self._event("response.failed", response=self._object("failed", output=self._output, error=said))

    def document(self, ended: Sequence[Ended]) -> dict[str, Any]:
        (only,) = ended
        items = [_Item("reasoning", only.thoughts).as_dict()] if only.thoughts else []
        if only.text or only.scores or not (only.calls or only.thoughts):
            items.append(_Item("message", only.text, [*map(logprob, only.scores)]).as_dict())
        status, more = _status(only)
        items += [_call(call) for call in only.calls]
        return self._object(status, output=items, usage=_usage(only.usage), **more)

    def _more(self, kind: str, text: str, scores: Any) -> Iterator[Event]:
        """More of an item; the open one is closed if it is of another kind."""
        if self._open is not None and self._open.kind != kind:
            yield from self._close()
        if self._open is None:
            self._open = _Item(kind)
            yield self._event("response.output_item.added", item=self._open.begun(), **self._place)
            yield self._event("response.content_part.added", part=_part(kind, ""), **self._part_place(self._open))
        item, logprobs = self._open, [logprob(score) for score in scores]
        item.text += text
        item.logprobs += logprobs
        scored = {"logprobs": logprobs} if kind == "message" else {}
        yield self._event(f"response.{item.part}.delta", delta=text, **scored, **self._part_place(item))

    def _close(self) -> Iterator[Event]:
        """The end of the open item."""
        if (call := self._call) is not None:
            about, arguments = {"item_id": call["id"], **self._place}, call["arguments"]
            yield self._event("response.function_call_arguments.done", arguments=arguments, name=call["name"], **about)
            yield self._event("response.output_item.done", item=call, **self._place)
            self._output.append(call)
            self._call = None
        if (item := self._open) is None:
            return
        place, scored = self._part_place(item), {"logprobs": item.logprobs} if item.kind == "message" else {}
        yield self._event(f"response.{item.part}.done", text=item.text, **scored, **place)
        yield self._event("response.content_part.done", part=_part(item.kind, item.text), **place)
        yield self._event("response.output_item.done", item=item.as_dict(), **self._place)
        self._output.append(item.as_dict())
        self._open = None

    def _called(self, piece: CallPiece) -> Iterator[Event]:
        """More of a tool call; the open item is closed if it begins."""
        if piece.begins:
            yield from self._close()
            self._call = _call(ToolCall(piece.id, piece.name, ""))
            yield self._event("response.output_item.added", item=self._call | {"status": "in_progress"}, **self._place)
        call = self._call
        assert call is not None
        call["arguments"] += piece.arguments
        place = {"item_id": call["id"], **self._place}
        yield self._event("response.function_call_arguments.delta", delta=piece.arguments, **place)

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output)}

    def _part_place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "content_index": 0, **self._place}

    def _event(self, name: str, /, **data: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return Event({"type": name, "sequence_number": number, **data}, name)

    def _object(self, status: str, *, output: Any = (), **more: Any) -> dict[str, Any]:
        asked = ("instructions", "max_output_tokens", "temperature", "top_p", "reasoning")
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **{name: self._body.get(name) for name in asked},
            "text": self._body.get("text") or {"format": {"type": "text"}},
            "tools": self._body.get("tools") or [],
            "tool_choice": self._body.get("tool_choice") or "auto",
            "parallel_tool_calls": flag(self._body, "parallel_tool_calls", default=True),
            "metadata": self._body.get("metadata") or {},
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "output": list(output),
            "usage": None,
            **more,
        }


class _Item:
    """An item of a response's output with one part. kind: reasoning or message. part: the part in names of events."""

    def __init__(self, kind: str, text: str = "", logprobs: list[dict[str, Any]] | None = None) -> None:
        self.kind, self.text, self.logprobs = kind, text, logprobs or []
        self.id = identifier("rs_" if kind == "reasoning" else "msg_")
        self.part = "reasoning_text" if kind == "reasoning" else "output_text"

    def begun(self) -> dict[str, Any]:
        return {**self._head, "status": "in_progress", "content": []}

    def as_dict(self) -> dict[str, Any]:
        part = _part(self.kind, self.text) | ({"logprobs": self.logprobs} if self.kind == "message" else {})
        return {**self._head, "status": "completed", "content": [part]}

    @property
    def _head(self) -> dict[str, Any]:
        more: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {"id": self.id, "type": self.kind, **more}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": identifier("fc_"), "type": "function_call", "call_id": call.id, "name": call.name,
        "arguments": call.arguments, "status": "completed",
    }  # fmt: skip


def _status(ended: Ended) -> tuple[str, dict[str, Any]]:
    """(status, fields that explain it)."""
    if ended.finish == "stop":
        return "completed", {}
    return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached},
        "output_tokens": used.answer,
        "output_tokens_details": {"reasoning_tokens": used.thoughts},
        "total_tokens": used.prompt + used.answer,
    }
