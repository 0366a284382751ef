"""Frozen dataclasses from JSON objects, read strictly: no key is unknown or missing, and each value has its type."""

from __future__ import annotations

import math
import reprlib
import types
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_MOST = 2**63 - 1  # of a whole number
_KINDS = {int: "a whole number from 0", float: "a number", bool: "true or false", str: "a text"}


def record(kind: type[T], data: object, place: str) -> T:
    """An instance of the dataclass `kind`. Raises ValueError, which names the key, `place` before it, and the value.

    Types of fields: int (not negative), float, bool, str, Literal, any of these or None, tuple[X, ...], dict[str, X]
    and dataclasses.
    """
    hints = get_type_hints(kind)
    read = entries(data, [field.name for field in fields(kind)], place)  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], value, f"{place}.{name}") for name, value in read.items()})


def entries(data: object, names: Collection[str], place: str) -> Mapping[str, object]:
    """`data` if it is a JSON object of these keys and no other. Raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"{place} is {reprlib.repr(data)}; it must be an object")
    for name in names:
        if name not in data:
            raise ValueError(f"{place}.{name} is missing")
    if unknown := data.keys() - set(names):
        raise ValueError(f"{place}.{min(unknown, key=str)} is not known")
    return data


def _value(hint: Any, value: object, place: str) -> object:
    kind, parts = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return record(hint, value, place)  # type: ignore[arg-type]
    if kind is types.UnionType:  # X | None
        return None if value is None else _value(parts[0], value, place)
    if kind is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(parts[0], each, f"{place}[{number}]") for number, each in enumerate(value))
    if kind is dict and isinstance(value, dict):
        return {name: _value(parts[1], each, f"{place}.{name}") for name, each in value.items()}
    if not _is(hint, value):
        raise ValueError(f"{place} is {reprlib.repr(value)}; it must be {_wanted(hint)}")
    return float(value) if hint is float else value  # type: ignore[arg-type]


def _is(hint: Any, value: object) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is int:
        return type(value) is int and 0 <= value <= _MOST
    if hint is float:
        return type(value) in (int, float) and abs(value) <= _MOST and math.isfinite(value)  # type: ignore[arg-type]
    return hint in (bool, str) and type(value) is hint


def _wanted(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    return _KINDS.get(hint, "a list" if get_origin(hint) is tuple else "an object")
