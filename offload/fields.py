"""The strict reader of values from outside, from any file or line: it checks types, ranges and names.

Every refusal names the value's place, the value, and what it must be.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from offload.errors import ModelError

MOST = 2**63 - 1  # the largest whole number where no other limit is given
MOST_SIZE = 1 << 30  # the largest size in a model's config
_MOST_SHOWN = 40  # characters of a text in messages
_HALF = re.compile("[\ud800-\udfff]")
_REQUIRED = object()
LATER = "later"  # in the metadata of a field that data of before does not have

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """A type of value with its range. wanted: the type in words. fits: tells whether a value is of it. item: the kind
    of a list's values."""

    wanted: str
    fits: Callable[[Any], bool]
    item: Kind | None = None

    @property
    def or_null(self) -> Kind:
        return Kind(f"{self.wanted} or null", lambda value: value is None or self.fits(value))

    def problem(self, value: object, place: str) -> str:
        """The message for a value at `place` that does not fit, "" if it fits. In a list it names the first value that
        does not."""
        if self.fits(value):
            return ""
        if self.item is not None and isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                if not self.item.fits(each):
                    return self.item.problem(each, f"{place}[{number}]")
        if isinstance(value, str) and not is_unicode(value):
            return f"{place} has half of a surrogate pair"
        return f"{place} is {shown(value)}; it must be {self.wanted}"


def whole(least: int = 0, most: int = MOST) -> Kind:
    limits = f"from {least}" if most == MOST else f"from {least} to {most}"
    return Kind(f"a whole number {limits}", lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float, *, over: float = -math.inf, wanted: str = "") -> Kind:
    """A finite number, whole or not."""
    limits = f" from {least:g} to {most:g}" if over == -math.inf else f" over {over:g}, from {least:g} to {most:g}"
    return Kind(
        wanted or f"a number{limits}",
        lambda value: type(value) in (int, float) and least <= value <= most and value > over,
    )


def one_of(*allowed: object) -> Kind:
    names = [str(each) for each in allowed]
    return Kind(
        " or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}",
        lambda value: any(type(value) is type(each) and value == each for each in allowed),
    )


def list_of(item: Kind, wanted: str = "a list", *, length: int | None = None) -> Kind:
    """A list of values of kind `item`. length: of the list; None: any."""

    def fits(value: object) -> bool:
        right = isinstance(value, (list, tuple)) and length in (None, len(value))
        return right and all(map(item.fits, value))  # type: ignore[call-overload]

    return Kind(wanted, fits, item)


def is_unicode(text: str) -> bool:
    """True if UTF-8 can encode it: JSON escapes can contain half of a surrogate pair."""
    return _HALF.search(text) is None


TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str) and is_unicode(value))
LIST = Kind("a list", lambda value: isinstance(value, (list, tuple)))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
NUMBER = number(-sys.float_info.max, sys.float_info.max, wanted="a number")
INTEGER = Kind("a whole number", lambda value: type(value) is int)


class _Shown(reprlib.Repr):
    """Values for messages: short, and as JSON has them."""

    def repr_str(self, value: str, level: int) -> str:
        return _short(json.dumps(value[:_MOST_SHOWN]))

    def repr_int(self, value: int, level: int) -> str:
        try:
            return _short(str(value))
        except ValueError:  # a number of too many digits
            return "a huge number"

    def repr_bool(self, value: bool, level: int) -> str:
        return json.dumps(value)

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


shown = _Shown().repr


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def checked(value: T, place: str, kind: Kind, error: type[Exception] = ValueError) -> T:
    """`value` if it is of the kind. Raises `error`, which names `place`."""
    if problem := kind.problem(value, place):
        raise error(problem)
    return value


class Fields:
    """Typed reading of one object's fields. Every refusal is an `error` that names `where` the object came from, the
    field, its value and the limit.

    `integer`, `number`, `flag` and `choice` read null as absent, as models' configs mean it, and refuse an absent field
    without a default; `get` treats null as a value.
    """

    def __init__(
        self, data: Mapping[str, Any], where: str, error: type[Exception] = ModelError, *, between: str = ": "
    ) -> None:
        """between: the separator of `where` and a field's name in messages."""
        self.data, self.where, self._error, self._between = data, where, error, between

    def place(self, key: str) -> str:
        """The name of a field in messages."""
        name = _short(key if key.isprintable() else json.dumps(key)[1:-1])
        return f"{self.where}{self._between}{name}" if self.where else name

    def refuse(self, key: str, limit: str) -> NoReturn:
        value = shown(self.data[key]) if key in self.data else "missing"
        raise self._error(f"{self.place(key)} is {value}; it must be {limit}")

    def changed(self, values: Mapping[str, Any]) -> Fields:
        """The fields of this object with other values, or further ones."""
        return Fields({**self.data, **values}, self.where, self._error, between=self._between)

    def only(self, names: Iterable[str]) -> Fields:
        """This object, unless it lacks a field of `names` or has another one."""
        for name in (names := dict.fromkeys(names)):
            self.present(name)
        if unknown := self.data.keys() - names.keys():
            raise self._error(f"{self.place(min(map(str, unknown)))} is not known")
        return self

    def present(self, key: str) -> Any:
        """The value of a required field, of any type."""
        if key not in self.data:
            raise self._error(f"{self.place(key)} is missing")
        return self.data[key]

    def inner(self, key: str, data: object = _REQUIRED) -> Fields:
        """The fields of an object in this one. data: the object, if it is another than the field's value."""
        if data is _REQUIRED:
            data = self.get(key, OBJECT)
        assert isinstance(data, Mapping)
        return Fields(data, self.place(key), self._error, between=self._between)

    def get(self, key: str, kind: Kind, default: Any = _REQUIRED) -> Any:
        """The value of a field, `default` where it is absent."""
        if key in self.data:
            return checked(self.data[key], self.place(key), kind, self._error)
        return self.refuse(key, kind.wanted) if default is _REQUIRED else default

    def integer(self, key: str, most: int = MOST_SIZE, default: int | None = None) -> int:
        """A whole number from 1 to `most`."""
        found: int = self._said(key, whole(1, most), default)
        return found

    def number(self, key: str, default: float | None = None, least: float = 0.0, most: float = 1e12) -> float:
        """A number over 0, from `least` to `most`."""
        return float(self._said(key, number(least, most, over=0.0), default))

    def optional_number(self, key: str) -> float | None:
        """A number over 0, or None where the field is absent."""
        return None if self.data.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        found: bool = self._said(key, TRUTH, default)
        return found

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of the strings `allowed`."""
        found: str = self._said(key, one_of(*allowed), default)
        return found

    def _said(self, key: str, kind: Kind, default: object) -> Any:
        value = default if (said := self.data.get(key)) is None else said
        return value if kind.fits(value) else self.refuse(key, kind.wanted)


_KINDS = {int: whole(), float: number(-MOST, MOST, wanted="a number"), bool: TRUTH, str: TEXT}


def fields_of(data: object, place: str) -> Fields:
    """The fields of the object `data`. place: its name in messages, "" at the top. Every method of the result raises
    ValueError."""
    found: Any = checked(data, place or "it", OBJECT)
    return Fields(found, place, ValueError, between=".")


def versioned(data: object, version: int, place: str) -> dict[str, object]:
    """The object `data` without its field `version`. Raises ValueError if that is not `version`."""
    source = fields_of(data, place)
    if (said := source.present("version")) != version or type(said) is not int:
        raise ValueError(f"{source.place('version')} is {shown(said)}; this program reads version {version}")
    return {key: value for key, value in source.data.items() if key != "version"}


def record(kind: type[T], data: object, place: str) -> T:
    """An instance of the dataclass `kind` from an object of its fields and no others. Raises ValueError, which names
    the key, prefixed with `place`, and the value.

    A field with LATER in its metadata may be missing: data of before has its default.

    Types of fields: int (not negative), float, bool, str, Literal, Annotated[X, Kind], any of these or None,
    tuple[X, ...], dict[str, X] and dataclasses.
    """
    hints = get_type_hints(kind, include_extras=True)
    source = fields_of(data, place)
    named = [field.name for field in fields(kind) if LATER not in field.metadata or field.name in source.data]  # type: ignore[arg-type]
    source.only(named)
    return kind(**{name: _value(hints[name], value, source.place(name)) for name, value in source.data.items()})


def _value(hint: Any, value: Any, place: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return record(hint, value, place)  # type: ignore[arg-type]
    if origin is types.UnionType:  # X | None
        return None if value is None else _value(parts[0], value, place)
    if origin is tuple:
        item = _kind(parts[0])
        checked(value, place, list_of(item) if item else LIST)
        if item:
            return tuple(map(float, value)) if parts[0] is float else tuple(value)
        return tuple(_value(parts[0], each, f"{place}[{i}]") for i, each in enumerate(value))
    if origin is dict:
        checked(value, place, OBJECT)
        return {name: _value(parts[1], each, f"{place}.{name}") for name, each in value.items()}
    kind = _kind(hint)
    assert kind is not None, hint
    return float(checked(value, place, kind)) if hint is float else checked(value, place, kind)


def _kind(hint: Any) -> Kind | None:
    """The kind of a type hint without parts; None for a hint with parts."""
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint))
    if get_origin(hint) is Annotated:
        return next(each for each in get_args(hint) if isinstance(each, Kind))
    return _KINDS.get(hint)
