"""Sampling fields of a line of `--input-jsonl`: names as in options, with underscores."""

from __future__ import annotations

import json
import math
from typing import Any

from offload.decode.sampling import SETTINGS
from offload.errors import UsageError
from offload.fields import INTEGER, NUMBER, TEXT, TRUTH, Fields, list_of
from offload.fields import Kind as ValueKind
from offload.grammar.constraint import Constraint, Kind
from offload.seeds import seed_of
from triforce_cli.options.control import NEVER

# The checks of values, by the settings' types.
_WHOLE = ValueKind("a whole number of 64 bits", lambda value: INTEGER.fits(value) and -(2**63) <= value < 2**63)
_KINDS: dict[Any, ValueKind] = {float: NUMBER, int: _WHOLE, int | None: _WHOLE.or_null, bool: TRUTH}
_MOST_DIGITS = 18  # of a token's id; longer ones are texts
_TEXTS = list_of(TEXT, "a list of texts")
_SCHEMA = ValueKind("an object, true or false", lambda value: isinstance(value, dict | bool))
_BIASES = ValueKind(
    'an object such as {"42": -5, " the": "-inf"}',
    lambda value: isinstance(value, dict) and all(map(_is_bias, value.values())),
)
_CONSTRAINTS: dict[str, tuple[Kind, ValueKind]] = {
    "json_schema": ("json-schema", _SCHEMA),
    "regex": ("regex", TEXT),
    "choice": ("choice", _TEXTS),
    "grammar": ("grammar", TEXT),
}
SAMPLING = (*SETTINGS, "logit_bias", "dry_breakers", *_CONSTRAINTS)


def changes(fields: Fields) -> dict[str, Any]:
    """The fields of SamplingParams that the line sets. Raises UsageError."""
    found: dict[str, Any] = {}
    for name, row in SETTINGS.items():
        if name in fields.data:
            value = fields.get(name, _KINDS[row.kind])
            found[name] = float(value) if row.kind is float else value
    if found.get("seed") is not None:
        found["seed"] = seed_of(found["seed"])
    if "logit_bias" in fields.data:
        biases = fields.get("logit_bias", _BIASES)
        found["logit_bias"] = tuple((_token(name), _bias(value)) for name, value in biases.items())
    if "dry_breakers" in fields.data:
        found["dry_breakers"] = tuple(fields.get("dry_breakers", _TEXTS))
    named = [name for name in _CONSTRAINTS if name in fields.data]
    if len(named) > 1:
        raise UsageError(f"{fields.where}: {' and '.join(named)} both say what the text is; leave one of them out")
    for name in named:
        kind, fitting = _CONSTRAINTS[name]
        value = fields.get(name, fitting)
        found["constraint"] = Constraint(kind, value if isinstance(value, str) else json.dumps(value))
    return found


def _is_bias(value: Any) -> bool:
    return NUMBER.fits(value) or value in (*NEVER, False)


def _token(name: str) -> int | str:
    return int(name) if name.isdecimal() and len(name) <= _MOST_DIGITS else name


def _bias(value: Any) -> float:
    return -math.inf if value is False or value in NEVER else float(value)
