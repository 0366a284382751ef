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
_SAME = {"suffix": ""}
_OF_WRITING = ("stream", "echo", "prompt", "n", "best_of", "return_progress")


class Completions(OpenAiApi):
    """The API; see `Api`."""

    path = "/v1/completions"
    names: ClassVar[Mapping[str, str]] = {}

    def fields(self, body: Mapping[str, Any], note: Note) -> Fields:
        for name, value in _SAME.items():
            check_same(body, name, value, PLACE)
        check_same(body, "best_of", self.num_choices(body), PLACE)
        for name in ("stream", "echo", "return_progress"):
            flag(body, name)
        includes_usage(body)
        if flag(body, "echo") and body.get("logprobs") is not None:
            raise UsageError(
                f"{PLACE}: echo and logprobs are not answered together: only tokens of the answer have scores; leave "
                "echo out, or score the text by triforce score"
            )
        prompts = _prompts(body)
        prompt = prompts if len(prompts) > 1 else prompts[0]
        return {"max_tokens": MAX_TOKENS, "prompt": prompt, **without(body, *_OF_WRITING, *_SAME, *IGNORED)}

    def reply(self, body: Mapping[str, Any], model: str) -> CompletionReply:
        prompts, num = _prompts(body), self.num_choices(body)
        echoes = [prompt if flag(body, "echo") else "" for prompt in prompts for _ in range(num)]
        kind, head = "text_completion", Head(identifier("cmpl-"), model)
        chunks = Chunks(head, kind, kind, includes_usage(body), flag(body, "return_progress"), len(echoes), num)
        return CompletionReply(chunks, echoes)


def _prompts(body: Mapping[str, Any]) -> list[str]:
    prompt: Any = body.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) and prompt else [prompt]
    if not all(isinstance(each, str) for each in prompts):
        said = json.dumps(prompt)[:80]
        raise UsageError(f"{PLACE}: prompt is {said}, it must be a text or a list of texts; tokens cannot be read")
    return prompts


class CompletionReply:
    """A completion; see `Reply`. echoes: the text that each choice begins with."""

    def __init__(self, chunks: Chunks, echoes: Sequence[str]) -> None:
        self._chunks, self._echoes = chunks, echoes
        self._num_characters = [*map(len, echoes)]

    def begin(self, usage: Usage) -> Iterator[Event]:
        for number, echo in enumerate(self._echoes):
            if echo:
                yield self._chunks.chunk(number, _choice(echo))

    def keep_alive(self) -> Iterator[Event]:
        yield self._chunks.chunk(0, _choice(""))

    def reading(self, reading: Reading) -> Iterator[Event]:
        return self._chunks.reading(_choice(""), reading)

    def add(self, said: Said) -> Iterator[Event]:
        if said.text or said.scores:
            start = self._num_characters[said.choice]
            yield self._chunks.chunk(said.choice, _choice(said.text, _logprobs(said.scores, start)))
            self._num_characters[said.choice] += sum(len(score["text"]) for score in said.scores)

    def end(self, ended: Ended) -> Iterator[Event]:
        yield self._chunks.end_choice(_choice("", finish=ended.finish), ended)

    def close(self, ended: Sequence[Ended]) -> Iterator[Event]:
        return self._chunks.close(ended)

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield Event(error_body(error))

    def document(self, ended: Sequence[Ended]) -> dict[str, Any]:
        choices = [
            _choice(echo + each.text, _logprobs(each.scores, len(echo)), each.finish)
            for echo, each in zip(self._echoes, ended, strict=True)
        ]
        return self._chunks.whole(choices, ended)


def _choice(text: str, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"text": text, "logprobs": logprobs, "finish_reason": finish}


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
