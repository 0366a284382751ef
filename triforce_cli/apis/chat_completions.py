"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.errors import UsageError
from triforce_cli.apis import openai_style
from triforce_cli.apis.api import PLACE, ApiError, Ended, Event, Fields, Head, Said, ToolCall, Usage, flag, identifier
from triforce_cli.apis.api import without as _without
from triforce_cli.apis.chat_fields import chat_fields

DONE = Event("[DONE]")


class ChatCompletions:
    """The API; see `Api`."""

    path = "/v1/chat/completions"

    def fields(self, body: Mapping[str, Any]) -> Fields:
        flag(body, "stream")
        flag(body, "parallel_tool_calls")
        includes_usage(body)
        if body.get("messages") is None:
            raise UsageError(f"{PLACE} has no messages")
        return chat_fields(_without(body, "stream", "parallel_tool_calls"), PLACE)

    def has_one_call(self, body: Mapping[str, Any]) -> bool:
        return not flag(body, "parallel_tool_calls", default=True)

    def reply(self, body: Mapping[str, Any], model: str) -> ChatReply:
        return ChatReply(Head(identifier("chatcmpl-"), model), includes_usage=includes_usage(body))

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_style.error(error)


def includes_usage(body: Mapping[str, Any]) -> bool:
    """Whether the last event of a stream is to have the usage. Raises UsageError."""
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise UsageError(f'{PLACE}: stream_options are an object such as {{"include_usage": true}}')
    return flag(options or {}, "include_usage")


class ChatReply:
    """A chat completion; see `Reply`."""

    def __init__(self, head: Head, *, includes_usage: bool) -> None:
        self._head, self._includes_usage = head, includes_usage

    def begin(self, usage: Usage) -> Iterator[Event]:
        yield self._chunk({"role": "assistant", "content": ""})

    def add(self, said: Said) -> Iterator[Event]:
        delta = {"reasoning_content": said.thoughts, "content": said.text}
        if said.text or said.thoughts or said.scores:
            yield self._chunk({name: text for name, text in delta.items() if text}, logprobs=_logprobs(said.scores))

    def end(self, ended: Ended) -> Iterator[Event]:
        if ended.calls:
            yield self._chunk({"tool_calls": [{"index": i} | _call(call) for i, call in enumerate(ended.calls)]})
        yield self._chunk({}, finish=_finish(ended))
        if self._includes_usage:
            yield Event(self._object("chat.completion.chunk", [], usage=openai_style.usage(ended.usage)))
        yield DONE

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield Event(openai_style.error(error))

    def document(self, ended: Ended) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ended.text or (None if ended.calls else "")}
        if ended.thoughts:
            message["reasoning_content"] = ended.thoughts
        if ended.calls:
            message["tool_calls"] = [_call(call) for call in ended.calls]
        choice = {
            "index": 0, "message": message, "logprobs": _logprobs(ended.scores), "finish_reason": _finish(ended),
        }  # fmt: skip
        return self._object("chat.completion", [choice], usage=openai_style.usage(ended.usage))

    def _chunk(self, delta: Mapping[str, Any], *, logprobs: Any = None, finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._includes_usage else {}
        return Event(self._object("chat.completion.chunk", [choice], **usage))

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices, **more}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(ended: Ended) -> str:
    return "tool_calls" if ended.calls and ended.finish == "stop" else ended.finish


def _logprobs(scores: Any) -> dict[str, Any] | None:
    return {"content": [openai_style.logprob(score) for score in scores], "refusal": None} if scores else None
