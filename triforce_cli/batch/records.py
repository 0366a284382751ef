"""The records of `--input-jsonl`: a JSON object on each line, all checked before anything is computed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from offload import strict_json
from offload.errors import UsageError
from offload.seeds import seed_after

if TYPE_CHECKING:
    from offload.decode.sampling import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
FIELDS = ("id", "prompt", "max_tokens", *SAMPLING, "stop", "meta")
MOST_TOKENS = 2**24
MAX_DEPTH = 64  # of a line
_HALF = re.compile("[\ud800-\udfff]")

Id = str | int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One prompt. number: its line, from 1. id: from the line, else that number. meta: copied to the result."""

    number: int
    id: Id
    prompt: str
    max_tokens: int
    sampling: Mapping[str, Any]
    stops: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"line {self.number} (id {self.id!r})"

    def params(self) -> SamplingParams:
        """Raises UsageError."""
        from offload.decode.sampling import SamplingParams

        return SamplingParams(**self.sampling)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values for fields that a line leaves out. With a seed, line k has seed + k - 1: equal prompts get other texts."""

    max_tokens: int
    sampling: Mapping[str, Any]
    stops: tuple[str, ...]


def read_records(text: str, name: str, defaults: Defaults) -> list[Record]:
    """Parse all lines. Raises UsageError, which names `name` and the line, for the first invalid one."""
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


def _read(line: str, number: int, place: str, defaults: Defaults) -> Record:
    data = _object(line, place)
    unknown = next((key for key in data if key not in FIELDS), None)
    if unknown is not None:
        raise UsageError(f"{place}: there is no field {unknown!r}; there are {', '.join(FIELDS)} (any object in meta)")
    if "prompt" not in data:
        raise UsageError(f'{place} has no "prompt"')
    fields = _Fields(data, place)
    sampling = {**defaults.sampling, "seed": seed_after(defaults.sampling["seed"], number - 1)}
    record = Record(
        number=number,
        id=fields.get("id", _is_id, "a text or a whole number", number),
        prompt=fields.get("prompt", lambda value: _is_text(value) and value != "", "a text of 1 or more characters"),
        max_tokens=fields.get(
            "max_tokens",
            lambda value: _is_whole(value) and 1 <= value <= MOST_TOKENS,
            f"a whole number from 1 to {MOST_TOKENS}",
            defaults.max_tokens,
        ),
        sampling=sampling | {key: _number(fields, key) for key in SAMPLING if key in data},
        stops=_stops(fields, defaults.stops),
        meta=fields.get("meta", _is_meta, "an object without halves of surrogate pairs", {}),
    )
    try:
        record.params()
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error
    return record


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        data = strict_json.parse(line)
        strict_json.check_depth(data, MAX_DEPTH, "it")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place} is not JSON that can be answered ({error})") from error
    if not isinstance(data, dict):
        raise UsageError(f"{place} is {type(data).__name__} in JSON, it must be an object")
    return data


@dataclass(frozen=True)
class _Fields:
    data: Mapping[str, Any]
    place: str

    def get(self, key: str, fits: Callable[[Any], bool], wanted: str, default: Any = None) -> Any:
        value = self.data.get(key, default)
        if key in self.data and not fits(value):
            raise UsageError(f"{self.place}: {key} is {_short(value)}, it must be {wanted}")
        return value


def _number(fields: _Fields, key: str) -> Any:
    if key == "seed":
        return fields.get(key, lambda value: value is None or _is_whole(value), "a whole number or null")
    if key == "top_k":
        return fields.get(key, _is_whole, "a whole number")
    return float(fields.get(key, _is_number, "a number"))


def _stops(fields: _Fields, default: tuple[str, ...]) -> tuple[str, ...]:
    def fits(value: Any) -> bool:
        texts = value if isinstance(value, list) else [value]
        return all(_is_text(text) and text != "" for text in texts)

    value: Any = fields.get("stop", fits, "a text, or a list of texts, none of them empty", list(default))
    return (value,) if isinstance(value, str) else tuple(value)


def _is_id(value: Any) -> bool:
    return _is_text(value) or _is_whole(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _is_unicode(value)


def _is_meta(value: Any) -> bool:
    return isinstance(value, dict) and _is_unicode(json.dumps(value, ensure_ascii=False))


def _is_unicode(text: str) -> bool:
    """True if UTF-8 can encode it: JSON escapes can contain half of a surrogate pair."""
    return _HALF.search(text) is None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def after(records: Sequence[Record], done: Sequence[Id], place: str) -> Sequence[Record]:
    """The records that are not `done` yet, in whatever order those were. Raises UsageError unless `done` are ids of
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
