"""The queue and the loop of passes, on a stand-in for the model: which prompts are read, how far, and when."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kit.served import PATIENCE_SECONDS, SPAN, WANTED, Server, busy, received_until, until
from offload.decode.sampling import SamplingParams
from offload.metrics import Stats
from triforce_cli.answering.ending import TIMEOUT
from triforce_cli.apis.api import ApiError
from triforce_cli.serve import replies
from triforce_cli.serve import scheduler as scheduler_module
from triforce_cli.serve.job import Ending, Job
from triforce_cli.serve.notes import answered
from triforce_cli.serve.scheduler import Scheduler, _Share


@pytest.fixture(autouse=True)
def _progress_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of once a second."""
    monkeypatch.setattr(replies, "_PROGRESS_SECONDS", 0.0)


def leaving(server: Server) -> list[Job]:
    """The jobs whose clients have gone, from now on."""
    found, forget = list[Job](), server.scheduler.forget
    server.scheduler.forget = lambda job: (forget(job), found.append(job))  # type: ignore[method-assign,assignment]
    return found


def left_in_its_prefill(server: Server, *, stream: bool = True) -> None:
    """A client goes away while its prompt is read."""
    gone, blocks = leaving(server), server.model.num_prefill_blocks
    with closing(server.client.begin("prefill now", stream=stream)) as connection:
        until(lambda: server.model.num_prefill_blocks > blocks + SPAN)
        if stream:
            received_until(connection, b"prefill ")
    until(lambda: gone)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_whose_client_went_away_is_read_on_until_somebody_waits(stream: bool) -> None:
    """All that was read of it was lost, so a client that gave up never got an answer. Its rows stay up to the end of a
    span."""
    with Server() as server:
        model = server.model
        left_in_its_prefill(server, stream=stream)
        blocks = model.num_prefill_blocks
        until(lambda: model.num_prefill_blocks > blocks + 3 * SPAN)
        assert (server.ended, model.left) == ([], [])
        assert server.client.chat("hi there").said == "hi there"
        until(lambda: len(server.ended) == 2)
        [num_read] = [count for count in server.num_read if count is not None]
        assert num_read == model.num_prefill_blocks > blocks + 3 * SPAN
        assert num_read % SPAN == 0
        assert [is_gone for _, is_gone in server.ended] == [True, False]
        assert model.left == ["prefill now", "hi there"]
        assert model.num_passes <= 3
        left_in_its_prefill(server, stream=stream)
        assert server.client.chat("hi there").said == "hi there"
        until(lambda: len(server.ended) == 4)
        assert server.num_read[2] == model.num_prefill_blocks + 1  # with a token that was cached


def test_nobody_waits_so_the_prompt_is_read_to_its_end_and_kept() -> None:
    with Server() as server:
        left_in_its_prefill(server)
        server.model.gate.set()
        until(lambda: server.model.kept == 1)
        assert [is_gone for _, is_gone in server.ended] == [True]
        assert (server.num_read, server.model.num_passes) == ([None], 0)


def test_answers_under_way_wait_for_no_prompt_whose_client_went_away() -> None:
    """It is read to the end of a span."""
    with Server(batch=2) as server, busy(server):
        left_in_its_prefill(server)
        until(lambda: server.ended)
        assert server.num_read == [server.model.num_prefill_blocks]


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_limit_ends_a_prompt_at_the_end_of_a_span(stream: bool) -> None:
    with Server() as server:
        answer = server.client.chat("prefill now", timeout=0.05, stream=stream)
        assert (answer.said, '"length"' in answer.text) == ("", True)
        until(lambda: server.ended)  # the client is told first
        assert server.num_read == [server.model.num_prefill_blocks]
        assert server.model.num_prefill_blocks % SPAN == 0
        assert [is_gone for _, is_gone in server.ended] == [False]


@pytest.mark.parametrize("how", ["stop", "now"])
def test_a_prompt_that_nobody_waits_for_does_not_keep_the_server_from_stopping(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither up to the end of a span. Nobody counts it as an answer that was cut."""
    monkeypatch.setattr(scheduler_module, "STOP_SECONDS", 10 * PATIENCE_SECONDS)
    with Server() as server:
        left_in_its_prefill(server)
        server.scheduler.stop() if how == "stop" else server.stop_now()
        server.thread.join(60)
        assert (server.thread.is_alive(), server.error, server.scheduler.num_dropped) == (False, None, 0)


def test_the_log_says_how_far_a_prompt_was_read() -> None:
    whole = Ending("/v1/messages 1", TIMEOUT, Stats(prompt_tokens=30_000, reused_tokens=1024), is_gone=True)
    assert answered(whole).endswith("(1,024 cached); the client went away")
    line = answered(replace(whole, num_read=12_288))
    assert line.endswith("; the client went away; left at 12,288 of 30,000 tokens, whose rows are kept")
    assert answered(replace(whole, is_gone=False)).endswith("; its time was over")
    assert answered(replace(whole, finish="stop", is_gone=False)).endswith("(1,024 cached)")


def test_no_work_begins_for_a_client_that_has_gone() -> None:
    """One that goes at the moment when its job is taken from the queue."""
    with Server() as server, busy(server), closing(server.client.begin("gone away")):
        until(lambda: server.num_waiting == 1)
        server.scheduler._waiting[0].leave()
        server.model.gate.set()
        assert server.client.chat("hi there").said == "hi there"
        assert "gone away" not in server.model.said


def test_between_two_passes_no_more_than_one_prompt_is_read() -> None:
    """Streams under way stood still while all that waited were read."""
    with Server(batch=4, most_waiting=9) as server, busy(server), ThreadPoolExecutor(3) as clients:
        model = server.model
        model.keeping.clear()
        ended = clients.submit(server.client.chat, "hi there")
        until(lambda: server.ended)  # its rows are being kept, so nothing else is done
        texts = ["gated one", "gated two"]
        waiting = [clients.submit(server.client.chat, text) for text in texts]
        until(lambda: server.num_waiting == 2)
        model.keeping.set()
        until(lambda: len(model.said) == 4)
        model.gate.set()
        assert ended.result().said == "hi there"
        assert [each.result().status for each in waiting] == [200, 200]
        began = dict(zip(model.said, model.began_at, strict=True))
        assert began[texts[0]] != began[texts[1]]


def test_answers_under_way_go_on_while_a_prompt_is_read() -> None:
    """Where the device has all weights. A stream stood still for as long as a prompt was read."""
    with Server(batch=2) as server, closing(server.client.begin("endless", stream=True)) as stream:
        server.model.has_all_weights = True
        received_until(stream, b"more")
        with closing(server.client.begin("prefill now", stream=True)) as other:
            received_until(other, b"prefill ")
            blocks, passes = server.model.num_prefill_blocks, server.model.num_passes
            until(lambda: server.model.num_passes > passes + 5 and server.model.num_prefill_blocks > blocks + 5)
            received_until(stream, b"more")
            assert server.model.said == ["endless", "prefill now"]
        until(lambda: "prefill now" in server.model.left and server.num_read)  # it is told after the model has left it
        assert server.num_read == [server.model.num_prefill_blocks]


@pytest.mark.parametrize(("text", "status"), [("broken", 500), ("ending", 200)])
def test_an_answer_may_fail_or_end_while_the_prompt_of_another_is_read(text: str, status: int) -> None:
    with Server(batch=2) as server, ThreadPoolExecutor(2) as clients:
        model = server.model
        model.has_all_weights = True
        first = clients.submit(server.client.chat, text)
        until(lambda: model.said)
        second = clients.submit(server.client.chat, "prefill now")
        until(lambda: model.num_prefill_blocks > 3)
        model.breaks.set()
        assert first.result().status == status
        blocks = model.num_prefill_blocks
        until(lambda: model.num_prefill_blocks > blocks + 3)
        model.gate.set()
        assert second.result().said == "prefill now"
        assert model.left == [text, "prefill now"]


@pytest.mark.parametrize("share", [2, 8])
def test_they_have_a_share_of_the_time(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran = [0.0], list[float]()
    monkeypatch.setattr(scheduler_module, "SHARE", share)
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def step() -> None:
        ran.append(now[0])
        now[0] += 0.5

    others = _Share(step)
    while now[0] < 40:
        others.offer()
        now[0] += 0.01  # a block of the prefill
    assert len(ran) * 0.5 == pytest.approx(40 / share, rel=0.1)
    assert ran[0] == 0.0


def test_only_requests_without_a_seed_go_on_from_any_rows() -> None:
    for own, expected in ((None, [True, False]), (7, [False, False])):
        with Server(wanted=replace(WANTED, sampling=SamplingParams(seed=own))) as server:
            for fields in ({}, {"seed": 0}):
                server.client.chat("hi there", **fields)
            assert [each.reuse for each in server.model.requests] == expected


def test_an_answer_may_fill_the_context_and_no_more() -> None:
    with Server(context=50) as server:
        server.client.chat("hi there")
        server.client.chat("hi there", max_tokens=7)
        assert [each.max_tokens for each in server.model.requests] == [50 - len("hi there"), 7]


def test_passes_wait_for_no_further_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault lived: the next pass waited for a job to come."""
    monkeypatch.setattr(scheduler_module, "_LISTENING_SECONDS", 10 * PATIENCE_SECONDS)
    with Server(batch=2) as server:
        assert server.client.chat("hi there").said == "hi there"


# Ends


class _StopsMeanwhile(deque[Any]):
    """A queue whose server stops, and refuses what waits, while a job is put there."""

    scheduler: Scheduler

    def extend(self, jobs: Any) -> None:
        self.scheduler.stop()
        self.scheduler.refuse_waiting()
        super().extend(jobs)


def test_a_job_that_comes_while_the_server_stops_is_refused() -> None:
    """It was put into the queue when nobody looked any more, and its client was never told."""
    scheduler = Scheduler(most_waiting=3, on_end=lambda *given: None)
    scheduler._waiting = queue = _StopsMeanwhile()
    queue.scheduler = scheduler
    with pytest.raises(ApiError, match="stopping"):
        scheduler.submit([SimpleNamespace(report=lambda report: None)])  # type: ignore[list-item]
    assert not queue


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["stop", "now"])
@pytest.mark.parametrize("stream", [False, True])
def test_requests_while_the_server_closes_are_answered_or_refused(how: str, stream: bool) -> None:
    """Each of many clients gets a whole answer, a refusal or a closed connection, and nothing is left behind."""
    statuses, go_on = list[int](), threading.Event()

    def ask(server: Server, number: int) -> None:
        text = f"{'prefill' if number == 0 else 'word ' * number} end"
        while True:
            try:
                answer = server.client.chat(text, stream=stream)
            except OSError:
                return
            statuses.append(answer.status)
            is_over = answer.status == 503 or "server is stopping" in answer.text
            assert is_over or answer.status == 429 or answer.said == text or number == 0
            if is_over:
                return
            if len(statuses) > 30:
                go_on.set()

    with Server(batch=2) as server, ThreadPoolExecutor(8) as clients:
        asking = [clients.submit(ask, server, number) for number in range(1 if how == "stop" else 0, 8)]
        if how == "stop":
            assert go_on.wait(60)
            server.scheduler.stop()
        else:
            until(lambda: server.model.num_prefill_blocks > SPAN)
            server.stop_now()
        for each in asking:
            each.result(60)
        server.thread.join(60)
        assert (server.thread.is_alive(), server.error, server.num_waiting) == (False, None, 0)
        assert sorted(server.model.left) == sorted(server.model.said)
    assert set(statuses) <= {200, 429, 503}
