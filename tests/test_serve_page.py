"""The page at `/`: its policy, who gets it, and documents for it. In a browser: test_page_browser.py."""

from __future__ import annotations

import re

import pytest

from kit.served import Server, raw, received
from triforce_cli.serve.access import Access
from triforce_cli.serve.page import page

HTML = "text/html,application/xhtml+xml,*/*;q=0.8"
KEYED = Access("127.0.0.1", "secret-key")


def test_a_browser_gets_the_page_and_another_program_a_line() -> None:
    with Server() as server:
        shown, line = server.client.ask("/", Accept=HTML), server.client.ask("/")
        assert (shown.status, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert line.text.startswith("triforce ")
        assert line.text.endswith(" serves tiny\n")
        assert server.client.ask("/", Accept=HTML, Host="evil.com").status == 403
        assert server.client.ask("/", {}, Accept=HTML).status == 405


def test_the_page_is_open_and_has_nothing_of_the_server_in_it() -> None:
    with Server(access=KEYED, names=("secret-model",)) as server:
        shown = server.client.ask("/", Accept=HTML)
        assert (shown.status, "secret" in shown.text) == (200, False)
        assert shown.text == server.client.ask("/", Accept=HTML, Authorization="Bearer secret-key").text
        for path in ("/", "/status", "/metrics", "/v1/models"):
            assert server.client.ask(path).status == 401
        for path in ("/status", "//", "/v1/models", "/documents"):  # a browser asks for them so, too
            assert server.client.ask(path, Accept=HTML).status == 401


def test_nothing_but_the_pages_own_script_and_style_may_run_or_load() -> None:
    headers, text = page().headers, bytes(page().body).decode()
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert (policy["connect-src"], policy["img-src"]) == ("'self'", "data:")
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", policy[f"{kind}-src"]) for kind in ("script", "style"))
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(policy)
    assert not re.search(
        r'\son\w+="|\sstyle="|innerHTML|insertAdjacent|document\.write|\beval\b|https?://(?!www\.w3)', text
    )
    assert len(text.splitlines()) <= 500


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080", True), ("http://localhost:8080", "LOCALHOST:8080", True),
        ("https://localhost", "localhost", True), ("http://[::1]:8080", "[::1]:8080", True),
        ("http://localhost:3000", "localhost:8080", False), ("http://localhost:8080", "127.0.0.1:8080", False),
        ("null", "", False), ("", "", False), ("http://", "", False), ("null", "null", False),
        ("ftp://localhost", "localhost", False), ("http://evil.com", "evil.com", False),
    ],
)  # fmt: skip
def test_the_servers_own_page_may_use_it(origin: str, host: str, allowed: bool) -> None:
    """A page whose name was made to lead here (DNS rebinding) has its own name in both."""
    with Server() as server:
        asked = raw("/v1/chat/completions", {}).replace(
            b"Host: 127.0.0.1", f"Host: {host}\r\nOrigin: {origin}".encode()
        )
        with server.client.connect() as connection:
            connection.sendall(asked.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert received(connection).split(b" ")[1] == (b"400" if allowed else b"403")


def test_a_page_of_another_name_lacks_the_key() -> None:
    with Server(access=KEYED) as server:
        asked = {"Host": "evil.com", "Origin": "http://evil.com"}
        assert server.client.ask("/status", **asked).status == 401


def test_a_document_becomes_the_text_that_ask_gives_the_model() -> None:
    with Server() as server:
        sent = server.client.ask("/documents?name=my%20lease.txt", b"The rent is 300.").body
        text = "[file: my lease.txt]\nThe rent is 300.\n[end of file]\n\n"
        assert sent == {"name": "my lease.txt", "kind": "text", "text": text, "remarks": []}
        found = server.client.ask(
            "/documents?name=x/..%5Cp.html", b"<html><body><p>The <b>rent</b></p></body></html>"
        ).body
        assert (found["name"], found["kind"], "The rent" in found["text"]) == ("p.html", "web page", True)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("lease.pdf", b"The rent", "lease.pdf is named as a document of kind PDF"),
        ("a.bin", b"\x00\x01", "a.bin is no text"),
        ("a.txt", b"caf\xe9", "a.txt"), ("", b"", "document has no text"), ("a.docx", b"PK\x03\x04junk", "a.docx"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused_by_its_name(name: str, data: bytes, said: str) -> None:
    with Server() as server:
        refused = server.client.ask(f"/documents?name={name}", data)
        assert refused.status == 400
        message = refused.body["error"]["message"]
        assert said in message
        assert "/tmp" not in message
