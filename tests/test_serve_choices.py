"""Several answers to a request: `n` for each prompt, and lists of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from kit.api_clients import CLIENTS, without_names
from kit.served import CHAT, Response, Server, busy, request, until

TEXT = "/v1/completions"


def choices(path: str, answer: Response) -> list[Any]:
    """The choices of a reply, whole or as a stream."""
    streams = answer.headers["content-type"].startswith("text/event-stream")
    return list((CLIENTS[path](answer.events) if streams else answer.body)["choices"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_prompt_has_as_many_answers_as_are_asked_for(batch: int, stream: bool) -> None:
    """Each is the answer alone with the next seed."""
    with Server(batch=batch, most_waiting=5) as server:
        found = choices(CHAT, server.client.chat("one two three", n=5, seed=7, stream=stream))
        assert [each["message"]["content"] for each in found] == ["one two three"] * 5
        assert [each["finish_reason"] for each in found] == ["stop"] * 5
        assert [each["timings"]["predicted_n"] for each in found] == [3] * 5  # steps of the stand-in
        assert [each.sampling.seed for each in server.model.requests] == [7, 8, 9, 10, 11]
        assert server.model.most_at_a_time == batch


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_of_a_list_has_its_answers(stream: bool) -> None:
    """In the order of the prompts; a seed is that of each prompt's first answer."""
    body: dict[str, Any] = {"prompt": ["one two", "three"], "n": 2, "seed": 7, "echo": True, "stream": stream}
    with Server(batch=3, most_waiting=4) as server:
        found = choices(TEXT, server.client.ask(TEXT, body))
        assert [each["text"] for each in found] == ["one twoone two"] * 2 + ["threethree"] * 2
        assert [each["index"] for each in found] == [0, 1, 2, 3]
        requests = [(bytes(each.prompt).decode(), each.sampling.seed) for each in server.model.requests]
        assert requests == [("one two", 7), ("one two", 8), ("three", 7), ("three", 8)]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_in_the_order_of_their_prompts_whichever_ends_first(stream: bool) -> None:
    texts = ["one two three four five six", "seven", "eight nine ten"]
    with Server(batch=3) as server:
        found = choices(TEXT, server.client.ask(TEXT, {"prompt": texts, "stream": stream}))
        assert [(each["index"], each["text"]) for each in found] == [*enumerate(texts)]


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    with Server(batch=2, most_waiting=9) as server:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, (_, last), (_, done) = server.client.chat("one", n=2, **options).events
        several, chat = ({"prompt": ["one", "three"], "n": 3}, request("one", n=2))
        used = [
            server.client.ask(TEXT, several).body["usage"],
            server.client.ask(CHAT, chat).body["usage"],
            last["usage"],
        ]
        assert [each["prompt_tokens"] for each in used] == [3 + 5, 3, 3]
        assert [each["completion_tokens"] for each in used] == [3 * (3 + 5), 2 * 3, 2 * 3]
        assert done == "[DONE]"


def test_a_list_of_one_text_is_that_text() -> None:
    with Server() as server:
        whole = [server.client.ask(TEXT, {"prompt": prompt}).body for prompt in ("one", ["one"])]
        assert without_names(whole[0])["choices"] == without_names(whole[1])["choices"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, request("x", n=4), "4 answers are asked for at once (1 prompts, n is 4); 3 can wait"),
        (TEXT, {"prompt": ["x"] * 2, "n": 2}, "4 answers are asked for at once (2 prompts, n is 2); 3 can wait"),
        (TEXT, {"prompt": "x", "n": 10**15}, "1,000,000,000,000,000 answers"),
        (TEXT, {"prompt": ["x", ""]}, 'prompt is ""'),
        (TEXT, {"prompt": ["x", "x" * 99]}, "the prompt is too long (99 tokens)"),
    ],
)
def test_what_cannot_be_answered_is_refused_whole(path: str, body: dict[str, Any], said: str) -> None:
    with Server(batch=2, most_waiting=3, context=99) as server:
        refused = server.client.ask(path, body)
        assert (refused.status, said in refused.body["error"]["message"]) == (400, True), refused.text
        assert not server.model.said


def test_scores_of_all_answers_count() -> None:
    with Server(context=1 << 20, most_waiting=64) as server:
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "max_tokens": 5_000}
        assert server.client.chat("x", **fields).status == 200
        refused = server.client.chat("x", **fields, n=2)
        assert "log-probabilities of 10,000 tokens" in refused.body["error"]["message"]
        assert "max_tokens can be 3,120" in refused.body["error"]["message"]


def test_a_request_waits_for_room_for_all_its_answers() -> None:
    with Server(most_waiting=3) as server, busy(server):
        first = server.client.begin("wait", n=2)
        until(lambda: server.num_waiting == 2)
        refused = server.client.chat("more", n=2)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "2 of 3 places in the queue are taken" in refused.body["error"]["message"]
        assert server.num_waiting == 2
        first.close()
        until(lambda: server.num_waiting == 0)
    assert "more" not in server.model.said


@pytest.mark.parametrize("stream", [False, True])
def test_all_answers_of_a_client_that_goes_away_end(stream: bool) -> None:
    with Server(batch=2, most_waiting=9) as server:
        gone = server.client.begin("endless", n=3, stream=stream)
        until(lambda: len(server.model.said) == 2)
        gone.close()
        until(lambda: len(server.model.left) == 2 and server.num_waiting == 0)
        assert server.client.chat("still here").said == "still here"
        assert server.model.said.count("endless") == 2
        status = server.client.ask("/status").body
        assert (status["running"], status["waiting"]) == ([], [])


@pytest.mark.parametrize("stream", [False, True])
def test_the_failure_of_one_answer_is_that_of_the_reply(stream: bool) -> None:
    with Server(batch=2, most_waiting=9) as server:
        answer = server.client.ask(TEXT, {"prompt": ["refuse it", "endless"], "stream": stream})
        told = answer.events[-1][1] if stream else answer.body
        assert told["error"]["message"] == "the prompt cannot be read"
        until(lambda: server.num_waiting == 0)
        until(lambda: server.model.left.count("endless") == server.model.said.count("endless"))
