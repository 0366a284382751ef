"""Numbers of a JSON schema, adapted to the library's limits: it reads all numbers as 64-bit floats, writes a bound by
its shortest decimal digits, and computes with 64-bit integers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

LIMIT = 2**63 - 1024  # the largest float below 2^63
_EXACT = 2**53  # up to this, every integer is a float
_OPEN = 10**17  # from this on, the library needs the other bound, too
_MOST_MULTIPLE = 2**32 - 1
_BOUNDS = (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1))


def with_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """A schema whose bounds beyond 2^53 are moved inwards to the next exact number, and bounds beyond `LIMIT` to it.

    Every value that it allows was allowed before. Raises ValueError, with the value and the limit, where no value is
    left.
    """
    found, given = dict(node), dict[str, float | int]()
    for name, exclusive, sign in _BOUNDS:
        bounds = list(_bounds_of(node, name, exclusive))
        if any(abs(bound) > _EXACT or (strict and abs(bound) == _EXACT) for bound, strict in bounds):
            tightest = min(_inside(sign * bound, strict, name, node) for bound, strict in bounds)
            given[name] = found[name] = sign * tightest
            found.pop(exclusive, None)
        elif bounds:
            given[name] = bounds[0][0]
    low, high = given.get("minimum"), given.get("maximum")
    if low is not None and high is not None and low > high and _is_upright(node):
        raise ValueError(f"no number between {_said(node, 0)} and {_said(node, 1)} can be written exactly")
    if low is not None and high is None and low >= _OPEN:
        found["maximum"] = LIMIT
    if high is not None and low is None and high <= -_OPEN:
        found["minimum"] = -LIMIT
    return found


def check_constant(value: object) -> None:
    """Check a constant. Raises ValueError for a number that the library would write as another one."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_constant(each)
    elif isinstance(value, int | float) and not _is_written(value):
        raise ValueError(f"{_short(value)} cannot be written exactly; integers up to {_EXACT} can")


def check_multiple(value: object) -> None:
    """Check `multipleOf`. Raises ValueError for a number whose multiples the library does not recognise exactly."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if value <= 0:
        raise ValueError(f"multipleOf is {value}, it must be above 0")
    if value > _MOST_MULTIPLE:
        raise ValueError(f"multipleOf is {_short(value)}, it must be at most {_MOST_MULTIPLE}")
    number, digits = float(value), 0
    while not number.is_integer():
        number, digits = number * 10, digits + 1
    if number > _MOST_MULTIPLE or Decimal(int(number)).scaleb(-digits) != Decimal(repr(value)):
        raise ValueError(f"multipleOf is {value}, of which multiples cannot be told exactly")


def _bounds_of(node: dict[str, Any], name: str, exclusive: str) -> Iterator[tuple[int | float, bool]]:
    """The bounds of a schema, as (bound, whether it is exclusive), also in draft-04's form."""
    bound, other = _number(node, name), _number(node, exclusive)
    if bound is not None:
        yield bound, node.get(exclusive) is True
    if other is not None:
        yield other, True


def _number(node: dict[str, Any], name: str) -> int | float | None:
    value = node.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _inside(bound: int | float, strict: bool, name: str, node: dict[str, Any]) -> int | float:
    """The largest exact number that is at most `bound`, or below it if `strict`. Lower bounds are given with their sign
    inverted."""
    number = float(min(max(bound, -LIMIT), LIMIT))
    forms = (Decimal,) if node.get("type") == "integer" else (Decimal, _shortest)
    while not all(form(number) < bound or (form(number) == bound and not strict) for form in forms):
        number = math.nextafter(number, -math.inf)
        if number < -LIMIT:
            sign = 1 if name == "maximum" else -1
            raise ValueError(f"{name} is {_short(sign * bound)}, and the limit is {-sign * LIMIT}")
    return int(number) if abs(number) >= _EXACT else number


def _shortest(number: float) -> Decimal:
    """A bound of numbers that need not be integers, as the library writes it."""
    return Decimal(repr(number))


def _short(number: int | float) -> str:
    text = repr(number)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def _is_written(value: int | float) -> bool:
    if isinstance(value, float):
        return abs(value) < _EXACT or Decimal(value) == Decimal(repr(value))
    if abs(value) <= LIMIT:
        return int(float(value)) == value
    return value == 2**63 - 1 or (abs(value) < 10**300 and value > 0 and Decimal(repr(float(value))) == value)


def _is_upright(node: dict[str, Any]) -> bool:
    """Whether the lower bound, as given, is not above the upper one."""
    low = max(bound for bound, _ in _bounds_of(node, *_BOUNDS[0][:2]))
    high = min(bound for bound, _ in _bounds_of(node, *_BOUNDS[1][:2]))
    return low <= high


def _said(node: dict[str, Any], which: int) -> str:
    name, exclusive, _ = _BOUNDS[which]
    return " and ".join(f"{key} {node[key]}" for key in (name, exclusive) if _number(node, key) is not None)
