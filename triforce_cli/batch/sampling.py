"""What a line of `--input-jsonl` says of its sampling: names as in options, with underscores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from offload.decode.constraint import Constraint, Kind
from offload.decode.sampling import SETTINGS
from offload.errors import UsageError
from triforce_cli.batch.fields import Fields, is_number, is_text, is_whole
from triforce_cli.control import NEVER

# By the kinds of settings, what a value must be.
_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    float: (is_number, "a number"),
    int: (is_whole, "a whole number"),
    int | None: (lambda value: value is None or is_whole(value), "a whole number or null"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
}
_CONSTRAINTS: dict[str, tuple[Kind, Callable[[Any], bool], str]] = {
    "json_schema": ("json-schema", lambda value: isinstance(value, dict | bool), "an object, true or false"),
    "regex": ("regex", is_text, "a text"),
    "choice": ("choice", lambda value: _is_list_of_texts(value), "a list of texts"),
    "grammar": ("grammar", is_text, "a text"),
}
SAMPLING = (*SETTINGS, "logit_bias", "dry_breakers", *_CONSTRAINTS)


def changes(fields: Fields) -> dict[str, Any]:
    """The fields of SamplingParams that the line has. Raises UsageError."""
    found: dict[str, Any] = {}
    for name, row in SETTINGS.items():
        if name in fields.data:
            value = fields.get(name, *_KINDS[row.kind])
            found[name] = float(value) if row.kind is float else value
    if "logit_bias" in fields.data:
        biases = fields.get("logit_bias", _are_biases, 'an object such as {"42": -5, " the": "-inf"}')
        found["logit_bias"] = tuple((_token(name), _bias(value)) for name, value in biases.items())
    if "dry_breakers" in fields.data:
        found["dry_breakers"] = tuple(fields.get("dry_breakers", _is_list_of_texts, "a list of texts"))
    named = [name for name in _CONSTRAINTS if name in fields.data]
    if len(named) > 1:
        raise UsageError(f"{fields.place}: {' and '.join(named)} both say what the text is; leave one of them out")
    for name in named:
        kind, fits, wanted = _CONSTRAINTS[name]
        value = fields.get(name, fits, wanted)
        found["constraint"] = Constraint(kind, value if isinstance(value, str) else json.dumps(value))
    return found


def _are_biases(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(bias) or bias in (*NEVER, False) for bias in value.values())


def _token(name: str) -> int | str:
    return int(name) if name.isdecimal() else name


def _bias(value: Any) -> float:
    return -math.inf if value is False or value in NEVER else float(value)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))
