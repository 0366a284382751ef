"""Who may use the server: hosts, origins and keys."""

from __future__ import annotations

import pytest

from kit.served import Client, Server, received_until
from triforce_cli.apis.api import ApiError
from triforce_cli.serve.access import Access, is_loopback

LOCAL = Access("127.0.0.1")
KEYED = Access("0.0.0.0", "secret-key")
PAGE = "http://localhost:3000"
PAGED = Access("127.0.0.1", None, frozenset({PAGE}))
KEYED_PAGED = Access("127.0.0.1", "secret-key", frozenset({PAGE}))


def status(access: Access, headers: dict[str, str], *, method: str = "POST", is_open: bool = False) -> int:
    try:
        access.check(headers, method=method, is_open=is_open)
    except ApiError as error:
        return error.status
    return 200


HOSTS = [
    ("127.0.0.1", True), ("127.0.0.1:8080", True), ("127.0.0.1:", True), ("127.1.2.3:1", True), ("localhost", True),
    ("localhost:99999", True), ("LocalHost:8080", True), ("app.localhost", True), ("[::1]", True), ("[::1]:8080", True),
    ("[0:0:0:0:0:0:0:1]", True),
    ("", False), (" ", False), ("evil.com", False), ("evil.com:8080", False), ("127.0.0.1.evil.com", False),
    ("127.0.0.1.nip.io", False), ("localhost.evil.com", False), ("evillocalhost", False), ("localhost.", False),
    ("127.0.0.1.", False), ("0.0.0.0", False), ("[::]", False), ("[::2]", False), ("192.168.0.1", False),
    ("10.0.0.1:80", False), ("2130706433", False), ("0x7f.1", False), ("127.1", False), ("[::1", False),
    ("::1]", False),
    ("[127.0.0.1", False), (":8080", False), ("evil.com/localhost", False), ("evil.com#@localhost", False),
    ("evil.com?localhost", False), ("localhost,evil.com", False), ("ö.de", False),
    ("[v1.x]", False), ("%6cocalhost", False), ("localhost\x00", False), (".localhost.evil.com", False),
]  # fmt: skip


@pytest.mark.parametrize(("host", "allowed"), HOSTS)
def test_without_a_key_the_host_has_to_be_this_machine(host: str, allowed: bool) -> None:
    """A web page whose name leads here (DNS rebinding) has its own name in Host."""
    assert status(LOCAL, {"host": host}) == (200 if allowed else 403)
    assert status(LOCAL, {"host": host}, method="OPTIONS") == (200 if allowed else 403)
    assert status(LOCAL, {"host": host}, is_open=True) == (200 if allowed else 403)


@pytest.mark.parametrize("host", ["evil.com@localhost", "evil.com:80@localhost", "evil.com\\@127.0.0.1", "@localhost"])
def test_a_host_with_a_user_is_none(host: str) -> None:
    """No browser sends one."""
    assert status(LOCAL, {"host": host}) == 403


def test_a_request_without_a_host_is_refused() -> None:
    assert status(LOCAL, {}) == 403
    assert status(LOCAL, {}, is_open=True) == 403


def test_the_address_that_the_server_listens_on_is_a_host_of_its_own() -> None:
    assert status(Access("127.9.9.9"), {"host": "127.9.9.9:80"}) == 200
    assert status(Access("box.localhost"), {"host": "box.localhost"}) == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.255.255.254", True), ("::1", True), ("localhost", True), ("a.b.localhost", True),
        ("", False), ("0.0.0.0", False), ("::", False), ("128.0.0.1", False), ("example.com", False),
        ("localhost.example.com", False), ("xlocalhost", False),
    ],
)  # fmt: skip
def test_what_is_of_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("origin", ["http://evil.com", "null", "", "http://localhost", "http://127.0.0.1:8080", PAGE])
def test_no_web_page_may_use_the_server_unless_it_is_named(origin: str) -> None:
    headers = {"host": "127.0.0.1", "origin": origin, "authorization": "Bearer secret-key"}
    for access in (LOCAL, KEYED):
        assert status(access, headers) == status(access, headers, method="OPTIONS") == 403
        assert status(access, headers, is_open=True) == 403
    assert status(PAGED, headers) == (200 if origin == PAGE else 403)
    assert status(KEYED_PAGED, headers) == (200 if origin == PAGE else 403)


@pytest.mark.parametrize(
    "origin", [PAGE + "/", PAGE + "0", PAGE.upper(), "https://localhost:3000", "http://localhost:300", f"{PAGE} {PAGE}"]
)
def test_an_origin_is_compared_whole(origin: str) -> None:
    assert status(PAGED, {"host": "127.0.0.1", "origin": origin}) == 403


def test_a_named_page_still_needs_the_host() -> None:
    assert status(PAGED, {"host": "evil.com", "origin": PAGE}) == 403


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"authorization": "Bearer secret-key"}, True),
        ({"authorization": "bearer secret-key"}, True),
        ({"authorization": "BEARER   secret-key "}, True),
        ({"x-api-key": "secret-key"}, True),
        ({"authorization": "Basic eA==", "x-api-key": "secret-key"}, True),
        ({}, False),
        ({"authorization": ""}, False),
        ({"authorization": "Bearer"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": "secret-key"}, False),
        ({"authorization": "Basic secret-key"}, False),
        ({"authorization": "Bearer secret-ke"}, False),
        ({"authorization": "Bearer secret-keyx"}, False),
        ({"authorization": "Bearer Secret-key"}, False),
        ({"authorization": "Bearer s"}, False),
        ({"authorization": "Bearer wrong", "x-api-key": "secret-key"}, True),
        ({"authorization": "Bearer sécret-key"}, False),
        ({"authorization": "Bearer \x80\xff"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "secret-key, x"}, False),
    ],
)
def test_every_request_carries_the_key(headers: dict[str, str], allowed: bool) -> None:
    """Whatever its host is: the key shows that it is no page of others."""
    for host in ({}, {"host": "evil.com"}, {"host": "127.0.0.1"}):
        assert status(KEYED, host | headers) == (200 if allowed else 401)
        assert status(KEYED, host | headers, method="OPTIONS") == (200 if allowed else 401)
        assert status(KEYED, host | headers, is_open=True) == 200


def test_a_browsers_question_carries_no_key() -> None:
    assert status(KEYED_PAGED, {"origin": PAGE}, method="OPTIONS") == 200
    assert status(KEYED_PAGED, {"origin": PAGE}) == 401
    assert status(KEYED_PAGED, {"origin": PAGE}, method="GET") == 401
    assert status(KEYED_PAGED, {"origin": "http://evil.com"}, method="OPTIONS") == 403
    assert status(KEYED_PAGED, {}, method="OPTIONS") == 401


BODY = {"messages": [{"role": "user", "content": "hi there"}]}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")


def test_each_path_asks_for_the_key() -> None:
    with Server(access=KEYED_PAGED) as server:
        client, keyed = server.client, Client(server.client.port, {"Authorization": "Bearer secret-key"})
        assert (client.ask("/health").status, client.ask("/health").body) == (200, {"status": "ok"})
        for path in ("/", "/status", "/metrics", "/v1/models", "/v1/models/tiny"):
            assert [who.ask(path).status for who in (client, keyed)] == [401, 200]
        for path in PATHS:
            refused = client.ask(path, BODY)
            assert refused.status == 401
            kind = refused.body["error"]["type"]
            assert (kind, "secret" in refused.text) == ("authentication_error", False)
        for path in ("/health/", "//health", "/healthx", "/v1/../health"):
            assert client.ask(path).status == 401
        assert client.ask("/v1/chat/completions", b"\xff" * 100_000).status == 401  # unread
        assert keyed.chat("hi there").said == "hi there"
        question = {"Origin": PAGE, "Access_Control_Request_Method": "POST",
                    "Access_Control_Request_Headers": "authorization, content-type"}  # fmt: skip
        allowed = client.ask("/v1/chat/completions", method="OPTIONS", **question)
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        answered = keyed.ask("/v1/chat/completions", BODY, Origin=PAGE)
        assert (answered.said, answered.headers["access-control-allow-origin"]) == ("hi there", PAGE)
        question["Origin"] = "http://evil.com"
        refused = client.ask("/v1/chat/completions", method="OPTIONS", **question)
        assert (refused.status, "access-control-allow-origin" in refused.headers) == (403, False)
        assert server.model.said == ["hi there"] * 2


@pytest.mark.few(5)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "BREW", "get", "HEAD", "PUT", "DELETE", "PATCH", "TRACE"])
def test_the_key_is_asked_for_before_a_path_or_a_method(method: str) -> None:
    """Nothing but the paths that are open tells whether it is there."""
    targets = (
        *("/", "/v1", "/v1/models/x", "/v1/chat/completions", "/v1/messages/", "/none", "//", "/%2e%2e/health", "*"),
        *(
            "/health%20",
            "/health;x",
            "/health%00",
            "/HEALTH",
            "/v1/../health",
            "http://127.0.0.1/health",
            "/?x=/health",
        ),
    )
    with Server(access=KEYED_PAGED) as server:
        for target in targets:
            with server.client.connect() as connection:
                connection.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n".encode())
                assert received_until(connection, b"\r\n").split(b" ")[1] == b"401", target
        with server.client.connect() as connection:
            connection.sendall(f"{method} /%68ealth?x HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert received_until(connection, b"\r\n").split(b" ")[1] in (b"200", b"405")


def test_without_a_key_each_path_asks_for_the_host() -> None:
    with Server() as server:
        for path in ("/", "/health", "/v1/models"):
            assert server.client.ask(path, Host="evil.com").status == 403
            assert server.client.ask(path, Host="localhost:1").status == 200
        for path in PATHS:
            assert server.client.ask(path, BODY, Host="evil.com").status == 403
            assert server.client.ask(path, BODY, Origin="http://evil.com").status == 403
        assert server.model.said == []
