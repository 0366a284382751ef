"""A relay between a client and a server, which measures each answer by the server's counts.

Small models seldom call a tool by themselves, and write long answers. So the relay demands a call of a tool at the
beginning of a turn, makes answers greedy and limits their tokens. It hands on one request for an answer at a time.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from report import say
from server import PATIENCE_SECONDS, Server

Document = dict[str, Any]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ANSWERS = ("/v1/chat/completions", RESPONSES, MESSAGES)
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NOT_HANDED_ON = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding", "date", "server")
_MOST_OF_ERROR = 300  # characters
_COUNT_SECONDS = 5.0  # until an answer that has ended is counted


@dataclass(frozen=True)
class Measured:
    """An answer. first_seconds: from the request to its first token. seconds: to its end."""

    prompt: int
    cached: int
    new: int
    first_seconds: float
    seconds: float


@dataclass
class Relay:
    """url: in place of the server's. tool: its name; "" for none."""

    server: Server
    tool: str
    max_tokens: int
    url: str = ""
    _measured: list[Measured] = field(default_factory=list)
    _one: threading.Lock = field(default_factory=threading.Lock)

    def measured(self) -> list[Measured]:
        """The answers of a turn that has ended."""
        with self._one:
            found, self._measured = self._measured, []
        return found

    def changed(self, path: str, body: Document) -> Document:
        """The request that is handed on. A call is demanded once a turn: agents ask for the rest of one that is cut."""
        limits = {name: min(body[name] or self.max_tokens, self.max_tokens) for name in _LIMITS if name in body}
        limits = limits or {"max_output_tokens" if path == RESPONSES else "max_tokens": self.max_tokens}
        demands = not self._measured and _begins_turn(path, body) and self.tool in _names(body)
        return {**body, **limits, **(_choice(path, self.tool) if demands else {}), "temperature": 0}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with self._one:
            before, start = self.server.counts(), time.perf_counter()
            yield
            seconds, counts = time.perf_counter() - start, self.server.counts()
            while counts.get("requests_total", 0) == before.get("requests_total", 0):
                if time.perf_counter() > start + seconds + _COUNT_SECONDS:
                    return  # it was refused
                time.sleep(0.02)
                counts = self.server.counts()
            names = ("prompt_tokens_total", "cached_tokens_total", "generated_tokens_total")
            tokens = (int(counts[name] - before[name]) for name in names)
            first = counts["first_token_seconds_sum"] - before["first_token_seconds_sum"]
            self._measured.append(Measured(*tokens, first, seconds))


@contextmanager
def relaying(server: Server, tool: str, max_tokens: int) -> Iterator[Relay]:
    """A relay that runs while the context does."""
    relay = Relay(server, tool, max_tokens)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"relay": relay})) as http_server:
        relay.url = f"http://127.0.0.1:{http_server.server_port}"
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        try:
            yield relay
        finally:
            http_server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    relay: Relay
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._hand_on(b"")

    def do_POST(self) -> None:
        data, path = self.rfile.read(int(self.headers.get("content-length", "0"))), urlsplit(self.path).path
        if path not in ANSWERS:
            self._hand_on(data)
            return
        with self.relay.measuring():
            self._hand_on(json.dumps(self.relay.changed(path, json.loads(data))).encode())

    def _hand_on(self, data: bytes) -> None:
        """Send the request to the server, and its response to the client, piece by piece."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_HANDED_ON}
        address = urlsplit(self.relay.server.url).netloc
        with closing(http.client.HTTPConnection(address, timeout=PATIENCE_SECONDS)) as connection:
            connection.request(self.command, self.path, data or None, headers)
            response = connection.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _NOT_HANDED_ON:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while piece := response.read1(65_536):
                if response.status >= 400:
                    say(f"  {self.path}: status {response.status}, {piece.decode(errors='replace')[:_MOST_OF_ERROR]}")
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _names(body: Mapping[str, Any]) -> list[str]:
    return [str(tool.get("function", tool).get("name")) for tool in body.get("tools") or ()]


def _choice(path: str, name: str) -> Document:
    kinds = {MESSAGES: {"type": "tool", "name": name}, RESPONSES: {"type": "function", "name": name}}
    return {"tool_choice": kinds.get(path, {"type": "function", "function": {"name": name}})}


def _begins_turn(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the last message is a user's, and no result of a call."""
    last = (body["input" if path == RESPONSES else "messages"] or [{}])[-1]
    parts = last.get("content") if isinstance(last.get("content"), list) else []
    return last.get("role") == "user" and not any(part.get("type") == "tool_result" for part in parts)
