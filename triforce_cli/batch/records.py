"""The records of `--input-jsonl`: a JSON object on each line, all checked before anything is computed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from offload import strict_json
from offload.decode.sampling import SamplingParams
from offload.engine.request import MOST_LOGPROBS
from offload.errors import UsageError
from offload.fields import (
    INTEGER,
    OBJECT,
    TEXT,
    TRUTH,
    Fields,
    Kind,
    checked,
    is_unicode,
    list_of,
    number,
    one_of,
    whole,
)
from offload.interrupts import poll
from offload.seeds import seed_after
from triforce_cli.answering.request import Wanted
from triforce_cli.answering.thoughts import NAMES
from triforce_cli.batch.openai import is_openai, own
from triforce_cli.batch.sampling import SAMPLING, changes
from triforce_cli.prompts.messages import Messages
from triforce_cli.prompts.messages import read as read_messages
from triforce_cli.tools.arguments import Tool
from triforce_cli.tools.choice import ANY, ToolChoice, read_choice
from triforce_cli.tools.tools import checked_tools, checked_variables

OF_MESSAGES = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "template_args",
    "thinking",
    "thinking_tokens",
)  # inputs of a template besides messages
OF_ANSWERS = ("max_tokens", "stop", "timeout", "logprobs", "cite")
FIELDS = ("id", "prompt", "messages", *OF_MESSAGES, *OF_ANSWERS, "meta", *SAMPLING)
MOST_TOKENS = 2**24
_SECONDS = number(0, 1e9 - 1e-3, over=0, wanted="a number of seconds above 0 and below 1000000000")
MAX_DEPTH = 64  # of nested JSON in a line
_MOST_SHOWN = 80  # characters of an unknown field's name
_PROMPT = Kind("a text of 1 or more characters", lambda value: TEXT.fits(value) and value != "")
_ID = Kind("a text or a whole number", lambda value: TEXT.fits(value) or INTEGER.fits(value))
_META = Kind("an object without halves of surrogate pairs", lambda value: isinstance(value, dict) and _encodes(value))
MOST_STOPS, MOST_OF_STOP = 64, 1000  # stop strings, characters of one: each token's text is compared with all of them
_STOPS = Kind(
    f"a text, or a list of up to {MOST_STOPS} texts, none of them empty, of up to {MOST_OF_STOP:,} characters each",
    lambda value: (
        (_PROMPT.fits(value) and len(value) <= MOST_OF_STOP)
        or (
            list_of(_PROMPT).fits(value)
            and len(value) <= MOST_STOPS
            and max(map(len, value), default=0) <= MOST_OF_STOP
        )
    ),
)

Id = str | int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One prompt, or messages. number: its line, from 1. id: from the line, else the line number. variables: additional
    ones of the chat template, including tools. choice: of the tools. meta: copied to the result. notes: lines for the
    log on fields that were left out."""

    number: int
    id: Id
    prompt: str
    wanted: Wanted
    messages: Messages | None = None
    choice: ToolChoice = ANY
    variables: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"line {self.number} (id {self.id!r})"


def read_records(text: str, name: str, defaults: Wanted) -> list[Record]:
    """Parse all lines. defaults: for fields that a line leaves out; with a seed, line k has seed + k - 1, so that equal
    prompts get different texts. Raises UsageError for the first invalid line, naming `name` and the line."""
    lines = enumerate(text.split("\n"), start=1)  # not splitlines: JSON may hold other line separators
    records = [_read(line, number, f"{name}, line {number}", defaults) for number, line in lines if line.strip()]
    if not records:
        raise UsageError(f"{name} holds no line; it needs at least one, such as {json.dumps({'prompt': 'Once'})}")
    seen: dict[Id, int] = {}
    for record in records:
        if record.id in seen:
            raise UsageError(f"{name}: lines {seen[record.id]} and {record.number} have the same id {record.id!r}")
        seen[record.id] = record.number
    return records


def _read(line: str, number: int, place: str, defaults: Wanted) -> Record:
    poll()
    data, notes = _object(line, place), list[str]()
    if is_openai(data):
        data = own(data, place, notes.append)
    check_known(data, FIELDS, place, "docs/batch.md names them, meta takes any object")
    return replace(read_record(data, number, place, defaults), notes=tuple(notes))


def check_known(data: Mapping[str, Any], fields: Sequence[str], place: str, remedy: str) -> None:
    """Raises UsageError for the first field of `data` that is not among `fields`."""
    unknown = next((key for key in data if key not in fields), None)
    if unknown is not None:
        unknown = unknown[:_MOST_SHOWN]
        near = difflib.get_close_matches(unknown, fields, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"{place}: there is no field {unknown!r}; {meant}{remedy}")


def read_record(data: Mapping[str, Any], number: int, place: str, defaults: Wanted) -> Record:
    """A record of a line's fields. place: the line, in messages. defaults: see `read_records`. Raises UsageError."""
    if not {"prompt", "messages"} & data.keys():
        raise UsageError(f'{place} has no "prompt" and no "messages"')
    if {"prompt", "messages"} <= data.keys():
        raise UsageError(f'{place} has a "prompt" and "messages"; leave one of them out')
    fields = Fields(data, place, UsageError)
    messages = _messages(fields)
    if messages is None and (unused := [name for name in OF_MESSAGES if name in data]):
        raise UsageError(f"{place}: {unused[0]} is for a chat template, which a prompt has none of; give messages")
    tools = {} if data.get("tool_choice") == "none" else _tools(fields)
    return Record(
        number=number,
        id=fields.get("id", _ID, number),
        prompt="" if messages else fields.get("prompt", _PROMPT),
        messages=messages,
        variables=_template_args(fields) | tools,
        choice=_choice(fields, tools.get("tools", [])),
        wanted=_wanted(fields, defaults, number),
        meta=fields.get("meta", _META, {}),
    )


def _wanted(fields: Fields, defaults: Wanted, number: int) -> Wanted:
    thinking = "show" if defaults.thinks else "off"
    seeded = replace(defaults.sampling, seed=seed_after(defaults.sampling.seed, number - 1))
    return replace(
        defaults,
        max_tokens=fields.get("max_tokens", whole(1, MOST_TOKENS), defaults.max_tokens),
        sampling=_sampling(fields, seeded),
        stops=_stops(fields, defaults.stops),
        logprobs=fields.get("logprobs", whole(0, MOST_LOGPROBS).or_null, defaults.logprobs),
        cites=fields.get("cite", TRUTH, defaults.cites),
        thinks=fields.get("thinking", one_of(*NAMES), thinking) != "off",
        thought_tokens=fields.get("thinking_tokens", whole(0, MOST_TOKENS).or_null, defaults.thought_tokens),
        timeout=fields.get("timeout", _SECONDS.or_null, defaults.timeout),
    )


def _encodes(value: Any) -> bool:
    """True if UTF-8 can encode all texts in `value`."""
    return is_unicode(json.dumps(value, ensure_ascii=False))


def _objects(wanted: str) -> Kind:
    """The kind of a list of one or more objects."""
    one = Kind("an object", lambda value: isinstance(value, dict))
    return Kind(wanted, lambda value: list_of(one).fits(value) and len(value) > 0 and _encodes(value))


def _messages(fields: Fields) -> Messages | None:
    if "messages" not in fields.data:
        return None
    messages = fields.get("messages", _objects("a list of objects with role and content"))
    with named(fields.where):
        return read_messages(messages)


def _tools(fields: Fields) -> dict[str, Any]:
    if "tools" not in fields.data:
        return {}
    tools = fields.get("tools", _objects("a list of definitions of tools"))
    with named(fields.where):
        return {"tools": checked_tools(tools)}


def _choice(fields: Fields, tools: Sequence[Tool]) -> ToolChoice:
    is_one = fields.get("parallel_tool_calls", TRUTH, True) is False
    given = fields.data.get("tool_choice", "auto")
    with named(fields.where):
        names = [tool["function"]["name"] for tool in tools]
        return read_choice("auto" if given == "none" else given, names, is_one=is_one)


def _template_args(fields: Fields) -> dict[str, Any]:
    kind = Kind("an object of variables of the chat template", _META.fits)
    variables = fields.get("template_args", kind, {})
    with named(fields.where):
        return checked_variables(variables)


@contextmanager
def named(place: str) -> Iterator[None]:
    """Prefix the message of a UsageError raised inside with `place`."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _sampling(fields: Fields, default: SamplingParams) -> SamplingParams:
    found = changes(fields)
    with named(fields.where):
        return replace(default, **found)


def _object(line: str, place: str) -> dict[str, Any]:
    return read_object(line, place, strict_json.check_depth)


def read_object(
    text: str | bytes, place: str, check: Callable[[object, int, str], None] = strict_json.check_writable
) -> dict[str, Any]:
    """The JSON object in a text or its UTF-8. place: of the text, in messages. check: of the value, see strict_json.
    Raises UsageError."""
    try:
        data = strict_json.parse(text if isinstance(text, str) else text.decode())
        check(data, MAX_DEPTH, "it")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place} is not JSON that can be answered ({error})") from error
    found: dict[str, Any] = checked(data, place, OBJECT, UsageError)
    return found


def _stops(fields: Fields, default: tuple[str, ...]) -> tuple[str, ...]:
    value: Any = fields.get("stop", _STOPS, default)
    return (value,) if isinstance(value, str) else tuple(value)


def after(records: Sequence[Record], done: Sequence[Id], place: str) -> Sequence[Record]:
    """The records that are not in `done`, which may be in any order. Raises UsageError unless `done` are ids of
    records, each once."""
    left = {record.id: record for record in records}
    for index, id_ in enumerate(done, start=1):
        if left.pop(id_, None) is None:
            why = "which came before" if id_ in done[: index - 1] else "which this input has not"
            raise UsageError(
                f"{place} holds the results of another input: result {index} has the id {id_!r}, {why}; name another "
                "file, or remove that one"
            )
    return list(left.values())
