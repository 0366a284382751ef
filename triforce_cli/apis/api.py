"""The interface of an HTTP API for answers: how it reads a request, and how it writes a reply, whole or as a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from offload.errors import UsageError
from triforce_cli.prompts.messages import Note

PLACE = "the request"  # its name in messages
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}  # that some clients split events at
Score = Mapping[str, Any]  # see triforce_cli.answering.answer.Part
Fields = dict[str, Any]  # of a record, see triforce_cli.batch.records


class ApiError(Exception):
    """A request that is not answered. status: of HTTP. code: a word for programs, or "". headers: of the response."""

    def __init__(self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})


@dataclass(frozen=True)
class Event:
    """A server-sent event. name: "" for none."""

    data: Mapping[str, Any] | str
    name: str = ""

    def __str__(self) -> str:
        text = self.data if isinstance(self.data, str) else as_json(self.data).translate(_LINE_ENDS)
        return f"event: {self.name}\ndata: {text}\n\n" if self.name else f"data: {text}\n\n"


@dataclass(frozen=True)
class Usage:
    """Counts of tokens. cached: part of `prompt` that was not computed anew. thoughts: part of `answer`."""

    prompt: int
    cached: int = 0
    answer: int = 0
    thoughts: int = 0


@dataclass(frozen=True)
class Reading:
    """A prompt being read: tokens in all, those that have rows, and those among them that had rows before. seconds:
    since it began. choice: see `Said`."""

    total: int
    read: int
    cached: int
    seconds: float
    choice: int = 0


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a reply. arguments: JSON text, as the model wrote it; of a call that was cut, its beginning."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class CallPiece:
    """A piece of a tool call. number: of the call in its reply, from 0. begins: it is the first one. arguments: more of
    their JSON text."""

    number: int
    id: str
    name: str
    arguments: str
    begins: bool


@dataclass(frozen=True)
class Said:
    """A piece of a choice: thoughts, then text outside tool calls, then calls. scores: of the text's tokens, if they
    were asked for. choice: its number in the reply, from 0."""

    text: str
    thoughts: str = ""
    scores: Sequence[Score] = ()
    calls: Sequence[CallPiece] = ()
    choice: int = 0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A choice of a reply at its end, whole. finish: "length" where a limit of tokens or of time cut it. stop: the stop
    string that ended it, or "". more: fields beside the only choice of a completion, or in one of several: `timings`
    (see triforce_cli.apis.timings) and, where they were asked for, `citations`. choice: see `Said`."""

    text: str
    thoughts: str
    calls: tuple[ToolCall, ...]
    scores: Sequence[Score]
    finish: Literal["stop", "length"]
    usage: Usage
    stop: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    choice: int = 0


class Reply(Protocol):
    """A reply to one request: one choice, or several, side by side, where the API has them. A stream is `begin`, `add`
    for each piece, `keep_alive` where there is none for long, `end` for each choice, then `close`; or `fail`."""

    def begin(self, usage: Usage) -> Iterable[Event]:
        """usage: before anything was computed."""
        ...

    def keep_alive(self) -> Iterable[Event]:
        """The events that say only that the stream goes on: many clients count events, and no comments."""
        ...

    def reading(self, reading: Reading) -> Iterable[Event]:
        """The events on a prompt that is read; none where the API has none, or the client did not ask for them."""
        ...

    def add(self, said: Said) -> Iterable[Event]: ...

    def end(self, ended: Ended) -> Iterable[Event]:
        """The end of a choice. The pieces of `ended` were added."""
        ...

    def close(self, ended: Sequence[Ended]) -> Iterable[Event]:
        """The end of the stream, after those of all choices."""
        ...

    def fail(self, error: ApiError) -> Iterable[Event]:
        """The end of a stream that failed."""
        ...

    def document(self, ended: Sequence[Ended]) -> dict[str, Any]:
        """The whole reply as one response. ended: all choices, in the order of their numbers."""
        ...


class Api(Protocol):
    """An HTTP API. path: of its requests. names: its names for our fields, where they differ."""

    path: str
    names: ClassVar[Mapping[str, str]]

    def fields(self, body: Mapping[str, Any], note: Note) -> Fields:
        """The request as a record's fields; `prompt` may be a list of texts. note: hears of parts that are left out.
        Raises UsageError for requests that are not supported."""
        ...

    def num_choices(self, body: Mapping[str, Any]) -> int:
        """The number of answers to each prompt of a request that `fields` accepts. Raises UsageError."""
        ...

    def reply(self, body: Mapping[str, Any], model: str) -> Reply:
        """A reply to a request that `fields` accepts. model: the name of the model that answers."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """The body of an error's response."""
        ...


@dataclass(frozen=True)
class Head:
    """The identity of a reply. created: seconds since 1970."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


def identifier(prefix: str) -> str:
    """A new identifier, such as call_0123..."""
    return prefix + secrets.token_hex(12)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A field that is true, false or null. Raises UsageError."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise UsageError(f"{PLACE}: {name} is {json.dumps(value)[:80]}, it can only be true or false")
    return default if value is None else value


def joined(place: str, *parts: Mapping[str, Any]) -> Fields:
    """The fields of several parts of a request. place: of the request, in messages. Raises UsageError if two of them
    say the same."""
    found: Fields = {}
    for part in parts:
        if twice := found.keys() & part.keys():
            raise UsageError(f"{place}: {min(twice)} is said twice, by a field of this name and by the API's own")
        found |= part
    return found


def without(body: Mapping[str, Any], *names: str) -> Fields:
    """The fields of a request but for `names`, and for those that are null, which count as absent."""
    return {name: value for name, value in body.items() if name not in names and value is not None}


def object_of(body: Mapping[str, Any], name: str, *known: str) -> Mapping[str, Any]:
    """A field that is an object with known fields, or null. Raises UsageError."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{PLACE}: {name} is {json.dumps(value)[:80]}, it must be an object")
    if unknown := [each for each in value if each not in known]:
        raise UsageError(f"{PLACE}: {name} has {unknown[0]!r}, which is not understood")
    return value
