"""A server in the tests' process whose model is a stand-in, and clients of it. No tests in here.

A prompt is the texts of its messages, one after the other, a token for each byte. The first word says what the model
does: "prefill" reads the prompt until it is broken off, or the gate opens; "endless" goes on until it is left, "gated"
until the gate opens; "fail" and "break" raise an error in the second pass, "refuse" and "crash" in the prefill. Any
other text is said again, a word in each pass.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Generic, TypeVar

import pytest

from kit.api_clients import parse
from offload.decode.sampling import SamplingParams
from offload.engine.request import GenerationRequest
from offload.errors import TriforceError
from offload.metrics import LevelStats, Stats
from offload.progress import OnProgress, Progress
from test_cli_fake import Step
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.several import Answers
from triforce_cli.answering.thoughts import Marks, marks_of
from triforce_cli.batch.records import Record
from triforce_cli.serve.access import Access
from triforce_cli.serve.app import Service, web_application
from triforce_cli.serve.catalogue import Catalogue
from triforce_cli.serve.guard import Refusal
from triforce_cli.serve.http import HttpServer, listening_socket
from triforce_cli.serve.job import Ending, Job
from triforce_cli.serve.reader import Reader
from triforce_cli.serve.scheduler import Scheduler
from triforce_cli.serve.served import Served
from triforce_cli.serve.turns import Turns
from triforce_cli.tools.calls import Calls

SPAN, MANY = 5, 1_000_000  # blocks after which a prefill stays; all of them
PATIENCE_SECONDS = 60.0  # a loaded machine is slow; a test that passes does not wait so long
Key = TypeVar("Key")
CHAT = "/v1/chat/completions"
PLANNED = {  # the part of the status that follows from a plan
    "plan": "On a GPU: target; nothing streamed in a full pass; predicted 20 ms a token.",
    "at_a_time": 1,
    "cites": True,
    "memory": {
        "devices": [{"name": "a GPU", "bytes": 3 << 30, "by_purpose": {"kv cache": 1 << 30, "target layers": 2 << 30}}],
        "host": {"bytes": 0, "by_purpose": {}},
    },
}
WANTED = Wanted(max_tokens=1000, sampling=SamplingParams())


class Model:
    """The stand-in for an engine. num_passes: that were run. said: the prompts in the order in which they began. left:
    the prompts whose answers ended. requests: as they began. began_at: the number of passes before each. kept: the
    number of prompts whose rows were kept. gate: see above. has_all_weights: so that answers may go on in
    prefills. breaks: once it is set, a text "broken" fails, and "ending" ends."""

    def __init__(self, num_sequences: int, capacity: int) -> None:
        self.plan = SimpleNamespace(request=SimpleNamespace(num_sequences=num_sequences, capacity=capacity))
        self.tokenizer: Any = None
        self.num_passes = self.num_prefill_blocks = self.most_at_a_time = self.kept = 0
        self.said: list[str] = []
        self.left: list[str] = []
        self.requests: list[GenerationRequest] = []
        self.began_at: list[int] = []
        self.has_all_weights = False
        self.breaks = threading.Event()
        self.gate = threading.Event()
        self.keeping = threading.Event()  # rows are kept at once while it is set
        self.keeping.set()

    def steps(self, text: str) -> Iterator[Step]:
        kind, *_ = text.partition(" ")
        pieces = [word for word in text.replace(" ", "\0 ").split("\0") if word] or [""]
        if kind == "endless":
            while True:
                time.sleep(0.001)
                yield _step(" more")
        if kind == "gated":
            while not self.gate.wait(0.002):
                yield _step(" tick")
            yield _step(" done", "stop")
        if kind in ("broken", "ending"):
            while not self.breaks.wait(0.002):
                yield _step(" tick")
            if kind == "broken":
                raise TriforceError("the model failed")
            yield _step(" done", "stop")
        if kind in ("fail", "break"):
            yield _step("begun")
            raise TriforceError("the model failed") if kind == "fail" else RuntimeError("the model broke")
        for index, piece in enumerate(pieces):
            yield _step(piece, "stop" if index == len(pieces) - 1 else None)


def _step(text: str, finish: str | None = None) -> Step:
    return Step(text, list(text.encode()), finish)


class Sequences(Generic[Key]):
    """As offload.engine.sequences has them."""

    def __init__(self, engine: Model) -> None:
        self._engine = engine
        self._running: dict[Any, tuple[str, Iterator[Step], GenerationRequest]] = {}
        self._read = set[Any]()  # keys of prompts that were read to their ends
        self._joining: Any = None

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._engine.plan.request.num_sequences

    @property
    def may_go_on_in_prefills(self) -> bool:
        return self._engine.has_all_weights

    def join(self, key: Any, request: GenerationRequest, *, on_progress: OnProgress) -> None:
        self._joining = key
        self._prefill(key, bytes(request.prompt).decode(), request, on_progress)
        self._joining = None

    def _prefill(self, key: Any, text: str, request: GenerationRequest, on_progress: OnProgress) -> None:
        self._running[key] = (text, self._engine.steps(text), request)
        self._engine.said.append(text)
        self._engine.most_at_a_time = max(self._engine.most_at_a_time, len(self._running))
        self._engine.requests.append(request)
        self._engine.began_at.append(self._engine.num_passes)
        for done in range(2):
            on_progress(Progress("prefill", done, 2, "tokens"))
        while text.startswith("prefill") and not self._engine.gate.wait(0.001):
            self._engine.num_prefill_blocks += 1
            done = self._engine.num_prefill_blocks
            on_progress(Progress("prefill", done, MANY, "tokens", stays=done % SPAN == 0))
        on_progress(Progress("prefill", MANY, MANY, "tokens", stays=True))
        if text.startswith("refuse"):
            raise TriforceError("the prompt cannot be read")
        if text.startswith("crash"):
            raise RuntimeError("the prefill broke")
        self._read.add(key)

    def steps(self) -> list[tuple[Any, Step]]:
        begun = [key for key in self._running if self._joining is None or key != self._joining]
        assert self._read.issuperset(begun), "a prefill that was broken off can only leave"
        self._engine.num_passes += 1
        return [(key, next(self._running[key][1])) for key in begun]

    def leave(self, key: Any, *, on_end: Callable[[Stats], None]) -> Stats:
        text, _, request = self._running.pop(key)
        self._read.discard(key)
        stats = Stats(
            prompt_tokens=len(request.prompt),
            reused_tokens=self._engine.said.count(text) - 1,
            output_tokens=3,
            first_token_seconds=0.5,
            decode_seconds=0.25,
            levels=[LevelStats("target", drafted=4, accepted=3)],
        )
        self._engine.left.append(text)
        on_end(stats)
        assert self._engine.keeping.wait(PATIENCE_SECONDS)
        self._engine.kept += 1
        return stats

    def drop(self, key: Any) -> None:
        self._read.discard(key)
        if key in self._running:
            self._engine.left.append(self._running.pop(key)[0])

    def close(self) -> None:
        self._running.clear()


class Prompts:
    """As triforce_cli.batch.prompts has them. Replies may have thoughts."""

    def check(self, record: Record) -> None: ...

    def of(self, record: Record, defaults: Mapping[str, Any]) -> Prompt:
        said = record.messages.said if record.messages is not None else ()
        text = record.prompt or "".join(message["content"] or "" for message in said)
        tools = record.variables.get("tools")
        return Prompt(
            array("i", list(text.encode())),
            is_chat=record.messages is not None,
            marks=(marks_of(text) or Marks("<think>", "</think>")) if record.messages is not None else None,
            calls=Calls(tools, "<|channel|>commentary" if marks_of(text) else "<tool_call>", record.choice)
            if tools
            else None,
        )


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[tuple[str, Any]]:
        return parse(self.text)

    @property
    def said(self) -> str:
        """The text of a chat completion, whole or as a stream."""
        assert self.status == 200, self.text
        if self.headers["content-type"].startswith("text/event-stream"):
            choices = [choice for _, data in self.events if data != "[DONE]" for choice in data["choices"]]
            return "".join(choice["delta"].get("content", "") for choice in choices)
        return str(self.body["choices"][0]["message"]["content"])


@dataclass(frozen=True)
class Client:
    """Of the server at a port of this machine."""

    port: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    def ask(self, path: str, body: object = None, method: str = "", **headers: str) -> Response:
        """body: as JSON, unless it is bytes already."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)) as connection:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            method = method or ("GET" if body is None else "POST")
            connection.request(method, path, data, {**self.headers, **sent})
            response = connection.getresponse()
            text = response.read().decode()
            return Response(response.status, {name.lower(): value for name, value in response.getheaders()}, text)

    def chat(self, text: str, **fields: Any) -> Response:
        return self.ask(CHAT, request(text, **fields))

    def begin(self, text: str, **fields: Any) -> socket.socket:
        """A connection on which a chat completion was asked for."""
        connection = self.connect()
        connection.sendall(raw(CHAT, request(text, **fields)))
        return connection


def request(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def raw(path: str, body: object, *, version: str = "1.1", headers: str = "") -> bytes:
    """A request as it is sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def received_until(connection: socket.socket, mark: bytes) -> bytes:
    found = b""
    while mark not in found:
        part = connection.recv(65536)
        assert part, found
        found += part
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


class Server:
    """A context manager: a server on a port of its own, whose scheduler runs in a thread. error: that ended the
    scheduler. ended: (name, whether its client had gone) of each answer. num_read: of its prompt's tokens, if not
    all."""

    def __init__(
        self,
        *,
        batch: int = 1,
        most_waiting: int = 3,
        names: tuple[str, ...] = ("tiny", "other"),
        context: int = 4096,
        access: Access | None = None,
        wanted: Wanted = WANTED,
        shows_thoughts: bool = True,
        keeps_billing: bool = False,
    ) -> None:
        self.model, self.ended = Model(batch, context), list[tuple[str, bool]]()
        self.num_read: list[int | None] = []
        self.error: BaseException | None = None
        self.refused = list[Refusal]()
        self.scheduler = Scheduler(most_waiting=most_waiting, on_end=self._on_end)
        prompts: Any = Prompts()
        most = {"context": context, "most_choices": most_waiting}
        self.reader = Reader(prompts, wanted, **most, cites=True, keeps_billing=keeps_billing)
        self.notes: list[str] = []  # of the log
        setup: Any = None  # nothing is loaded
        catalogue, self.turns = Catalogue(setup, names), Turns[Served]()
        catalogue.loaded(names[0], context)
        self.turns.loaded(names[0], Served(names, context, self.reader, PLANNED))
        self.service = Service(catalogue, self.turns, self.scheduler, self.notes.append, shows_thoughts=shows_thoughts)
        self._bound = listening_socket("127.0.0.1", 0)
        self.client = Client(self._bound.getsockname()[1])
        self.guard = web_application(self.service, access or Access("127.0.0.1"), self.refused.append)
        self._http = HttpServer(self.guard, self._bound, on_end=self.scheduler.stop)
        self._patch = pytest.MonkeyPatch()
        self.thread = threading.Thread(target=self._run, name="passes")

    def __enter__(self) -> Server:
        self._patch.setattr("offload.engine.sequences.Sequences", Sequences)
        self.thread.start()
        until(lambda: self._http._server.started or self.error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.model.gate.set()
        self.model.keeping.set()
        self.stop_now()
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        self._patch.undo()

    def stop_now(self) -> None:
        """As two signals do."""
        self.scheduler.hear(signal.SIGTERM)
        self.scheduler.hear(signal.SIGTERM)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler._waiting)

    def _run(self) -> None:
        try:
            with self._http, Answers[Job](self.model) as answers:  # type: ignore[arg-type]
                self.scheduler.run(answers, self.turns.has_to_leave)
        except BaseException as error:
            self.error = error

    def _on_end(self, ending: Ending) -> None:
        self.num_read.append(ending.num_read)
        self.ended.append((ending.name, ending.is_gone))


@contextmanager
def busy(server: Server, *, count: int = 1) -> Iterator[list[socket.socket]]:
    """So many answers under way until the gate opens."""
    begun = len(server.model.said)
    connections = [server.client.begin("gated") for _ in range(count)]
    try:
        until(lambda: len(server.model.said) == begun + count)
        yield connections
    finally:
        server.model.gate.set()
        for connection in connections:
            connection.close()
        until(lambda: server.model.left.count("gated") == server.model.said.count("gated"))
        server.model.gate.clear()
