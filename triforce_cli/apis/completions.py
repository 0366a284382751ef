"""OpenAI's older completions of a text: POST /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

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
    Score,
    Usage,
    flag,
    identifier,
    without,
)
from triforce_cli.apis.chat_fields import IGNORED, check_same
from triforce_cli.apis.openai_style import Chunks, OpenAiApi, bytes_of, error_body, includes_usage
from triforce_cli.prompts.messages import Note

MAX_TOKENS = 16  # the API's default
_SAME = {"n": 1, "best_of": 1, "suffix": ""}
_OF_WRITING = ("stream", "echo", "prompt", "return_progress")


class Completions(OpenAiApi):
    """The API; see `Api`."""

    path = "/v1/completions"
    names: ClassVar[Mapping[str, str]] = {}

    def fields(self, body: Mapping[str, Any], note: Note) -> Fields:
        for name, value in _SAME.items():
            check_same(body, name, value, PLACE)
        for name in ("stream", "echo", "return_progress"):
            flag(body, name)
        includes_usage(body)
        if flag(body, "echo") and body.get("logprobs") is not None:
            raise UsageError(
                f"{PLACE}: echo and logprobs are not answered together: only tokens of the answer have scores; leave "
                "echo out, or score the text by triforce score"
            )
        return {"max_tokens": MAX_TOKENS, "prompt": _prompt(body), **without(body, *_OF_WRITING, *_SAME, *IGNORED)}

    def reply(self, body: Mapping[str, Any], model: str) -> CompletionReply:
        echo = _prompt(body) if flag(body, "echo") else ""
        kind = "text_completion"
        head, returns_progress = Head(identifier("cmpl-"), model), flag(body, "return_progress")
        return CompletionReply(Chunks(head, kind, kind, includes_usage(body), returns_progress), echo)


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise UsageError(f"{PLACE}: prompt is {json.dumps(prompt)[:80]}, it must be one text; tokens cannot be read")
    return prompt


class CompletionReply:
    """A completion; see `Reply`. echo: the text that it begins with."""

    def __init__(self, chunks: Chunks, echo: str) -> None:
        self._chunks, self._echo = chunks, echo
        self._num_characters = len(echo)

    def begin(self, usage: Usage) -> Iterator[Event]:
        if self._echo:
            yield self._chunk(self._echo)

    def keep_alive(self) -> Iterator[Event]:
        yield self._chunk("")

    def reading(self, reading: Reading) -> Iterator[Event]:
        return self._chunks.reading({"text": "", "logprobs": None, "finish_reason": None}, reading)

    def add(self, said: Said) -> Iterator[Event]:
        if said.text or said.scores:
            yield self._chunk(said.text, logprobs=_logprobs(said.scores, self._num_characters))
            self._num_characters += sum(len(score["text"]) for score in said.scores)

    def end(self, ended: Ended) -> Iterator[Event]:
        yield self._chunk("", finish=ended.finish, **self._chunks.more(ended))
        yield from self._chunks.end(ended)

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield Event(error_body(error))

    def document(self, ended: Ended) -> dict[str, Any]:
        choice = {
            "text": self._echo + ended.text,
            "logprobs": _logprobs(ended.scores, len(self._echo)),
            "finish_reason": ended.finish,
        }
        return self._chunks.whole(choice, ended)

    def _chunk(self, text: str, *, logprobs: Any = None, finish: str | None = None, **more: Any) -> Event:
        return self._chunks.chunk({"text": text, "logprobs": logprobs, "finish_reason": finish}, **more)


def _logprobs(scores: Sequence[Score], start: int) -> dict[str, Any] | None:
    """The scores in the older form. start: the character of the text at which the first token begins."""
    if not scores:
        return None
    lengths = [len(score["text"]) for score in scores]
    return {
        "tokens": [*map(_name, scores)],
        "token_logprobs": [score["logprob"] for score in scores],
        "top_logprobs": [{_name(each): each["logprob"] for each in score["top"]} for score in scores],
        "text_offset": list(accumulate(lengths[:-1], initial=start)),
    }


def _name(score: Mapping[str, Any]) -> str:
    """The text of a scored token, by which this form tells tokens apart; the bytes of one that is a part of a
    character."""
    text: str = score["text"]
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in bytes_of(score)) if "bytes" in score else text
