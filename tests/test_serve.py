"""The running server, on a stand-in for the model: queue, clients that go away, hostile requests, ends."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from kit.api_clients import CLIENTS, parse, without_names
from kit.served import (
    CHAT,
    WANTED,
    Client,
    Server,
    busy,
    raw,
    received,
    received_until,
    request,
    until,
)
from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError, UsageError
from offload.metrics import Stats
from offload.progress import Progress
from test_cli_fake import Step
from triforce_cli.answering.answer import Part
from triforce_cli.apis.api import ApiError, Event
from triforce_cli.apis.table import api_of
from triforce_cli.batch.prompts import Prompts
from triforce_cli.batch.records import Record
from triforce_cli.options.answering import Layout
from triforce_cli.serve import app, guard, http, load, replies, scheduler
from triforce_cli.serve.http import listening_socket
from triforce_cli.serve.job import Finish, Job
from triforce_cli.serve.spoken import Spoken
from triforce_cli.tools.calls import Calls

T = TypeVar("T")

TEXT, RESPONSES, MESSAGES, COUNT = (
    "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(batch=2) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    yield server.client
    assert server.error is None
    assert server.num_waiting == 0
    assert server.client.chat("still there").said == "still there"


# Answers


def test_every_api_answers_whole_and_as_a_stream(client: Client) -> None:
    messages = [{"role": "user", "content": "<think>hm so</think> It rains"}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages, "stream_options": {"include_usage": True}},
        TEXT: {"prompt": "It rains", "stream_options": {"include_usage": True}},
        RESPONSES: {"input": messages},
        MESSAGES: {"messages": messages, "max_tokens": 100},
    }
    for path, body in bodies.items():
        client.ask(path, body)  # so that the same is cached below
        wholes = [client.ask(path, body | {"stream": stream}) for stream in (False, True)]
        assert [whole.status for whole in wholes] == [200, 200]
        assert wholes[1].headers["content-type"].startswith("text/event-stream")
        assert [wholes[1].headers[name] for name in ("cache-control", "x-accel-buffering")] == ["no-cache", "no"]
        told = CLIENTS[path](wholes[1].events)
        said = [_said_by(path, whole) for whole in (wholes[0].body, told)]
        assert said == [("It rains", "" if path == TEXT else "hm so")] * 2
        told, whole = (without_names(each) for each in (told, wholes[0].body))
        for usage in (told["usage"], whole["usage"]):
            usage.pop("prompt_tokens_details", None), usage.pop("input_tokens_details", None)
            usage.pop("cache_read_input_tokens", None), usage.pop("input_tokens", None)
        assert told == whole


def _said_by(path: str, whole: Any) -> tuple[str, str]:
    """(text, thoughts)."""
    if path == CHAT:
        message = whole["choices"][0]["message"]
        return message["content"], message.get("reasoning_content", "")
    if path == TEXT:
        return whole["choices"][0]["text"], ""
    if path == RESPONSES:
        texts = {item["type"]: item["content"][0]["text"] for item in whole["output"] if "content" in item}
        return texts["message"], texts.get("reasoning", "")
    texts = {block["type"]: block[block["type"]] for block in whole["content"] if block["type"] in block}
    return texts["text"], texts.get("thinking", "")


def test_usage_counts_prompt_answer_and_thoughts(client: Client) -> None:
    usage = client.chat("<think>hm</think> It rains").body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (26, 26, 52)
    assert client.chat("a b", max_tokens=1000).body["usage"]["completion_tokens"] == 3


def test_cached_tokens_grow_when_a_prompt_is_repeated(client: Client) -> None:
    cached = [client.chat("once again").body["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(3)]
    assert cached == [0, 1, 2]
    message = client.ask(MESSAGES, request("once again", max_tokens=9)).body["usage"]
    assert (message["input_tokens"], message["cache_read_input_tokens"]) == (10 - 3, 3)


def test_tool_calls_are_taken_out_of_the_text(client: Client) -> None:
    for stream in (False, True):
        answer = client.chat(f"I ask. {CALL} {CALL}", tools=[TOOL], stream=stream)
        whole = CLIENTS[CHAT](answer.events) if stream else answer.body
        choice = whole["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I ask. ")
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": "{}"}] * 2
        one = client.chat(f"{CALL} {CALL}", tools=[TOOL], stream=stream, parallel_tool_calls=False)
        whole = CLIENTS[CHAT](one.events) if stream else one.body
        assert len(whole["choices"][0]["message"]["tool_calls"]) == 1
    block = {"name": "f", "input_schema": {"type": "object"}}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = client.ask(MESSAGES, request(f"{CALL} {CALL}", max_tokens=99, tools=[block], tool_choice=choice))
    assert [each["type"] for each in one.body["content"]] == ["tool_use"]
    assert one.body["stop_reason"] == "tool_use"
    assert client.chat(f"I ask. {CALL}").said == f"I ask. {CALL}"  # no tools were offered


@pytest.mark.parametrize("stream", [False, True])
def test_channels_are_thoughts_text_and_calls_in_every_api(client: Client, stream: bool) -> None:
    thoughts = "<|channel|>analysis<|message|>hm so<|end|><|start|>assistant"
    answer = f"{thoughts}<|channel|>final<|message|>It rains"
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    preamble = "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant"
    function = {"name": "f", "input_schema": {"type": "object"}}
    for text, said, calls in ((answer, "It rains", []), (f"{thoughts}{preamble}{call}", "I ask.\n\n", ["f"])):
        bodies: dict[str, dict[str, Any]] = {
            CHAT: request(text, tools=[TOOL]),
            RESPONSES: {"input": text, "tools": [{"type": "function", "name": "f"}]},
            MESSAGES: request(text, max_tokens=99, tools=[function]),
        }
        for path, body in bodies.items():
            reply = client.ask(path, body | {"stream": stream})
            whole = CLIENTS[path](reply.events) if stream else reply.body
            assert (_said_by(path, whole), _called_by(path, whole)) == ((said, "hm so"), calls)
            assert "<|" not in reply.text


def _called_by(path: str, whole: Any) -> list[str]:
    """The names of tools that are called."""
    if path == CHAT:
        return [call["function"]["name"] for call in whole["choices"][0]["message"].get("tool_calls", [])]
    parts = whole["output"] if path == RESPONSES else whole["content"]
    return [part["name"] for part in parts if part["type"] in ("function_call", "tool_use")]


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_was_held_back_is_told_at_the_end(server: Server, client: Client, stream: bool) -> None:
    """As what might become a call, or a mark of thoughts; also where the time is over before that is certain."""
    for text in ("I ask <tool_c", f"I ask {CALL[:30]}", "Hm"):
        assert client.chat(text, tools=[TOOL], stream=stream).said == text
    assert client.chat("<thin", stream=stream).said == "<thin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model, "steps", lambda text: _begins(text))
        answer = client.chat("<thin", stream=stream, timeout=0.5)
    assert (answer.said, '"length"' in answer.text) == ("<thin", True)


def _begins(text: str) -> Iterator[Step]:
    while True:
        yield Step(text, [1], None)
        text = ""
        _wait(0.005)


def test_echo_begins_with_the_prompt(client: Client) -> None:
    for stream in (False, True):
        answer = client.ask(TEXT, {"prompt": "a b", "echo": True, "stream": stream})
        whole = CLIENTS[TEXT](answer.events) if stream else answer.body
        assert whole["choices"][0]["text"] == "a ba b"


def test_the_log_says_which_parts_of_a_request_are_left_out(server: Server, client: Client) -> None:
    """Once for each request, and not all of a long conversation's."""
    before = len(server.notes)
    items = [{"type": "web_search_call", "id": str(number)} for number in range(6)]
    assert client.ask(RESPONSES, {"input": [*items, {"role": "user", "content": "hi"}]}).status == 200
    said = server.notes[before:]
    assert [note.partition(": ")[2].partition(" of ")[0] for note in said] == [
        *(f"item {number}" for number in range(1, 5)), "2 more such parts",
    ]  # fmt: skip
    assert {note.split()[0] for note in said} == {RESPONSES}
    assert client.chat("hi").said == "hi"
    assert len(server.notes) == before + 5


def test_a_message_names_the_stop_sequence_that_ended_it(server: Server, client: Client) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model, "steps", lambda text: iter([Step("One ", [1], "stop", stop="END")]))
        for stream in (False, True):
            reply = client.ask(MESSAGES, request("x", max_tokens=9, stop_sequences=["END"], stream=stream))
            whole = CLIENTS[MESSAGES](reply.events) if stream else reply.body
            assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize("text", ["`read` is it", "[1] says so", "f is a function", '{"a": 1} is it'])
def test_an_answer_that_begins_as_a_call_might_streams(client: Client, text: str) -> None:
    """It came whole at its end, once it had begun with a backtick."""
    events = client.chat(text, tools=[TOOL], stream=True).events
    deltas = [choice["delta"] for _, data in events if data != "[DONE]" for choice in data["choices"]]
    pieces = [delta["content"] for delta in deltas if delta.get("content")]
    assert "".join(pieces) == text
    assert len(pieces) > 1


def test_models_are_listed_under_each_name(client: Client) -> None:
    listed = client.ask("/v1/models").body
    assert [model["id"] for model in listed["data"]] == ["tiny", "other"]
    assert client.ask("/v1/models/other").body == listed["data"][1]
    assert client.ask("/v1/models/none").status == 404
    assert client.ask("/v1/models/other/x").status == 404
    for name in ("tiny", "other"):
        assert client.chat("hi there", model=name).body["model"] == name
    assert client.chat("hi there").body["model"] == "tiny"
    assert client.ask("/").text.endswith("serves tiny\n")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (RESPONSES, {"input": []}, "input is []"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format is not understood"),
        (CHAT, request("x", chat_template_kwargs=3), "chat_template_kwargs is 3"),
        (CHAT, request("x", template_args=3), "template_args is 3"),
        (MESSAGES, request("x", max_tokens=1, stop_sequences=3), "stop_sequences is 3"),
    ],
)
def test_a_refusal_names_the_field_as_the_request_does(
    client: Client, path: str, body: dict[str, Any], field: str
) -> None:
    refused = client.ask(path, body)
    assert (refused.status, refused.body["error"]["message"].startswith(f"the request: {field}")) == (400, True)


def test_an_unknown_model_is_404(client: Client) -> None:
    for name in ("gpt-9", "", "Tiny", "tiny ", 3, ["tiny"], {"tiny": 1}):
        refused = client.chat("hi there", model=name)
        assert (refused.status, refused.body["error"]["code"]) == (404, "model_not_found"), name
    refused = client.ask(MESSAGES, request("x", max_tokens=1, model="claude-9"))
    assert (refused.status, refused.body["error"]["type"]) == (404, "not_found_error")
    assert client.ask(COUNT, request("x", model="claude-9")).status == 404


def test_null_names_no_model(client: Client) -> None:
    """Null was the name of another model, where it is as absent in every other field."""
    assert client.chat("hi there", model=None).body["model"] == "tiny"


def test_other_paths_and_methods(client: Client) -> None:
    assert (client.ask("/v1/nothing").status, client.ask("/v1/nothing", {}).status) == (404, 404)
    for path in (CHAT, TEXT, RESPONSES, MESSAGES, COUNT):
        refused = client.ask(path)
        assert (refused.status, refused.headers["allow"], "error" in refused.body) == (405, "POST", True)
        assert client.ask(path, b"{}", "PUT").status == 405
    assert client.ask("/v1/messages/nothing").body["type"] == "error"


def test_a_prompt_that_is_too_long_is_refused_as_clients_know_it(client: Client) -> None:
    for path, body in ((CHAT, request("x" * 4096)), (TEXT, {"prompt": "x" * 4096}), (RESPONSES, {"input": "x" * 4096})):
        refused = client.ask(path, body)
        assert (refused.status, refused.body["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 4,096 tokens" in refused.body["error"]["message"]
        assert refused.body["error"]["type"] == "invalid_request_error"
    refused = client.ask(MESSAGES, request("x" * 4096, max_tokens=1))
    assert (refused.status, refused.body["error"]["type"]) == (400, "invalid_request_error")
    assert "prompt is too long" in refused.body["error"]["message"]
    assert client.chat("x" * 4095).status == 200


def test_tokens_are_counted(client: Client, server: Server) -> None:
    before = len(server.model.said)
    assert client.ask(COUNT, request("four")).body == {"input_tokens": 4}
    assert client.ask(COUNT, request("four", system="Be.", tools=[])).body == {"input_tokens": 7}
    refused = client.ask(COUNT, {"messages": 3})
    assert (refused.status, refused.body["type"]) == (400, "error")
    assert len(server.model.said) == before


@pytest.mark.parametrize("seed", [0, 5, None])
def test_an_answer_has_the_seed_of_the_command(seed: int | None) -> None:
    """It was that of the text before: seed - 1."""
    read: list[Any] = []
    with Server(wanted=replace(WANTED, sampling=SamplingParams(seed=seed))) as server:
        for more in ({}, {"seed": 7}):
            found = server.reader.read(app.APIS[0], request("x", **more))
            read.append(found.asked[0][1].sampling.seed)
    assert read == [seed, 7]


def test_hidden_thoughts_are_told_to_no_client_and_counted() -> None:
    text = "<think>secret so</think> Yes it is"
    with Server(shows_thoughts=False) as server:
        for stream in (False, True):
            bodies = {
                CHAT: request(text, stream=stream), RESPONSES: {"input": text, "stream": stream},
                MESSAGES: request(text, max_tokens=99, stream=stream),
            }  # fmt: skip
            for path, body in bodies.items():
                answer = server.client.ask(path, body)
                whole = CLIENTS[path](answer.events) if stream else answer.body
                assert (_said_by(path, whole), "secret" in answer.text) == (("Yes it is", ""), False)
        usage = server.client.chat(text).body["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len("<think>secret so</think>")


def test_scores_of_hidden_thoughts_are_hidden() -> None:
    """Their tokens were told with the scores."""
    job = SimpleNamespace(prompt=SimpleNamespace(tokens=[1], calls=None), choice=0)
    score = {"token": 1, "text": "secret", "logprob": -1.0, "top": []}
    telling = replies.Telling(job, shows_thoughts=False)  # type: ignore[arg-type]
    assert not telling.add(Part("", "secret", tokens=[1], scores=[score])).scores
    said = telling.add(Part("Yes", "", tokens=[1], scores=[score | {"text": "Yes"}]))
    assert [each["text"] for each in said.scores] == ["Yes"]
    ended = telling.end(Finish("stop", Stats()))[1]
    assert [each["text"] for each in ended.scores] == ["Yes"]


def test_a_pass_that_ends_the_thoughts_counts_as_text() -> None:
    job: Any = SimpleNamespace(prompt=SimpleNamespace(tokens=[1], calls=None), choice=0)
    telling = replies.Telling(job)
    for text, thoughts, count in (("", "hm", 3), ("Yes", " so", 4), (" it is", "", 5)):
        telling.add(Part(text, thoughts, tokens=range(count)))
    usage = telling.end(Finish(False, Stats()))[1].usage
    assert (usage.answer, usage.thoughts) == (12, 3)


def test_a_mark_within_an_argument_begins_no_call() -> None:
    """Of a call without marks, which the whole reply is: its text was told up to there."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    bare = '{"name": "f", "arguments": {"a": "<tool_call> x"}}'
    for text, told in ((bare, ""), ("I ask. " + CALL, "I ask. ")):
        spoken = Spoken(Calls(tools, "<tool_call>"))
        pushed = [spoken.push(letter) for letter in text]
        rest, calls = spoken.end()
        names = [growth.name for _, grown in (*pushed, ("", calls)) for growth in grown if growth.arguments[0] == "{"]
        assert ("".join(said for said, _ in pushed) + rest, names) == (told, ["f"])


# The queue


def test_answers_of_many_clients_are_their_own(client: Client, server: Server) -> None:
    texts = [f"prompt {number} of {number} words and {'more ' * (number % 7)}end" for number in range(20)]

    def ask(number: int) -> str:
        while (answer := client.chat(texts[number], stream=bool(number % 2))).status == 429:
            pass
        return answer.said

    with ThreadPoolExecutor(20) as clients:
        assert list(clients.map(ask, range(20))) == texts
    assert server.model.most_at_a_time == 2


def test_a_full_queue_refuses_the_next_one() -> None:
    with Server(most_waiting=2) as server, busy(server):
        with ThreadPoolExecutor(2) as clients:
            waiting = [clients.submit(server.client.chat, f"wait {number}") for number in range(2)]
            until(lambda: server.num_waiting == 2)
            refused = server.client.chat("one more")
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            body = {"message": refused.body["error"]["message"], "type": "rate_limit_error", "param": None}
            assert refused.body["error"] == body | {"code": "rate_limit_exceeded"}
            stream = server.client.chat("one more", stream=True)
            assert (stream.status, stream.headers["content-type"]) == (429, "application/json")
            message = server.client.ask(MESSAGES, request("one more", max_tokens=1))
            assert (message.status, message.body["error"]["type"]) == (429, "rate_limit_error")
            server.model.gate.set()
            assert {each.result().said for each in waiting} == {"wait 0", "wait 1"}
        assert "one more" not in server.model.said


def test_jobs_are_answered_in_their_order_and_together() -> None:
    with Server(batch=2, most_waiting=9) as server, busy(server, count=2), ThreadPoolExecutor(4) as clients:
        waiting = []
        for number in range(4):
            waiting.append(clients.submit(server.client.chat, f"wait {number}"))
            until(lambda number=number: server.num_waiting == number + 1)
        server.model.gate.set()
        assert [each.result().said for each in waiting] == [f"wait {number}" for number in range(4)]
        assert server.model.said[2:] == [f"wait {number}" for number in range(4)]
        assert server.model.most_at_a_time == 2


def test_the_end_is_told_before_rows_are_kept() -> None:
    with Server() as server:
        for number, stream in enumerate((False, True)):
            server.model.keeping.clear()
            assert server.client.chat("hi there", stream=stream).said == "hi there"
            assert server.model.kept == number
            server.model.keeping.set()
            until(lambda number=number: server.model.kept == number + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_client_goes_away_ends(server: Server, client: Client, stream: bool) -> None:
    """At the next pass. In a prefill: test_scheduler."""
    model = server.model
    before, ended = len(model.said), len(server.ended)
    connection = client.begin(f"endless {stream}", stream=stream)
    until(lambda: len(model.said) > before)
    if stream:
        received_until(connection, b"more")
    count = model.num_passes
    until(lambda: model.num_passes > count + 3)
    connection.close()
    until(lambda: any(is_gone for _, is_gone in server.ended[ended:]))  # that of the test before may end here, too
    assert model.left[-1] == f"endless {stream}"
    passes = model.num_passes
    assert client.chat("hi there").said == "hi there"
    assert model.num_passes <= passes + 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_job_whose_client_goes_away_leaves_the_queue(stream: bool) -> None:
    with Server() as server, busy(server):
        gone = server.client.begin("gone away", stream=stream)
        until(lambda: server.num_waiting == 1)
        gone.close()
        until(lambda: server.num_waiting == 0)
        server.model.gate.set()
        assert server.client.chat("hi there").said == "hi there"
        assert "gone away" not in server.model.said


def test_a_prompt_that_is_read_for_a_client_that_has_gone_makes_way_for_another_model() -> None:
    with Server() as server:
        gone = server.client.begin("prefill now")
        until(lambda: server.model.num_prefill_blocks > 5)
        gone.close()
        until(lambda: _is_disconnected(server))
        read = server.model.num_prefill_blocks
        until(lambda: server.model.num_prefill_blocks > read + 20)

        def wait() -> None:
            with suppress(ApiError):
                asyncio.run(server.turns.begin("another"))

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: not server.thread.is_alive())
        server.turns.close(ApiError(503, "stopping"))
        waiting.join(60)
    assert (server.model.left, server.error) == (["prefill now"], None)


def test_a_client_that_goes_away_before_its_stream_begins_leaves_no_answer_behind() -> None:
    with Server() as server:
        reading, go_on = threading.Event(), threading.Event()
        read = server.reader.read

        def slowly(*given: Any) -> Any:
            found = read(*given)
            if found.asked[0][0].tokens[0] == ord("e"):
                reading.set()
                assert go_on.wait(60)
            return found

        server.reader.read = slowly  # type: ignore[method-assign]
        gone = server.client.begin("endless", stream=True)
        assert reading.wait(60)
        gone.close()
        until(lambda: _is_disconnected(server))
        go_on.set()
        assert server.client.chat("hi there").said == "hi there"
        assert server.num_waiting == 0


def _is_disconnected(server: Server) -> bool:
    """Whether no connection is open."""
    return not server._http._server.server_state.connections


def test_a_client_that_half_closes_is_gone(server: Server, client: Client) -> None:
    """As far as the library tells: what counts is that nothing is left of it."""
    ended = len(server.ended)
    connection = client.begin("endless", stream=True)
    received_until(connection, b"more")
    connection.shutdown(socket.SHUT_WR)
    until(lambda: len(server.ended) > ended)
    received(connection)
    connection.close()


@pytest.mark.parametrize("goes", [False, True])
def test_the_answer_of_a_client_that_does_not_read_ends(goes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SEND_SECONDS, or once it goes away; whether or not garbage is collected, which held what forgets the
    job."""
    monkeypatch.setattr(http, "SEND_SECONDS", 60.0 if goes else 0.1)
    gc.disable()
    try:
        with Server() as server:
            monkeypatch.setattr(server.model, "steps", lambda text: _much())
            server._bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection = server.client.connect()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(raw(CHAT, request("much", stream=True)))
            if goes:
                until(lambda: server.model.num_passes > 50)
                connection.close()
            until(lambda: server.ended or server.model.num_passes > 400)
            assert server.ended
            connection.close()
    finally:
        gc.enable()


def _much() -> Iterator[Step]:
    while True:
        _wait(0.005)
        yield Step("x" * 10_000, [1], None)


WAITS = {
    CHAT: b'"delta": {}, "logprobs": null, "finish_reason": null', TEXT: b'"text": "", "logprobs": null',
    RESPONSES: b'"type": "response.in_progress", "sequence_number": 2',
    MESSAGES: b'event: ping\ndata: {"type": "ping"}',
}  # fmt: skip


@pytest.mark.parametrize("path", WAITS)
def test_a_stream_that_waits_says_so_in_the_form_of_its_api(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said so in comments, which do not hold clients that count events, such as Codex."""
    monkeypatch.setattr(replies, "QUIET_SECONDS", 0.02)
    body = (
        {"prompt": "hi there"} if path == TEXT else {"input": "hi there"} if path == RESPONSES else request("hi there")
    )
    body |= {"stream": True, "max_output_tokens" if path == RESPONSES else "max_tokens": 100}
    with Server() as server, busy(server), server.client.connect() as waits:
        waits.sendall(raw(path, body))
        begun = received_until(waits, WAITS[path])
        server.model.gate.set()
        whole = begun + received_until(waits, b"[DONE]" if path in (CHAT, TEXT) else b"usage")
        assert (b"hi" in begun, b"hi" in whole) == (False, True)


def test_progress_is_told_in_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_PROGRESS_SECONDS", 0.0)
    with Server() as server:
        assert ": prefill 1 of 2 tokens\n\n" in server.client.chat("hi there", stream=True).text


# Requests that are no requests


def test_a_body_that_is_too_large_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_BYTES", 10_000)
    for path in (CHAT, MESSAGES):
        refused = client.ask(path, b"x" * 10_001)
        assert (refused.status, "over the limit of 10,000 bytes" in refused.text) == (413, True)
    chunks = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    with client.connect() as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + chunks)
        assert received_until(connection, b"\r\n").startswith(b"HTTP/1.1 413 ")
    assert client.ask(CHAT, b"x" * 10_000).status == 400


def test_a_slow_body_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
    with client.connect() as connection:
        connection.sendall(raw(CHAT, request("hi there"))[:-5])
        assert received_until(connection, b"}}").startswith(b"HTTP/1.1 408 ")


def test_idle_connections_are_closed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.1)
    with client.connect() as connection:
        connection.sendall(raw(CHAT, request("hi there")))
        assert received(connection).count(b"HTTP/1.1 200 OK") == 1


def test_a_long_answer_is_not_an_idle_connection(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.1)
    connection = client.begin("gated")
    _wait(0.3)
    server.model.gate.set()
    assert b"tick done" in received_until(connection, b"}}")
    server.model.gate.clear()
    connection.close()


def test_a_request_that_came_with_the_one_before_has_its_time(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on headers began at the end of the answer before, and closed the connection within its own answer."""
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.1)
    with client.connect() as connection:
        connection.sendall(raw(CHAT, request("hi there")) + raw(CHAT, request("gated")))
        received_until(connection, b"}}")
        _wait(0.3)
        server.model.gate.set()
        try:
            assert b"tick done" in received_until(connection, b"}}")
        finally:
            server.model.gate.clear()


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_requests_one_after_the_other_on_one_connection(client: Client) -> None:
    with client.connect() as connection:
        texts = ["one", "two words", "three words long"]
        connection.sendall(b"".join(raw(CHAT, request(text, stream=index == 1)) for index, text in enumerate(texts)))
        come = b""
        while come.count(b"HTTP/1.1 200 OK") < 3 or b"three words long" not in come:
            come += connection.recv(65536)
        first, second, third = come.split(b"HTTP/1.1 200 OK")[1:]
        assert b'"content":"one"' in first
        assert b'"content": "two"' in second
        assert b" words" in second
        assert b'"content":"three words long"' in third


def test_old_http_is_answered_with_a_host(client: Client) -> None:
    with client.connect() as connection:
        connection.sendall(raw(CHAT, request("hi there"), version="1.0"))
        come = received(connection)
        assert come.startswith(b"HTTP/1.1 200 ")
        assert b"hi there" in come
    with client.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "torn",
    [
        b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 1000, b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=lambda torn: repr(torn[:30]),
)  # fmt: skip
def test_what_is_no_http_is_refused(client: Client, torn: bytes) -> None:
    with client.connect() as connection:
        connection.sendall(torn)
        with suppress(OSError):  # it may have been closed by then
            connection.shutdown(socket.SHUT_WR)
        come = received(connection)
        assert come[:13] in (b"", b"HTTP/1.1 400 ", b"HTTP/1.1 403 ", b"HTTP/1.1 404 "), come[:200]


def test_bytes_that_are_cut_anywhere_leave_nothing_behind(server: Server, client: Client) -> None:
    whole = raw(CHAT, request("hi there", stream=True))
    for cut in range(0, len(whole), 7):
        with client.connect() as connection:
            connection.sendall(whole[:cut])
    until(lambda: _is_disconnected(server))


def hostile(chance: random.Random) -> bytes:
    """A body that is no request, or hardly one."""
    deep = chance.choice((60, 64, 70, 5000, 100_000))
    value = chance.choice(
        (
            '"\\ud800"', "1" * 5000, "1e999", "-0", "NaN", "null", "[]", "{}", '""', "[" * deep + "]" * deep,
            '{"a":' * deep + "1" + "}" * deep, "true", '"' + "x" * 3000 + '"', "1.5", "9" * 30, '["user"]',
            '[{"role": "user", "content": "\\udfff"}]', '[{"role": [], "content": {}}]', '[{"type": "text"}]',
            '[{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]', '{"type": "json_schema"}',
        )
    )  # fmt: skip
    name = chance.choice(
        ("messages", "prompt", "input", "max_tokens", "temperature", "stop", "tools", "tool_choice", "seed",
         "logit_bias", "response_format", "stream", "metadata", "text", "reasoning", "thinking", "system",
         "json_schema", "regex",
         "timeout", "logprobs", "template_args", "stream_options", "\\ud800", "x")
    )  # fmt: skip
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 5, "{name}": {value}}}'
    kind = chance.randrange(8)
    if kind == 0:
        return chance.randbytes(chance.randrange(200))
    if kind == 1:
        return body.encode()[: chance.randrange(len(body))]
    if kind == 2:
        return value.encode()
    if kind == 3:
        return b"\xef\xbb\xbf" + body.encode()
    if kind == 4:
        return body.encode("utf-16")
    return body.replace('"messages"', chance.choice(('"messages"', '"input"', '"prompt"'))).encode()


def test_hostile_requests_leave_nothing_behind(server: Server, client: Client) -> None:
    jobs: list[weakref.ref[Job]] = []
    submit = server.scheduler.submit

    def noted(some: Sequence[Job]) -> None:
        jobs.extend(map(weakref.ref, some))
        submit(some)

    server.scheduler.submit = noted  # type: ignore[method-assign]
    before = client.chat("hi there").said
    threads = threading.active_count()
    chance = random.Random(7)
    statuses = set()
    for number in range(300):
        path = chance.choice((CHAT, TEXT, RESPONSES, MESSAGES, COUNT))
        body = hostile(chance)
        if number % 10 == 9:
            with client.connect() as connection:
                connection.sendall(raw(path, body)[: chance.randrange(300)])
        else:
            answer = client.ask(path, body)
            statuses.add(answer.status)
            assert answer.status in (200, 400, 404), (path, body[:300], answer.text)
            assert answer.status == 200 or "message" in answer.body["error"], (body[:300], answer.text)
    assert {200, 400} <= statuses
    assert client.chat("hi there").said == before
    del server.scheduler.submit
    until(lambda: _is_disconnected(server))
    until(lambda: not server._http._server.server_state.tasks)
    gc.collect()
    assert [job() for job in jobs if job() is not None] == []
    assert threading.active_count() <= threads
    assert server.num_waiting == 0


def test_what_is_said_of_a_request_is_short(client: Client) -> None:
    for name in ("logprobs", "n", "store", "x" * 10_000):
        refused = client.chat("x", **{name: "y" * 100_000})
        assert refused.status == 400
        assert len(refused.text) < 2000, name


def test_settings_of_many_requests_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting of a request that was checked was remembered for ever, with its schema."""
    monkeypatch.setattr("offload.engine.request.check_sampling", lambda *given: False)
    prepared = SimpleNamespace(request=SimpleNamespace(target=None), tokenizer=None)
    prompts = Prompts(prepared, Layout("auto", {}))  # type: ignore[arg-type]
    for number in range(3000):
        wanted = replace(WANTED, sampling=SamplingParams(temperature=1 + number / 10_000))
        prompts.check(Record(number=1, id=1, prompt="x", wanted=wanted))
    assert prompts._check.cache_info().currsize < 2000


# Errors and ends


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_pass_fails_the_answers_under_way_and_no_other(stream: bool) -> None:
    with Server(batch=2) as server:
        with busy(server):
            failed = server.client.chat("fail now", stream=stream)
            if stream:
                assert failed.events[-1][1]["error"]["message"] == "the model failed"
            else:
                assert (failed.status, failed.body["error"]["type"]) == (500, "server_error")
                assert failed.body["error"]["message"] == "the model failed"
        assert sorted(server.model.left) == ["fail now", "gated"]
        assert server.client.chat("hi there").said == "hi there"
        assert server.error is None


def test_an_error_of_a_stream_is_told_in_each_apis_form() -> None:
    with Server() as server:
        chat = server.client.chat("fail now", stream=True).events
        assert [data for _, data in chat][-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in [data for _, data in chat]
        name, data = server.client.ask(MESSAGES, request("fail now", max_tokens=9, stream=True)).events[-1]
        assert (name, data["type"], data["error"]["message"]) == ("error", "error", "the model failed")
        name, data = server.client.ask(RESPONSES, {"input": "fail now", "stream": True}).events[-1]
        assert (name, data["response"]["status"]) == ("response.failed", "failed")
        assert data["response"]["error"]["message"] == "the model failed"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_prefill_fails_its_request_alone(stream: bool) -> None:
    with Server(batch=2) as server, busy(server):
        failed = server.client.chat("refuse this", stream=stream)
        said = failed.events[-1][1] if stream else failed.body
        assert said["error"]["message"] == "the prompt cannot be read"
        assert server.model.left == ["refuse this"]
        server.model.gate.set()
        assert server.client.chat("hi there").said == "hi there"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["break", "crash"])
def test_an_unexpected_error_ends_the_server_and_clients_are_told(kind: str, stream: bool) -> None:
    """crash: in a prefill, where its own client was not told."""
    with Server() as server:
        with ThreadPoolExecutor(2) as clients, busy(server):
            failing = clients.submit(server.client.chat, f"{kind} now", stream=stream)
            until(lambda: server.num_waiting == 1)
            waiting = clients.submit(server.client.chat, "wait")
            until(lambda: server.num_waiting == 2)
            server.model.gate.set()
            said = failing.result()
            assert "unexpected RuntimeError" in said.text
            assert (said.status, stream) in ((200, True), (500, False))
            assert waiting.result().status == 503
        server.thread.join(60)
        assert isinstance(server.error, RuntimeError)


def test_a_server_that_stops_ends_what_is_under_way_and_refuses_the_rest() -> None:
    with Server() as server, ThreadPoolExecutor(3) as clients:
        under_way = clients.submit(server.client.chat, "gated")
        until(lambda: server.model.said)
        waiting = clients.submit(server.client.chat, "wait")
        until(lambda: server.num_waiting == 1)
        server.scheduler.stop()
        refused = server.client.chat("late")
        assert (refused.status, refused.body["error"]["code"]) == (503, "server_stopping")
        assert (server.client.ask("/health").status, refused.headers["retry-after"]) == (503, "1")
        server.model.gate.set()
        assert under_way.result().said.endswith("tick done")
        assert (waiting.result().status, waiting.result().body["error"]["code"]) == (503, "server_stopping")
        server.thread.join(60)
        assert (server.scheduler.num_dropped, server.error) == (0, None)


@pytest.mark.parametrize("how", ["time", "now"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_does_not_end_in_time_is_dropped_and_told(
    how: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "time":
        monkeypatch.setattr(scheduler, "STOP_SECONDS", 0.1)
    with Server() as server, ThreadPoolExecutor(1) as clients:
        under_way = clients.submit(server.client.chat, "endless", stream=stream)
        until(lambda: server.model.num_passes > 2)
        server.stop_now() if how == "now" else server.scheduler.stop()
        assert "the server is stopping" in under_way.result().text
        assert stream or under_way.result().status == 503
        server.thread.join(60)
        assert (server.scheduler.num_dropped, server.error) == (1, None)


def test_a_prefill_ends_when_the_server_is_to_stop_now() -> None:
    """It was heard after the prefill alone, which may take minutes."""
    with Server() as server, ThreadPoolExecutor(1) as clients:
        under_way = clients.submit(server.client.chat, "prefill")
        until(lambda: server.model.num_prefill_blocks > 2)
        server.stop_now()
        blocks = server.model.num_prefill_blocks
        until(lambda: not server.thread.is_alive() or server.model.num_prefill_blocks > blocks + 20)
        is_over = not server.thread.is_alive()
        server.model.gate.set()
        assert (is_over, under_way.result().status) == (True, 503)


def test_an_answer_whose_client_went_away_is_not_dropped_by_the_end() -> None:
    with Server() as server:
        connection = server.client.begin("endless", stream=True)
        received_until(connection, b"more")
        connection.close()
        until(lambda: server.ended)
        server.scheduler.stop()
        server.thread.join(60)
        assert server.scheduler.num_dropped == 0


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1 port {port} cannot be served .*in use.*--port"):
            listening_socket("127.0.0.1", port)


def test_two_servers_that_begin_at_once_do_not_have_one_port() -> None:
    """Both were bound, and loaded their models; the second one failed when it began to listen."""
    with listening_socket("127.0.0.1", 0) as first, pytest.raises(UsageError, match="cannot be served"):
        listening_socket("127.0.0.1", first.getsockname()[1]).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.0.0.1", "a" * 80, "\ud800", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        listening_socket(host, 0)


def test_errors_of_handlers_name_what_happened(client: Client, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise KeyError("secret")

    logged: list[str] = []
    monkeypatch.setattr(guard.log, "failure", logged.append)
    monkeypatch.setattr(server.reader, "read", broken)
    for path, kind in ((CHAT, "server_error"), (MESSAGES, "api_error")):
        answer = client.ask(path, {})
        assert (answer.status, answer.body["error"]["type"]) == (500, kind)
        assert answer.body["error"]["message"] == "unexpected KeyError"
    until(lambda: len(logged) == 2)
    assert "secret" in logged[0]
    monkeypatch.setattr(server.reader, "read", _refuses)
    assert client.ask(CHAT, {}).status == 418


def _refuses(*given: Any) -> Any:
    raise ApiError(418, "teapot")


def test_an_answer_that_cannot_begin_concerns_its_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not under way yet, and to drop it ended the server."""
    with Server() as server:
        monkeypatch.setattr(Job, "answer", lambda *given: _raise(MemoryError()))
        assert server.client.chat("hi").status == 503
        monkeypatch.undo()
        assert server.client.chat("hi there").said == "hi there"


def test_an_error_after_an_answer_fails_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its rows were kept; it ended the server."""
    with Server() as server:
        with monkeypatch.context() as patch:
            patch.setattr(
                "kit.served.Sequences.leave", lambda *given, **more: _raise(TriforceError("the disk is gone"))
            )
            assert "the disk is gone" in server.client.chat("hi").text
        assert server.client.chat("hi there").said == "hi there"


def test_a_scheduler_whose_loop_has_ended_refuses() -> None:
    ended = scheduler.Scheduler(most_waiting=3, on_end=lambda *given: None)
    answers = SimpleNamespace(has_room=True, under_way=list)
    with pytest.raises(TypeError):  # it has no length
        ended.run(answers, None)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="stopping"):
        ended.submit([SimpleNamespace()])  # type: ignore[list-item]


@pytest.mark.parametrize("path", WAITS)
def test_a_stream_that_holds_text_back_says_so(path: str) -> None:
    """Pieces came, and nothing was sent: hidden thoughts, or the text of a tool call. In each API the reply is as it
    would be without."""
    seconds = iter(range(10_000))
    job: Any = SimpleNamespace(prompt=SimpleNamespace(tokens=[1], calls=None), choice=0)
    held, said = [Part("", "hm", tokens=[1])] * 50, [Part(text, "", tokens=[1]) for text in ("a ", "b")]
    came = iter([*held, said[0], *held, said[1], Finish("stop", Stats())])
    reports: Any = SimpleNamespace(next=lambda wait: _soon((0, next(came))))

    async def told(quiet: float) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replies, "QUIET_SECONDS", quiet)
            told = [replies.Telling(job, shows_thoughts=False)]
            reply = api_of(path).reply({"prompt": "x"}, "tiny")
            return "".join([text async for text in replies.events(reports, told, reply, lambda: float(next(seconds)))])

    text = asyncio.run(told(10.0))
    came = iter([*said, Finish("stop", Stats())])
    plain = asyncio.run(told(1e9))
    assert len(parse(text)) >= len(parse(plain)) + 8
    assert ": " not in {line[:2] for line in text.split("\n")}
    whole, expected = (without_names(CLIENTS[path](parse(each))) for each in (text, plain))
    whole["usage"] = expected["usage"] = None
    assert whole == expected


def test_a_stream_waits_no_longer_than_until_its_next_event_is_due() -> None:
    """It waited for ten seconds from each report on, so nineteen could pass."""
    waited: list[float] = []
    seconds = iter([0.0, 0.0, 9.0, 9.0, 11.0, 11.0, *range(12, 10_000)])
    came: Any = iter([(0, Progress("prefill", 1, 2, "tokens")), None, (0, Finish("stop", Stats()))])

    def next_report(seconds: float) -> Any:
        waited.append(seconds)
        return _soon(next(came))

    job: Any = SimpleNamespace(prompt=SimpleNamespace(tokens=[1], calls=None), began=None, choice=0)
    reports: Any = SimpleNamespace(next=next_report)

    async def told() -> list[str]:
        reply = api_of(MESSAGES).reply({}, "tiny")
        told = [replies.Telling(job)]
        return [each async for each in replies.events(reports, told, reply, lambda: float(next(seconds)))]

    kinds = [text.partition("\n")[0] for text in asyncio.run(told())]
    assert kinds[:3] == ["event: message_start", ": prefill 1 of 2 tokens", "event: ping"]
    assert waited[:2] == [10.0, 1.0]


async def _soon(value: T) -> T:
    return value


def _raise(error: Exception) -> Any:
    raise error


def test_line_ends_of_other_alphabets_split_no_event() -> None:
    event = str(Event({"text": "a\u2028b\x85c\u2029d\u00e9"}))
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: ")) == {"text": "a\u2028b\x85c\u2029d\u00e9"}


def test_a_connection_whose_client_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To close it waited for the client to read what was left."""
    monkeypatch.setattr(http, "SEND_SECONDS", 0.1)
    with Server() as server:
        monkeypatch.setattr(server.model, "steps", lambda text: _much())
        server._bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with server.client.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(raw(CHAT, request("much", stream=True)))
            until(lambda: server.ended)
            until(lambda: not server._http._server.server_state.connections)
