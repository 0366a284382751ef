"""A crowd of clients at one server, and the faults that it shows: wrong texts, leaks, requests that hang.

A request is one of a few distinct ones: of the four APIs, with a prompt from a novel of which some begin alike, plain,
with a tool that has to be called or with a schema, greedy or sampled with a seed. Most clients take the whole
answer, as a stream or not. The others go away: once the request is sent, while a long prompt is read, after some pieces
of a stream, in the middle of sending. Each answer that was taken has to be the one that a fresh server gives when it is
asked that alone.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import psutil
import texts
from report import say
from server import Server, serving

from offload.engine.engine import load_tokenizer
from offload.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from kit.api_clients import CLIENTS, parse, without_names

Document = dict[str, Any]
COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
BATCH, AT_A_TIME = 4, 8  # answers and clients, so half of them wait
EVERY = 50  # requests between two looks at the process
ANSWER_TOKENS, PROMPT_TOKENS = (16, 96), (40, 1400)
CONTEXT = 16_384
LONG_TOKENS = 9000  # of a prompt whose client leaves while it is read
NUM_BEGINNINGS = 5  # of the other prompts
WHOLE, AT_ONCE, READING, WRITING, TORN = "whole", "at once", "reading", "writing", "torn"
SHARES = {
    WHOLE: 70,
    AT_ONCE: 10,
    READING: 4,
    WRITING: 10,
    TORN: 6,
}  # of requests, by the moment of their clients' leave
NUM_PIECES = 4  # of a stream, before a client leaves while it is written
HUNG_SECONDS = 600.0
NUM_LOOKS, LOOK_SECONDS = 10, 0.5  # at a server without work
FLAT = 0.03  # growth of memory from the second to the last quarter that counts as none
NUM_POOL = 8  # threads that the event loop's pool may begin late
STORE_GB = "0.3"  # less than the prompts have, so rows are removed from the disk, too
_FAILURE = re.compile(r"Traceback|Error|error|: 5\d\d, ")  # in a line of the log
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["Bath", "Lyme", "Kellynch"]}, "days": {"enum": [1, 2, 3, 7]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["calm", "grave", "merry"]}, "is_long": {"type": "boolean"}},
    "required": ["mood", "is_long"],
    "additionalProperties": False,
}
# For the demo model, which has none: calls need marks.
TEMPLATE = """
{%- for tool in tools or [] %}{{ 'A call of ' + (tool | tojson) + ' is <tool_call>...</tool_call>\\n\\n' }}{% endfor %}
{%- for message in messages %}{{ message.role + ':' + message.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


@dataclass(frozen=True)
class Sent:
    """A request as it is sent. number: of the distinct request that it is, in their order; None for a long prompt.
    leaves: the moment at which its client leaves."""

    number: int | None
    path: str
    body: Document
    leaves: str = WHOLE


@dataclass(frozen=True)
class Look:
    """A look at the server's process, after so many requests."""

    num_requests: int
    seconds: float
    memory: int
    num_files: int
    num_threads: int


@dataclass(frozen=True)
class Soaked:
    """A soak: looks at the server before it, at every EVERY requests and after it; counts; its faults, in words."""

    looks: Sequence[Look]
    counts: Mapping[str, float]
    faults: Sequence[str]


def distinct(tokenizer: Tokenizer, count: int) -> list[Sent]:
    """The requests that are asked again and again."""
    novel = tokenizer.encode(texts.NOVEL.read_text(encoding="utf-8"))
    starts = [len(novel) * each // NUM_BEGINNINGS for each in range(NUM_BEGINNINGS)]
    found, paths, (least, most) = list[Sent](), list(CLIENTS), PROMPT_TOKENS
    for number in range(count):
        length, start = least + (most - least) * (7 * number % 11) // 10, starts[number % NUM_BEGINNINGS]
        path, text = paths[number % len(paths)], tokenizer.decode(novel[start : start + length])
        body = _prompt(path, text) | _form(path, _kind(number)) | _sampling(path, number)
        found.append(Sent(number, path, body))
    return found


def _prompt(path: str, text: str) -> Document:
    name = {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path)
    return {name: text} if name else {"messages": [{"role": "user", "content": text}]}


def _sampling(path: str, number: int) -> Document:
    """A limit, a temperature, and a seed where the API has one."""
    least, most = ANSWER_TOKENS
    limit = most if _kind(number) else least + (most - least) * (number % 5) // 4  # calls and JSON are to be whole
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return {name: limit} | (
        {"temperature": 0} if path == MESSAGES else {"temperature": 0.4 * (number % 3), "seed": number}
    )


def _kind(number: int) -> int:
    return number // len(CLIENTS) % 3


def _form(path: str, kind: int) -> Document:
    """The form of an answer: 0 is free, 1 a call, 2 JSON of a schema. Completions have no calls."""
    about = {"name": "visit", "description": "Plan a visit."}
    function = about | {"parameters": PARAMETERS}
    shape = {"type": "json_schema", "schema": SCHEMA}
    if kind == 0 or (kind == 1 and path == COMPLETIONS):
        return {}
    if kind == 2:
        return {"output_config": {"format": shape}} if path == MESSAGES else {"json_schema": SCHEMA}
    if path == MESSAGES:
        return {"tools": [about | {"input_schema": PARAMETERS}], "tool_choice": {"type": "any"}}
    tool = {"type": "function", **(function if path == RESPONSES else {"function": function})}
    return {"tools": [tool], "tool_choice": "required"}


def sequence(asked: Sequence[Sent], tokenizer: Tokenizer, count: int, seed: int) -> list[Sent]:
    """The requests of a crowd, in the order in which they are sent."""
    chosen, novel = random.Random(seed), tokenizer.encode(texts.NOVEL.read_text(encoding="utf-8"))
    moments = chosen.choices([*SHARES], [*SHARES.values()], k=count)
    found = []
    for each, leaves in zip(range(count), moments, strict=True):
        number, path, body = each % len(asked), asked[each % len(asked)].path, asked[each % len(asked)].body
        if leaves == READING:
            start = chosen.randrange(len(novel) - LONG_TOKENS)
            body = {**body, **_prompt(path, tokenizer.decode(novel[start : start + LONG_TOKENS]))}
        if leaves in (READING, WRITING) or chosen.random() < 0.5:
            body = {**body, "stream": True}
            body |= {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
        found.append(Sent(None if leaves == READING else number, path, body, leaves))
    return found


def ask(server: Server, sent: Sent) -> Document | None:
    """The part of the reply that is always the same; None if the client left. Raises AssertionError."""
    data = json.dumps(sent.body).encode()
    with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=HUNG_SECONDS)) as connection:
        connection.putrequest("POST", sent.path)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(data)))
        connection.endheaders(data[: len(data) // 2] if sent.leaves == TORN else data)
        if sent.leaves in (AT_ONCE, TORN):
            return None
        response = connection.getresponse()
        assert response.status == 200, response.read()
        if sent.leaves == WHOLE:
            text = response.read().decode()
            return _said(CLIENTS[sent.path](parse(text)) if "stream" in sent.body else json.loads(text))
        _read_until(response, sent.leaves)
        return None


def _said(document: Document) -> Document:
    """A reply without names, times and numbers of cached tokens."""
    usage = document["usage"]
    return without_names(document) | {"usage": usage.get("completion_tokens", usage.get("output_tokens"))}


def _read_until(response: http.client.HTTPResponse, moment: str) -> None:
    """Read a stream up to the first word on the prefill, or so many of its pieces."""
    num_pieces = 0
    for line in response:
        num_pieces += line.startswith(b"data: ")
        if num_pieces >= NUM_PIECES if moment == WRITING else line.startswith(b": prefill"):
            return


def _tried(server: Server, sent: Sent) -> Document | str | None:
    """The reply, or the error in words."""
    try:
        return ask(server, sent)
    except (AssertionError, OSError, http.client.HTTPException, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"


def soak(model: Path, draft: Path | None, count: int, num_distinct: int, seed: int) -> Soaked:
    """`count` requests of a crowd, compared with `num_distinct` that are asked alone."""
    tokenizer = load_tokenizer(model, draft)
    asked = distinct(tokenizer, num_distinct)
    work = sequence(asked, tokenizer, count, seed)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("files", "cache", "model"):
            (folder / part).mkdir()
        options = ["--model", str(with_template(model, folder / "model")), "--draft", str(draft or "none")]
        options += ["--dtype", "fp32", "--batch", str(BATCH), "--context", str(CONTEXT)]
        variables = {"TMPDIR": str(folder / "files"), "TRIFORCE_CACHE_DIR": str(folder / "cache")}
        say(f"  {num_distinct} requests, each alone")
        with serving(*options, "--no-store", **variables) as server:
            plan, alone = server.status()["plan"], [ask(server, each) for each in asked]
        with serving(*options, "--store-size", STORE_GB, **variables) as server:
            if server.status()["plan"] != plan:  # texts with a seed depend on it
                raise SystemExit(f"there are two plans: {plan} {server.status()['plan']}")
            found = _crowd(server, work, asked[:AT_A_TIME], alone)
        left = [f"a file is left: {path.relative_to(folder)}" for path in (folder / "files").rglob("*")]
    return replace(found, faults=[*found.faults, *left])


def _crowd(server: Server, work: Sequence[Sent], first: Sequence[Sent], alone: Sequence[Document | None]) -> Soaked:
    """The work, after the `first` requests, so that whatever is made once is there."""
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        list(clients.map(partial(ask, server), first))
        start, faults = time.perf_counter(), list[str]()
        looks = [_idle(server, 0, start)]
        for done, (sent, answer) in enumerate(zip(work, clients.map(partial(_tried, server), work), strict=True), 1):
            if isinstance(answer, str) or (answer is not None and answer != alone[sent.number or 0]):
                faults.append(f"request {done}, {sent.number} of {sent.path}, {sent.leaves}: {answer}")
                say(f"  {faults[-1][:800]}; alone {alone[sent.number or 0]}"[:1600])
            if done % EVERY == 0:
                looks.append(_look(server, done, start))
                say(f"  {done:,} of {len(work):,} requests, {looks[-1].memory / 1e6:.0f} MB, {len(faults)} faults")
    faults += _still_there(server)
    looks.append(_idle(server, len(work), start))
    lines = server.log.read_text(errors="replace").splitlines()
    counts = {**Counter(f"clients: {each.leaves}" for each in work), **_counts(lines), **server.counts()}
    return Soaked(looks, counts, [*faults, *_leaks(looks), *_failures(lines)])


def with_template(model: Path, folder: Path) -> Path:
    """The model, or where it has no chat template, the same in `folder` with one."""
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    if "chat_template" in settings or (model / "chat_template.jinja").exists():
        return model
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def _look(server: Server, num_requests: int, start: float) -> Look:
    process, seconds = psutil.Process(server.process.pid), time.perf_counter() - start
    return Look(num_requests, seconds, process.memory_info().rss, process.num_fds(), process.num_threads())


def _idle(server: Server, num_requests: int, start: float) -> Look:
    """A look once the connections of clients that have gone are closed."""
    looks = []
    for _ in range(NUM_LOOKS):
        time.sleep(LOOK_SECONDS)
        looks.append(_look(server, num_requests, start))
    return min(looks, key=lambda look: look.num_files)


def _still_there(server: Server) -> Iterator[str]:
    """Requests that do not end although all clients have."""
    deadline = time.monotonic() + HUNG_SECONDS
    while (status := server.status())["running"] or status["waiting"]:
        if time.monotonic() > deadline:
            yield f"requests hang: {status['running']} run, {status['waiting']} wait"
            return
        time.sleep(LOOK_SECONDS)


def _counts(lines: Sequence[str]) -> dict[str, int]:
    """The log's lines by their kind."""
    kinds = {"answers": " prompt tokens", "left": "the client went away", "left while read": "; left at"}
    return {"log: lines": len(lines)} | {
        f"log: {kind}": sum(mark in line for line in lines) for kind, mark in kinds.items()
    }


def _leaks(looks: Sequence[Look]) -> Iterator[str]:
    first, last, quarter = looks[0], looks[-1], len(looks) // 4
    second, fourth = (
        max(each.memory for each in some) for some in (looks[quarter : 2 * quarter + 1], looks[-quarter:])
    )
    if fourth > (1 + FLAT) * second:
        yield f"memory grew from {second / 1e6:.0f} MB in the second quarter to {fourth / 1e6:.0f} MB in the last"
    if last.num_files > first.num_files:
        yield f"files grew from {first.num_files} to {last.num_files}"
    if last.num_threads > first.num_threads + NUM_POOL:
        yield f"threads grew from {first.num_threads} to {last.num_threads}"


def _failures(lines: Sequence[str]) -> list[str]:
    return [f"the log says: {line}" for line in lines if _FAILURE.search(line)]
