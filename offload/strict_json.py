"""JSON from outside, read strictly: whatever is accepted means the same to every program and can be written again."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DIGITS = 4300  # of a whole number: Python reads and writes no more


def parse(text: str) -> Any:
    """The value in `text`. Raises ValueError, also for a key that occurs twice and for a number that no float can hold,
    or RecursionError."""
    return DECODER.decode(text)


def check_depth(value: object, limit: int, name: str) -> None:
    """Raises ValueError if `value`, which is called `name`, is nested too deep for recursive functions."""
    level = [value]
    for _ in range(limit):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [child for children in inner for child in children]
        if not level:
            return
    raise ValueError(f"{name} is nested deeper than {limit}")


def check_writable(value: object, limit: int, name: str) -> None:
    """Raises ValueError if `value` cannot be written as JSON in UTF-8, or is nested deeper than `limit`."""
    check_depth(value, limit, name)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a surrogate pair in a text") from error
    except TypeError as error:
        raise ValueError(f"{name} has a value that JSON has not") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a field occurs twice: {next(key for key in keys if keys.count(key) > 1)!r}")
    return record


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, {MAX_DIGITS} is the limit")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


DECODER = json.JSONDecoder(
    parse_int=_whole, parse_float=_float, parse_constant=_no_number, object_pairs_hook=_object
)  # its raw_decode reads a value that has something behind it
