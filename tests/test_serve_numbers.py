"""Numbers in requests: a field of each API is followed, or refused by its name, whatever number it is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload.config.reading import read_config
from offload.decode.sampling import SETTINGS, SamplingParams
from offload.text.tokenizer import Tokenizer
from triforce_cli.answering.request import Wanted
from triforce_cli.apis.api import ApiError
from triforce_cli.apis.messages import Messages
from triforce_cli.apis.table import api_of
from triforce_cli.batch.prompts import Prompts
from triforce_cli.options.answering import Layout
from triforce_cli.serve import reader
from triforce_cli.serve.reader import Reader, parsed

DEMO = Path(__file__).parents[1] / "triforce_cli" / "models" / "demo-target"
CHAT, TEXT, RESPONSES, MESSAGES, COUNT = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip
SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "logprobs": True}, TEXT: {"prompt": "hi"}, MESSAGES: {"messages": SAID, "max_tokens": 9},
    RESPONSES: {"input": "hi", "include": ["message.output_text.logprobs"]}, COUNT: {"messages": SAID},
}  # fmt: skip
WHOLE = [name for name, row in SETTINGS.items() if row.kind in (int, int | None)]
REAL = [name for name, row in SETTINGS.items() if row.kind is float]
INTEGERS = {
    CHAT: ("max_tokens", "max_completion_tokens", "n", "top_logprobs", "thinking_tokens", *WHOLE),
    TEXT: ("max_tokens", "n", "best_of", "logprobs", *WHOLE), RESPONSES: ("max_output_tokens", "top_logprobs", *WHOLE),
    MESSAGES: ("max_tokens", "top_k", "thinking.budget_tokens"), COUNT: ("thinking.budget_tokens",),
}  # fmt: skip
FLOATS = {
    CHAT: ("timeout", "logit_bias", *REAL), TEXT: ("timeout", *REAL), RESPONSES: ("timeout", *REAL),
    MESSAGES: ("temperature", "top_p"), COUNT: (),
}  # fmt: skip
NONE = ("true", "false", '"5"', "[]", "{}", "[1]", "1" + "0" * 400, "-1" + "0" * 400)  # numbers for no field
OFTEN = (
    *("-1", "0", "1", "-0", "2147483648", "-9223372036854775809", "18446744073709551616"),
    *("1e300", "-1e300", "1e-300"),
)


@pytest.fixture(scope="module")
def read() -> Reader:
    tokenizer = Tokenizer.from_folder(DEMO)
    request = SimpleNamespace(target=read_config(DEMO))
    prepared = SimpleNamespace(tokenizer=tokenizer, prompt_tokenizer=tokenizer, request=request)
    prompts = Prompts(prepared, Layout("chatml", {}))  # type: ignore[arg-type]
    return Reader(prompts, Wanted(max_tokens=9, sampling=SamplingParams()), most_choices=9, context=4096)


def refusal(read: Reader, path: str, name: str, value: str) -> str:
    """The message of a request with this field; "" if it is followed."""
    outer = name.partition(".")[0]
    said = f'{{"type": "enabled", "budget_tokens": {value}}}' if outer == "thinking" else value
    body = {each: given for each, given in BODIES[path].items() if each != outer}
    text = f'{json.dumps(body)[:-1]}, "{outer}": {said}}}'
    return refused(read, path, text)


def refused(read: Reader, path: str, body: str) -> str:
    """The message of a refusal for what the request says; "" if it is followed."""
    try:
        given = parsed(body.encode())
        read.num_tokens(Messages(), given) if path == COUNT else read.read(api_of(path), given)
    except ApiError as error:
        return str(error) if error.status == 400 else f"status {error.status}"
    return ""


@pytest.mark.parametrize("path", INTEGERS)
def test_what_is_no_whole_number_is_refused_by_the_fields_name(read: Reader, path: str) -> None:
    """A whole number of more bits ended the server: min_tokens, dry_allowed_length. Names were those of options, or
    ours."""
    for name in INTEGERS[path]:
        for value in (*NONE, "1.5", "1e300", "5.0", "9223372036854775808", "18446744073709551616"):
            assert f" {name} " in refusal(read, path, name, value), (path, name, value[:20])


@pytest.mark.parametrize("path", FLOATS)
def test_what_is_no_number_is_refused_by_the_fields_name(read: Reader, path: str) -> None:
    for name in FLOATS[path]:
        for value in NONE:
            if (name, value) != ("logit_bias", "{}"):
                assert f" {name} " in refusal(read, path, name, value), (path, name, value[:20])


@pytest.mark.parametrize("path", INTEGERS)
def test_other_numbers_are_followed_or_refused_by_the_fields_name(read: Reader, path: str) -> None:
    for name in (*INTEGERS[path], *FLOATS[path]):
        said = {value: refusal(read, path, name, value) for value in OFTEN}
        assert all(not each or f" {name} " in each for each in said.values()), (path, name, said)
        assert (not said["1"]) is (name != "logit_bias"), (path, name, said["1"])


def test_names_of_tokens_are_numbers_of_tokens(read: Reader) -> None:
    """A number of over 4,300 digits was an error of the server."""
    for name in ("-1", "99999999", "9" * 25, "9" * 5000, "\u00b2", "1.5"):
        assert "logit_bias" in refused(read, CHAT, json.dumps({"messages": SAID, "logit_bias": {name: 1}})), name[:20]


def test_scores_of_an_answer_are_bounded(read: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long answer took gigabytes."""
    monkeypatch.setattr(reader, "MOST_SCORES", 1000)
    bodies = {
        CHAT: {"messages": SAID, "logprobs": True, "top_logprobs": 9}, TEXT: {"prompt": "hi", "logprobs": 9},
        RESPONSES: BODIES[RESPONSES] | {"top_logprobs": 9},
    }  # fmt: skip
    for path, body in bodies.items():
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        said = {count: refused(read, path, json.dumps(body | {limit: count})) for count in (100, 101, 1 << 20)}
        assert (said[100], "101 tokens, 10 each, are 1,010" in said[101]) == ("", True), path
        assert "1,000 is the limit, so max_tokens can be 100" in said[1 << 20], path  # the context is shorter
    assert not refused(read, CHAT, json.dumps({"messages": SAID, "max_tokens": 1 << 20}))


def test_scores_are_counted_up_to_the_end_of_the_context(read: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer ends, whatever max_tokens is; tokens of the prompt have none."""
    room = 4096 - read.num_tokens(Messages(), {"messages": SAID})
    body = json.dumps({"messages": SAID, "logprobs": True, "top_logprobs": 9, "max_tokens": 1 << 20})
    monkeypatch.setattr(reader, "MOST_SCORES", 10 * room)
    assert not refused(read, CHAT, body)
    monkeypatch.setattr(reader, "MOST_SCORES", 10 * room - 1)
    assert f"log-probabilities of {room:,} tokens, 10 each" in refused(read, CHAT, body)
