"""Parts that OpenAI's APIs share: errors, completions in chunks, usage, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.errors import UsageError
from offload.fields import checked, whole
from triforce_cli.apis.api import PLACE, ApiError, Ended, Event, Head, Reading, Score, Usage, flag

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
}  # fmt: skip


class OpenAiApi:
    """The part of an API that OpenAI's have in common; see `Api`."""

    def error(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def num_choices(self, body: Mapping[str, Any]) -> int:
        return 1 if body.get("n") is None else checked(body["n"], f"{PLACE}: n", whole(1), UsageError)


@dataclass(frozen=True)
class Chunks:
    """The objects of a completion, whole or in chunks. kind, chunk_kind: their names. includes_usage: the last chunk is
    to have the usage. returns_progress: chunks are to tell how far the prompt is read, as llama.cpp's do. num_choices:
    in all; num_of_prompt: those of each prompt."""

    head: Head
    kind: str
    chunk_kind: str
    includes_usage: bool
    returns_progress: bool = False
    num_choices: int = 1
    num_of_prompt: int = 1

    def chunk(self, number: int, choice: Mapping[str, Any], **more: Any) -> Event:
        """A chunk of a choice."""
        usage = {"usage": None} if self.includes_usage else {}
        return Event(self._object(self.chunk_kind, [{"index": number, **choice}], **usage, **more))

    def reading(self, choice: Mapping[str, Any], reading: Reading) -> Iterator[Event]:
        """The event on a prompt that is read, if it is wanted. choice: an empty one."""
        if self.returns_progress:
            counts = {"total": reading.total, "cache": reading.cached, "processed": reading.read}
            progress = {**counts, "time_ms": round(1000 * reading.seconds)}
            yield self.chunk(reading.choice, choice, prompt_progress=progress)

    def end_choice(self, choice: Mapping[str, Any], ended: Ended) -> Event:
        """The last chunk of a choice. Further fields of an only choice are beside it, in the last chunk with data."""
        beside = {} if self.includes_usage else self._beside([ended])
        return self.chunk(ended.choice, {**choice, **self._inside(ended)}, **beside)

    def close(self, ended: Sequence[Ended]) -> Iterator[Event]:
        """The events after the last choice."""
        if self.includes_usage:
            yield Event(self._object(self.chunk_kind, [], usage=self._usage(ended), **self._beside(ended)))
        yield Event("[DONE]")

    def whole(self, choices: Iterable[Mapping[str, Any]], ended: Sequence[Ended]) -> dict[str, Any]:
        numbered = [
            {"index": each.choice, **choice, **self._inside(each)} for choice, each in zip(choices, ended, strict=True)
        ]
        return self._object(self.kind, numbered, usage=self._usage(ended), **self._beside(ended))

    def _inside(self, ended: Ended) -> Mapping[str, Any]:
        return ended.more if self.num_choices > 1 else {}

    def _beside(self, ended: Sequence[Ended]) -> Mapping[str, Any]:
        return {} if self.num_choices > 1 else ended[0].more

    def _usage(self, ended: Sequence[Ended]) -> dict[str, Any]:
        """The usage of all choices. A prompt counts once."""
        prompts, answers = ([each.usage for each in some] for some in (ended[:: self.num_of_prompt], ended))
        return usage(
            Usage(
                sum(each.prompt for each in prompts),
                sum(each.cached for each in prompts),
                sum(each.answer for each in answers),
                sum(each.thoughts for each in answers),
            )
        )

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        head = self.head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices, **more}


def includes_usage(body: Mapping[str, Any]) -> bool:
    """Whether the last event of a stream is to have the usage. Raises UsageError."""
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise UsageError(f'{PLACE}: stream_options are an object such as {{"include_usage": true}}')
    return flag(options or {}, "include_usage")


def error_body(failed: ApiError) -> dict[str, Any]:
    """The body of an error's response."""
    kind = _TYPES.get(failed.status, "invalid_request_error" if failed.status < 500 else "server_error")
    return {"error": {"message": str(failed), "type": kind, "param": None, "code": failed.code or None}}


def usage(used: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.answer,
        "total_tokens": used.prompt + used.answer,
        "prompt_tokens_details": {"cached_tokens": used.cached},
        "completion_tokens_details": {"reasoning_tokens": used.thoughts},
    }


def logprob(score: Score) -> dict[str, Any]:
    """A token's score with those of the likeliest ones in its place."""
    return _one(score) | {"top_logprobs": [_one(each) for each in score["top"]]}


def _one(score: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": score["text"], "logprob": score["logprob"], "bytes": bytes_of(score)}


def bytes_of(score: Mapping[str, Any]) -> list[int]:
    """The bytes of a scored token, which may be a part of a character."""
    found: list[int] = score["bytes"] if "bytes" in score else list(score["text"].encode())
    return found
