"""What many clients, or large or slow ones, may take of the server, and the log of what is refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kit.served import CHAT, Client, Server, busy, raw, received, received_until, request, until
from triforce_cli.apis.api import ApiError
from triforce_cli.serve import app, http, load
from triforce_cli.serve.access import Access
from triforce_cli.serve.guard import Refusal
from triforce_cli.serve.load import FREE, MOST_BYTES, MOST_TOTAL, Load
from triforce_cli.serve.notes import refused

PAGE = "http://localhost:3000"


def status(share: load.Share, count: int) -> int:
    try:
        share.take(count)
    except ApiError as error:
        return error.status
    return 200


def test_bodies_are_bounded_each_and_together() -> None:
    whole = Load()
    shares = [whole.begin(f"10.0.0.{number}") for number in range(MOST_TOTAL // (MOST_BYTES - FREE) + 2)]
    assert status(shares[0], MOST_BYTES + 1) == 413
    statuses = [status(share, MOST_BYTES) for share in shares]
    assert (statuses[0], statuses[-1], statuses.count(200)) == (200, 503, MOST_TOTAL // (MOST_BYTES - FREE))
    assert [status(shares[-1], FREE), status(shares[-1], MOST_BYTES - FREE)] == [200, 503]  # small ones come
    shares[0].end()
    assert [status(shares[-1], count) for count in (MOST_BYTES - FREE, 1)] == [200, 413]
    shares[1].end()
    in_pieces = whole.begin("10.0.0.99")
    assert {status(in_pieces, MOST_BYTES // 32) for _ in range(32)} == {200}  # its own bytes are not those of others
    for share in (in_pieces, *shares[2:]):
        share.end()
    assert (whole.num_bytes, len(whole._of_address)) == (0, 0)


def test_requests_are_bounded_in_all_and_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_REQUESTS", 5)
    monkeypatch.setattr(load, "MOST_OF_ADDRESS", 3)
    whole = Load()
    begun = [whole.begin("a") for _ in range(3)]
    with pytest.raises(ApiError, match="too many requests are under way") as caught:
        whole.begin("a")
    assert (caught.value.status, caught.value.headers) == (503, {"retry-after": "1"})
    begun += [whole.begin("b") for _ in range(2)]
    with pytest.raises(ApiError):
        whole.begin("c")
    begun[0].end()
    whole.begin("c")


@contextmanager
def unfinished(client: Client, count: int, *, sent: int, length: int) -> Iterator[None]:
    """Requests of so many bytes, of which some were sent."""
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(client.connect())
            connection.sendall(raw(CHAT, b"x" * length)[: -(length - sent) or None])
        yield


def test_bodies_that_do_not_end_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 of 31 MB took 3.4 GB, and 2.4 stayed."""
    monkeypatch.setattr(load, "MOST_TOTAL", 30_000)
    monkeypatch.setattr(load, "FREE", 1000)
    with Server() as server:
        whole = server.guard._load
        with unfinished(server.client, 3, sent=9000, length=10_000):
            until(lambda: whole.num_bytes == 3 * 8000)
            late = server.client.ask(CHAT, b"x" * 9000)
            assert (late.status, late.headers["retry-after"]) == (503, "1")
            assert late.body["error"]["message"].startswith("requests of 24,000 bytes are under way, too many for")
            assert server.client.chat("hi there").said == "hi there"
            assert server.client.ask("/health").status == 200
        until(lambda: whole.num_bytes == 0)
        assert server.client.ask(CHAT, b"x" * 9000).status == 400
        until(lambda: (whole.num_bytes, len(whole._of_address)) == (0, 0))


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_counts_until_its_answer_has_ended(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "FREE", 10)
    with Server() as server, busy(server):
        whole = server.guard._load
        before = whole.num_bytes
        connection = server.client.begin("endless", stream=stream)
        until(lambda: server.num_waiting == 1)
        assert whole.num_bytes > before > 0
        connection.close()
        until(lambda: whole.num_bytes == before)


@pytest.mark.parametrize(("length", "expected"), [(MOST_BYTES + 1, b"413"), (90_000, b"503")])
def test_a_length_that_is_too_large_is_refused_before_the_body_comes(
    length: int, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MOST_TOTAL", 80_000)
    monkeypatch.setattr(load, "FREE", 1000)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
    with Server() as server, server.client.connect() as connection:
        connection.sendall(head.encode())
        assert received_until(connection, b"}}").startswith(b"HTTP/1.1 " + expected)


def test_requests_over_the_limit_are_refused_and_health_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_OF_ADDRESS", 2)
    with Server(batch=2) as server:
        with busy(server, count=2):
            late = server.client.chat("late")
            assert (late.status, late.headers["retry-after"]) == (503, "1")
            assert server.client.ask("/health").status == 200
        until(lambda: server.client.chat("hi there").status == 200)  # once their connections have ended, too
        assert server.client.chat("hi there").said == "hi there"


def test_patience_with_a_client_ends_when_it_takes_what_was_sent() -> None:
    cancelled: list[str] = []
    patient: Any = object.__new__(http.Patient)
    patient.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    patient.transport = SimpleNamespace(abort=lambda: None)
    timer = SimpleNamespace(cancel=lambda: cancelled.append("timer"))
    patient.loop = SimpleNamespace(call_later=lambda seconds, abort: timer)
    patient.pause_writing()
    assert not cancelled
    patient.resume_writing()
    assert cancelled == ["timer"]


def test_connections_that_are_idle_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 of them gave everybody 503 for 75 s."""
    monkeypatch.setattr(http, "MOST_OF_ADDRESS", 8)
    monkeypatch.setattr(http, "HEADER_SECONDS", 3600.0)
    with Server() as server, busy(server) as (under_way,), ExitStack() as stack:
        idle = [stack.enter_context(server.client.connect()) for _ in range(40)]
        for number, connection in enumerate(idle):
            connection.sendall(b"POST /v1" if number % 2 else b"")
        assert server.client.ask("/health").status == 200
        assert server.client.ask("/v1/models").status == 200
        assert all(received(connection) == b"" for connection in idle[:32])  # the oldest were closed
        until(lambda: len(server._http._server.server_state.connections) <= 9)
        server.model.gate.set()
        assert b"tick done" in received_until(under_way, b"}}")


def test_a_connection_whose_request_was_answered_lately_is_not_the_first_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_OF_ADDRESS", 3)
    monkeypatch.setattr(http, "HEADER_SECONDS", 3600.0)
    with Server() as server, ExitStack() as stack:
        first, second, third = (stack.enter_context(server.client.connect()) for _ in range(3))
        until(lambda: len(server._http._server.server_state.connections) == 3)
        for _ in range(2):
            first.sendall(raw(CHAT, request("hi there")))
            assert b"hi there" in received_until(first, b"}}")
            stack.enter_context(server.client.connect())
        assert (received(second), received(third)) == (b"", b"")
        first.sendall(raw(CHAT, request("hi there")))
        assert b"hi there" in received_until(first, b"}}")


def test_connections_of_others_make_room_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(http, "HEADER_SECONDS", 3600.0)
    with Server() as server, ExitStack() as stack:
        idle = [_from(stack, server.client.port, f"127.0.0.{number + 2}") for number in range(9)]
        assert server.client.ask("/health").status == 200
        assert all(received(connection) == b"" for connection in idle[:5])


def _from(stack: ExitStack, port: int, address: str) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(address, 0))
    return stack.enter_context(made)


def test_the_first_headers_have_less_time_than_those_of_a_further_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEADER_SECONDS", 0.1)
    with Server() as server:
        for begin in (b"", b"POST /v1", raw(CHAT, request("x"))[:40]):
            with server.client.connect() as connection:
                connection.sendall(begin)
                assert received(connection) == b""
        with server.client.connect() as connection:
            for _ in range(2):
                connection.sendall(raw(CHAT, request("hi there")))
                assert b"hi there" in received_until(connection, b"}}")
                time.sleep(0.3)


# The log


def test_each_refusal_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log had answers alone."""
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(load, "MOST_BYTES", 10_000)
    access = Access("127.0.0.1", "secret-key")
    with Server(access=access, most_waiting=1) as server:
        port = server.client.port
        client = Client(port, {"Authorization": "Bearer secret-key"})
        server.client.ask("/v1/models", x_api_key="another-key")
        client.ask("/v1/models", Origin="http://evil.com")
        client.ask("/v1/nothing?key=secret-key")
        client.ask("/v1/models/gpt")
        client.chat("x", model="gpt-4o")
        client.ask(CHAT)
        client.chat("x", n=2)
        client.chat("x" * 5000)
        client.ask(CHAT, b"x" * 10_001)
        with client.connect() as connection:
            connection.sendall(raw(CHAT, b"x" * 9, headers="x-api-key: secret-key\r\n")[:-1])
            received_until(connection, b"}}")
        with client.connect() as connection:
            connection.sendall(b"GARBAGE\r\n\r\n")
            received(connection)
        with client.connect() as under_way:  # or the server would be gone
            under_way.sendall(raw(CHAT, request("gated"), headers="x-api-key: secret-key\r\n"))
            until(lambda: server.model.said)
            server.scheduler.stop()
            client.chat("x")
            server.model.gate.set()
            received_until(under_way, b"usage")
        found = [(each.method, each.path, each.status) for each in server.refused]
        assert found == [
            ("GET", "/v1/models", 401), ("GET", "/v1/models", 403), ("GET", "/v1/nothing", 404),
            ("GET", "/v1/models/gpt", 404), ("POST", CHAT, 404), ("GET", CHAT, 405), ("POST", CHAT, 400),
            ("POST", CHAT, 400), ("POST", CHAT, 413), ("POST", CHAT, 408), ("-", "-", 400), ("POST", CHAT, 503),
        ]  # fmt: skip
        assert {each.address for each in server.refused} == {"127.0.0.1"}
        reasons = [each.reason for each in server.refused]
        assert 'there is no model "gpt-4o"; there is tiny, other (triforce serve --serve-as gpt-4o' in reasons[4]
        assert not [each for each in server.refused if "-key" in refused(each)]


def test_a_full_queue_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(most_waiting=1) as server, busy(server):
        waiting = server.client.begin("wait")
        until(lambda: server.num_waiting == 1)
        assert server.client.chat("one more").status == 429
        assert [each.status for each in server.refused] == [429]
        waiting.close()


def test_lines_of_refusals_are_short_and_of_printable_characters() -> None:
    hostile = "\x1b]0;x\x07\r\n2026-01-01 00:00:00 forged\u202e" + "x" * 10_000
    line = refused(Refusal("127.0.0.1", hostile, hostile, 404, hostile))
    assert line.isprintable()
    assert len(line) < 700
    assert refused(Refusal("", "GET", "/", 404, "no")) == "a client GET /: 404, no"


# Web pages


@pytest.mark.parametrize("origin", [PAGE, "http://evil.com", None])
def test_refusals_reach_the_pages_that_are_allowed(origin: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser kept those of the guard, and of errors that nothing handled, from the page."""
    access = Access("127.0.0.1", "secret-key", frozenset({PAGE}))
    with Server(access=access) as server:
        keyed = Client(server.client.port, {"Authorization": "Bearer secret-key"})
        sent = {} if origin is None else {"Origin": origin}
        answers = [
            server.client.ask(CHAT, request("x"), **sent), keyed.ask("/v1/nothing", **sent),
            keyed.ask(CHAT, request("x", n=0), **sent), keyed.ask("/v1/models", **sent),
        ]  # fmt: skip
        monkeypatch.setattr(server.reader, "read", lambda *given: 1 / 0)
        answers.append(keyed.ask(CHAT, request("x"), **sent))
        allowed = [answer.headers.get("access-control-allow-origin") for answer in answers]
        assert allowed == [PAGE if origin == PAGE else None] * 5
        if origin == PAGE:
            assert [answer.status for answer in answers] == [401, 404, 400, 200, 500]
            assert all("Origin" in answer.headers["vary"] for answer in answers)
