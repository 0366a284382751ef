"""Upper bounds in bytes on the results of a chat template's steps, known before a step runs: templates are untrusted.

The bounds follow from a step's inputs: the memory of texts, and an ITEM for each value in a container. A value may be
in a container many times, so it is counted as often as it would be written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from jinja2.utils import Namespace

ITEM = 64  # bytes of a value in a container: itself and the reference to it
_WRITTEN = 4 * ITEM  # bytes of a value that is written out, also for the time that it takes to count it
_EMPTY = sys.getsizeof("")
_BATCH = 1 << 20  # bytes that are charged at a time
_ESCAPED = 6  # most characters of one escaped character: "\\u0000"
_DIGITS = re.compile(r"\d+")
_MOST_DIGITS = 15  # of a width or count; larger numbers exceed every allowance
_PLAIN = {str, bytes, int, float, bool, type(None)}
_CONTAINERS: tuple[type[Iterable[object]], ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.items()),
    type({}.keys()),
    type({}.values()),
)
_NESTED = re.compile(r"\{[^{}]*\{")  # a field of a format whose width is another field

Charge = Callable[[int], None]  # charges bytes; raises where the allowance is exceeded


def size(value: object) -> int:
    """Bytes of a text, or of a container without its contents; 0 for other values."""
    if isinstance(value, str):
        return max(len(value), sys.getsizeof(value) - _EMPTY)
    if isinstance(value, bytes | bytearray):
        return len(value)
    return ITEM * len(value) if isinstance(value, Collection) and not isinstance(value, range) else 0


def written(value: object, charge: Charge, *, indent: int = 1) -> int:
    """Bytes of a value that is written out with all its contents. indent: of a line, at each depth. `charge` is called
    on the way, so that a value that contains another many times over is refused early."""
    total = pending = 0
    stack: list[Iterator[object]] = [iter((value,))]
    while stack:
        for each in stack[-1]:
            text = (
                len(each) if isinstance(each, (str, bytes)) else each.bit_length() // 3 if isinstance(each, int) else 0
            )
            text = max(text, sys.getsizeof(each) - _EMPTY) if isinstance(each, str) else text
            pending += _WRITTEN + (len(stack) - 1) * indent + text
            if pending > _BATCH:
                charge(pending)
                total, pending = total + pending, 0
            if type(each) not in _PLAIN and (inner := _inside(each)) is not None:
                stack.append(inner)
                break
        else:
            stack.pop()
    charge(pending)
    return total + pending


def _inside(value: object) -> Iterator[object] | None:
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    return iter(value) if isinstance(value, _CONTAINERS) else None


def operation(operator: str, left: Any, right: Any, charge: Charge) -> None:
    """Charge for `left operator right`, one of * ** + %."""
    if isinstance(left, int | float) and isinstance(right, int | float):
        charge(_bits(operator, left, right) ** 2 // 64)  # the work on large numbers grows with the square
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(times, int):
                charge(size(sequence) * max(times, 0))
    elif operator == "%":
        args = right if isinstance(right, tuple) else right.values() if isinstance(right, Mapping) else (right,)
        formatting(left, "%", list(args), charge)
    else:
        charge(size(left) + size(right))


def _bits(operator: str, left: float, right: float) -> int:
    if not (isinstance(left, int) and isinstance(right, int)) or operator not in ("*", "**"):
        return 0
    return left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()


def formatting(text: object, sign: str, args: Sequence[object], charge: Charge) -> None:
    """Charge for formatting a text whose fields, which begin with `sign`, are replaced by `args`."""
    if not isinstance(text, str):
        return
    widths = [*map(_number, _DIGITS.findall(text)), *numbers(args)]
    if _NESTED.search(text):
        widths += [_number(arg) for arg in args if isinstance(arg, str) and arg.isdecimal()]
    each = sum(widths) + sum(written(arg, charge) for arg in args)
    charge(size(text) + text.count(sign) * each)


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else sys.maxsize


def numbers(values: Iterable[object]) -> list[int]:
    """The integers among `values`: widths, lengths, repetitions."""
    return [abs(value) for value in values if isinstance(value, int)]


def call(name: str, subject: Any, args: Sequence[Any], charge: Charge, *, is_method: bool) -> None:
    """Charge for a filter or a method of a text. subject: the value that it is applied to."""
    if name in ("format", "format_map"):
        values = args if name == "format" else list(chain(*(arg.values() for arg in args if isinstance(arg, Mapping))))
        formatting(subject, "{" if is_method else "%", values, charge)
    elif name == "join":
        parts, glue = (args[:1], subject) if is_method else (subject, next(iter(args), ""))
        charge(len(parts[0] if is_method and parts else parts) * size(glue) + written(parts, charge))
    elif name in ("replace", "wordwrap", "translate", "expandtabs", "indent"):
        places = subject.count(args[0]) if name == "replace" and _are_texts(subject, *args[:1]) else size(subject)
        charge(size(subject) + (places + 1) * (sum(numbers(args)) + sum(written(arg, charge) for arg in args)))
    elif name == "round":
        charge(sum(numbers(args)) ** 2)
    elif name in ("tojson", "escape", "e", "forceescape", "urlencode", "xmlattr"):
        indent = sum(numbers(args)) + sum(map(size, args)) if name == "tojson" else 0
        charge(_ESCAPED * written(subject, charge, indent=indent))
    else:
        written([subject, *args], charge)
        charge(ITEM * sum(numbers(args)))


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) and value for value in values)
