"""OpenAI's chat completions: POST /v1/chat/completions."""

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
    without,
)
from triforce_cli.apis.chat_fields import chat_fields
from triforce_cli.apis.openai_style import Chunks, OpenAiApi, error_body, includes_usage, logprob
from triforce_cli.prompts.messages import Note


class ChatCompletions(OpenAiApi):
    """The API; see `Api`."""

    path = "/v1/chat/completions"
    names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_completion_tokens", "logprobs": "top_logprobs", "template_args": "chat_template_kwargs",
    }  # fmt: skip

    def fields(self, body: Mapping[str, Any], note: Note) -> Fields:
        flag(body, "stream")
        flag(body, "parallel_tool_calls")
        flag(body, "return_progress")
        includes_usage(body)
        if body.get("messages") is None:
            raise UsageError(f"{PLACE} has no messages")
        return chat_fields(without(body, "stream", "n", "return_progress"), PLACE, note)

    def reply(self, body: Mapping[str, Any], model: str) -> ChatReply:
        head = Head(identifier("chatcmpl-"), model)
        kinds, num = ("chat.completion", "chat.completion.chunk"), self.num_choices(body)
        return ChatReply(Chunks(head, *kinds, includes_usage(body), flag(body, "return_progress"), num, num))


class ChatReply:
    """A chat completion; see `Reply`."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def begin(self, usage: Usage) -> Iterator[Event]:
        for number in range(self._chunks.num_choices):
            yield self._chunks.chunk(number, _choice({"role": "assistant", "content": ""}))

    def keep_alive(self) -> Iterator[Event]:
        yield self._chunks.chunk(0, _choice({}))

    def reading(self, reading: Reading) -> Iterator[Event]:
        return self._chunks.reading(_choice({}), reading)

    def add(self, said: Said) -> Iterator[Event]:
        delta = {"reasoning_content": said.thoughts, "content": said.text}
        if said.text or said.thoughts or said.scores:
            some = {name: text for name, text in delta.items() if text}
            yield self._chunks.chunk(said.choice, _choice(some, _logprobs(said.scores)))
        if said.calls:
            yield self._chunks.chunk(said.choice, _choice({"tool_calls": [*map(_piece, said.calls)]}))

    def end(self, ended: Ended) -> Iterator[Event]:
        yield self._chunks.end_choice(_choice({}, finish=_finish(ended)), ended)

    def close(self, ended: Sequence[Ended]) -> Iterator[Event]:
        return self._chunks.close(ended)

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield Event(error_body(error))

    def document(self, ended: Sequence[Ended]) -> dict[str, Any]:
        return self._chunks.whole(map(_whole, ended), ended)


def _choice(delta: Mapping[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _whole(ended: Ended) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ended.text or (None if ended.calls else "")}
    if ended.thoughts:
        message["reasoning_content"] = ended.thoughts
    if ended.calls:
        message["tool_calls"] = [_call(call) for call in ended.calls]
    return {"message": message, "logprobs": _logprobs(ended.scores), "finish_reason": _finish(ended)}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _piece(piece: CallPiece) -> dict[str, Any]:
    call = _call(ToolCall(piece.id, piece.name, piece.arguments)) if piece.begins else {}
    return {"index": piece.number, "function": {"arguments": piece.arguments}, **call}


def _finish(ended: Ended) -> str:
    return "tool_calls" if ended.calls and ended.finish == "stop" else ended.finish


def _logprobs(scores: Any) -> dict[str, Any] | None:
    return {"content": [logprob(score) for score in scores], "refusal": None} if scores else None
