"""The server's status and metrics: requests under way, rates, sums, and the answers' timings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.models import Sizes, save_pair, tiny_plan
from kit.served import CHAT, SPAN, WANTED, Client, Server, busy, raw, received_until, request, until
from offload.metrics import DiskStats, ExpertStats, LevelStats, LinkStats, Stats
from offload.progress import Progress
from triforce_cli.answering.answer import Part
from triforce_cli.answering.request import Prompt
from triforce_cli.apis.api import ApiError, Reading
from triforce_cli.apis.table import api_of
from triforce_cli.apis.timings import timings
from triforce_cli.serve import replies
from triforce_cli.serve.job import Finish, Job, Reports
from triforce_cli.serve.metrics import Metrics
from triforce_cli.serve.replies import Telling, events
from triforce_cli.serve.requests import RATE_SECONDS, Over, Requests
from triforce_cli.serve.status import document, planned
from triforce_cli.serve.store_use import StoreUse, StoreWatch

TEXT = "/v1/completions"


def status(client: Client) -> dict[str, Any]:
    answer = client.ask("/status")
    assert answer.status == 200
    found: dict[str, Any] = answer.body
    return found


def metrics(client: Client) -> dict[str, float]:
    """The values by names with labels, without buckets and times."""
    answer = client.ask("/metrics")
    assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    lines = [line for line in answer.text.splitlines() if not re.match(r"#|\w+_(bucket|created)\b", line)]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_requests_are_told_by_what_they_do() -> None:
    with Server(batch=2) as server:
        client = server.client
        assert (status(client)["running"], status(client)["waiting"]) == ([], [])
        with busy(server), closing(client.begin("prefill now", stream=True)), closing(client.begin("next")):
            until(lambda: server.model.num_prefill_blocks > SPAN)
            until(lambda: status(client)["waiting"])
            writing, reading = status(client)["running"]
            [waiting] = status(client)["waiting"]
            assert [each["state"] for each in (writing, reading, waiting)] == ["writing", "reading", "waiting"]
            assert [each["prompt_tokens"] for each in (writing, reading, waiting)] == [5, 11, 4]
            assert (reading["read_tokens"] > SPAN, reading["written_tokens"]) == (True, 0)
            assert (writing["read_tokens"], writing["written_tokens"] > 0) == (5, True)
            assert (waiting["read_tokens"], waiting["written_tokens"]) == (0, 0)
            assert {each["api"] for each in (writing, reading, waiting)} == {CHAT}
            assert len({each["id"] for each in (writing, reading, waiting)}) == 3
            assert metrics(client)["triforce_running_requests"] == 2
            assert metrics(client)["triforce_waiting_requests"] == 1
            server.model.gate.set()
        until(lambda: not status(client)["running"] and not status(client)["waiting"])


def test_each_end_is_counted_by_api_and_finish_reason() -> None:
    with Server() as server:
        client = server.client
        client.chat("a b")
        client.ask(TEXT, {"prompt": "a b"})
        client.chat("a b", stream=True)
        assert client.chat("fail now").status == 500
        client.chat("endless", timeout=0.05)
        with closing(client.begin("endless")):  # under way
            until(lambda: len(server.model.said) == 6)
            with closing(client.begin("gone")):  # in the queue
                until(lambda: server.num_waiting == 1)
            until(lambda: server.num_waiting == 0)
        until(lambda: metrics(client).get(f'triforce_requests_total{{api="{CHAT}",finish="gone"}}') == 2)
        found = metrics(client)
        counts = {
            (CHAT, "stop"): 2, (TEXT, "stop"): 1, (CHAT, "error"): 1, (CHAT, "timeout"): 1, (CHAT, "gone"): 2,
        }  # fmt: skip
        for (api, finish), count in counts.items():
            assert found[f'triforce_requests_total{{api="{api}",finish="{finish}"}}'] == count
        num_answers = 5  # with statistics: 3 that stopped, one whose time was over, one whose client had gone
        assert found["triforce_generated_tokens_total"] == 3 * num_answers
        assert found["triforce_prompt_tokens_total"] == 3 * 3 + 2 * 7
        assert found["triforce_cached_tokens_total"] == 1 + 2 + 1
        assert found['triforce_drafted_tokens_total{level="target"}'] == 4 * num_answers
        assert found['triforce_accepted_tokens_total{level="target"}'] == 3 * num_answers
        assert found["triforce_token_seconds_sum"] == pytest.approx(0.125 * num_answers)
        assert found["triforce_first_token_seconds_count"] == num_answers + 1  # the one that failed, too
        assert status(client)["drafts"] == {
            "target": {"drafted": 4 * num_answers, "accepted": 3 * num_answers, "acceptance": 0.75}
        }


TIMINGS = {
    "cache_n": 0, "prompt_n": 3, "prompt_ms": 500, "prompt_per_token_ms": 166.667, "prompt_per_second": 6,
    "predicted_n": 3, "predicted_ms": 250, "predicted_per_token_ms": 125, "predicted_per_second": 8,
    "draft_n": 4, "draft_n_accepted": 3,
}  # fmt: skip


def test_replies_have_timings_under_llama_cpps_names() -> None:
    """They are in the last chunk of a stream that has data: that of the usage, if it is asked for."""
    for path, body in ((CHAT, request("a b")), (TEXT, {"prompt": "a b"})):
        with Server() as server:
            assert server.client.ask(path, body).body["timings"] == TIMINGS
            for more, has_choice in (({}, True), ({"stream_options": {"include_usage": True}}, False)):
                events = server.client.ask(path, {**body, "stream": True, **more}).events
                found = [data for _, data in events if "timings" in data]
                assert found == [events[-2][1]]
                assert bool(found[0]["choices"]) is has_choice
                cached = found[0]["timings"]["cache_n"]
                assert found[0]["timings"]["prompt_n"] == 3 - cached


def test_timings_of_an_answer_without_tokens_have_no_rates() -> None:
    found = timings(Stats(prompt_tokens=5))
    assert {name for name, value in found.items() if value is None} == {
        "prompt_per_token_ms", "prompt_per_second", "predicted_per_token_ms", "predicted_per_second",
    }  # fmt: skip
    assert "draft_n" not in found


def test_who_asks_for_it_is_told_how_far_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each span, and every second in between; to others it is a comment."""
    for path, body in ((CHAT, request("prefill now")), (TEXT, {"prompt": "prefill now"})):
        with Server() as server:
            with closing(server.client.connect()) as connection:
                connection.sendall(raw(path, {**body, "stream": True, "return_progress": True}))
                received_until(connection, b'"processed": 10')
            with closing(server.client.connect()) as connection, monkeypatch.context() as patch:
                patch.setattr(replies, "_PROGRESS_SECONDS", 0.0)
                connection.sendall(raw(path, {**body, "stream": True}))
                assert b"prompt_progress" not in received_until(connection, b": prefill ")
            assert server.client.ask(path, {**body, "return_progress": 1}).status == 400


def test_a_short_prompts_progress_is_told_at_its_end() -> None:
    """No second passes."""

    async def told() -> list[str]:
        job = Job("/v1/x abc", Prompt(range(1000)), WANTED, reports := Reports())
        for report in (read(200), read(700), replace(read(700), stays=True), Finish("stop", Stats())):
            job.report(report)
        reply = api_of(CHAT).reply({"return_progress": True}, "m")
        return [each async for each in events(reports, [Telling(job)], reply, clock=lambda: 0.0)]

    found = [each for each in asyncio.run(told()) if "prompt_progress" in each]
    assert len(found) == 1
    assert '"total": 1000, "cache": 290, "processed": 990' in found[0]


def test_a_chunk_of_progress_counts_cached_tokens_as_read() -> None:
    for path, choice in ((CHAT, {"delta": {}}), (TEXT, {"text": ""})):
        api = api_of(path)
        reply = api.reply({"prompt": "x", "return_progress": True}, "m")
        [event] = reply.reading(Reading(total=1000, read=490, cached=290, seconds=1.5))
        assert isinstance(event.data, dict)
        assert event.data["prompt_progress"] == {"total": 1000, "cache": 290, "processed": 490, "time_ms": 1500}
        [got] = event.data["choices"]
        assert got == {"index": 0, **choice, "logprobs": None, "finish_reason": None}
        assert not [*api.reply({"prompt": "x"}, "m").reading(Reading(1000, 490, 290, 1.5))]


def test_a_refused_request_is_not_under_way() -> None:
    with Server(most_waiting=1) as server, busy(server), closing(server.client.begin("a")):
        until(lambda: server.num_waiting == 1)
        assert server.client.chat("b").status == 429
        assert len(status(server.client)["waiting"]) == 1


class Rig:
    """Requests with a clock that is set. over: the ends."""

    def __init__(self) -> None:
        self.now, self.over = 100.0, list[Over]()
        self.requests = Requests(self.over.append, lambda: self.now)

    def job(self, num_tokens: int = 1000) -> Job:
        job = Job("/v1/x abc", Prompt(range(num_tokens)), WANTED, Reports())
        self.requests.follow(job, "/v1/x")
        return job

    def state(self) -> dict[str, Any]:
        return document({}, self.requests, None, uptime=1.0, is_stopping=False)


def with_rig(run: Callable[[Rig], None]) -> None:
    async def running() -> None:
        run(Rig())

    asyncio.run(running())


def read(done: int, total: int = 700, held: int = 290) -> Progress:
    return Progress("prefill", done, total, "tokens", held=held)


def test_rates_are_of_the_last_seconds_and_count_no_cached_token() -> None:
    def run(rig: Rig) -> None:
        job = rig.job()
        job.began = 0.0
        job.on_report(Progress("restore", 5000, 9000, "bytes"))
        for done in (0, 200, 700):
            job.on_report(read(done))
        rig.now += RATE_SECONDS / 2
        job.on_report(Part("ab", "", tokens=[1, 2]))
        assert rig.requests.rates() == (700 / RATE_SECONDS, 2 / RATE_SECONDS)
        rig.now += RATE_SECONDS * 0.75
        assert rig.requests.rates() == (0.0, 2 / RATE_SECONDS)
        rig.now += RATE_SECONDS
        assert rig.requests.rates() == (0.0, 0.0)
        [course] = rig.requests.of("writing")
        assert (course.num_read, course.num_cached, course.num_written) == (1000, 290, 2)

    with_rig(run)


def test_a_request_is_told_with_its_tokens_and_its_time() -> None:
    def run(rig: Rig) -> None:
        job = rig.job()
        job.began = 0.0
        job.on_report(read(200))
        rig.now += 2.5
        assert rig.state()["running"] == [
            {
                "id": "abc", "api": "/v1/x", "state": "reading", "prompt_tokens": 1000, "read_tokens": 490,
                "cached_tokens": 290, "written_tokens": 0, "seconds": 2.5,
            }
        ]  # fmt: skip
        job.on_report(ApiError(500, "it broke"))
        assert (rig.state()["running"], [each.finish for each in rig.over]) == ([], ["error"])

    with_rig(run)


def test_a_client_that_goes_away_leaves_the_queue_but_no_answer_under_way() -> None:
    """Its prompt is read on to its end if nobody else waits."""

    def run(rig: Rig) -> None:
        queued, begun = rig.job(), rig.job()
        begun.began = 0.0
        for job in (queued, begun):
            job.leave()
            rig.requests.left(job)
        assert [each.job for each in rig.requests.of("waiting", "reading")] == [begun]
        begun.on_report(Finish("timeout", Stats()))
        begun.on_report(Part("late", "", tokens=[1]))
        assert (rig.requests.of("reading", "writing"), [each.finish for each in rig.over]) == ([], ["gone", "gone"])

    with_rig(run)


def test_the_seconds_to_the_first_token_have_the_wait_in_them() -> None:
    def run(rig: Rig) -> None:
        job = rig.job()
        rig.now += 3
        job.began = 0.0
        job.on_report(Part("", "", tokens=[]))
        rig.now += 2
        job.on_report(Part("a", "", tokens=[1]))
        rig.now += 9
        job.on_report(Finish("stop", Stats()))
        assert [each.first_token_seconds for each in rig.over] == [5]

    with_rig(run)


def test_drafts_and_hits_are_summed_over_answers() -> None:
    def run(rig: Rig) -> None:
        for hits, accepted in ((3, 1), (4, 5)):
            levels = [LevelStats("draft"), LevelStats("target", drafted=6, accepted=accepted)]
            link = LinkStats(experts=ExpertStats(hits, 1), disk=DiskStats(hits, 100 * hits, 0.5))
            rig.job().on_report(Finish("stop", Stats(levels=levels, prefill_link=link)))
        assert rig.state()["drafts"] == {"target": {"drafted": 12, "accepted": 6, "acceptance": 0.5}}
        assert rig.state()["expert_hit_rate"] == round(7 / 9, 4)
        assert rig.state()["expert_reads"] == {"reads": 7, "num_bytes": 700, "seconds": 1.0}

    with_rig(run)


def test_two_servers_of_a_process_have_metrics_of_their_own() -> None:
    first, second = Metrics(), Metrics()
    first.over(Over("/v1/x", "stop", None, None))
    assert b'triforce_requests_total{api="/v1/x",finish="stop"} 1.0' in first.text()
    assert b"triforce_requests_total{" not in second.text()


def test_what_the_disk_gave_is_counted_of_prompts_and_answers() -> None:
    made, disk = Metrics(), LinkStats(disk=DiskStats(3, 700, 0.5))
    made.over(Over("/v1/x", "stop", Finish("stop", Stats(prefill_link=disk, decode_link=disk)), None))
    assert b"triforce_expert_read_bytes_total 1400.0" in made.text()
    assert b"triforce_expert_read_seconds_total 1.0" in made.text()


def test_the_plan_is_a_sentence_and_its_bytes_are_by_place_and_purpose(tmp_path: Path) -> None:
    plan = tiny_plan(*save_pair(tmp_path, context=1024), Sizes(), num_prompt_tokens=100, max_tokens=20, num_sequences=2)
    found = planned(plan, "a GPU")
    [device], host = found["memory"]["devices"], found["memory"]["host"]
    assert (device["name"], device["bytes"]) == ("a GPU", plan.placement.total_device_bytes)
    assert (sum(device["by_purpose"].values()), host["bytes"]) == (device["bytes"], plan.placement.total_host_bytes)
    assert re.fullmatch(r"On a GPU: .*target.*; .* streamed in a full pass; predicted .*s a token\.", found["plan"])
    assert found["at_a_time"] == plan.request.num_sequences


def test_the_store_is_looked_at_once_in_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIFORCE_CACHE_DIR", str(tmp_path))
    page = tmp_path / "store" / ("0" * 32) / f"{'1' * 32}-kv-{'2' * 32}-0.safetensors"
    watch = StoreWatch(12_345)
    assert watch.use() == StoreUse(0, 12_345)
    page.parent.mkdir(parents=True)
    page.write_bytes(b"x" * 77)
    assert (watch.use().nbytes, StoreWatch(12_345).use().nbytes) == (0, 77)
    limit = StoreWatch(None).use().limit
    assert limit is not None
    assert 77 // 10 <= limit <= 20 * 10**9
