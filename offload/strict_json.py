"""The strict JSON parser for outside data: accepted JSON means the same to every program and can be written again."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from offload.errors import ModelError, unreadable

MAX_JSON_BYTES = 1 << 20
MAX_DIGITS = 4300  # of a whole number, Python's limit for reading and writing one


def parse(text: str) -> Any:
    """The value in `text`. Raises ValueError, also for a key that occurs twice and for a number that no float can hold,
    or RecursionError."""
    return DECODER.decode(text)


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The JSON object in `path`, a file of a model. The last value of a repeated key counts, as in other programs, and
    a number may be Infinity, as Python writes a limit that is none (of Mamba-2's time steps). ModelError if the file is
    missing, over `max_bytes`, not JSON or not an object."""
    try:
        if path.parent.exists() and not path.parent.is_dir():
            raise ModelError(f"{path.parent} is a file; give the folder that holds {path.name}")
        if not path.is_file():
            what = f"{path.parent} has no {path.name}" if path.parent.is_dir() else f"there is no folder {path.parent}"
            raise ModelError(f"{what}; give the path of a downloaded model folder (nothing is downloaded)")
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
        if len(text) > max_bytes:
            raise ModelError(f"{path} is over the limit of {max_bytes} bytes; is it really a {path.name}?")
        data = json.loads(text.decode("utf-8"), parse_constant=_infinite)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, a number without end
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a JSON {type(data).__name__}, not an object; download it again")
    return data


def check_depth(value: object, limit: int, name: str) -> None:
    """Raises ValueError if `value` is nested deeper than `limit`, too deep for recursive functions. name: of the value
    in messages."""
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
        times = Counter(key for key, _ in pairs)
        raise ValueError(f"a field occurs twice: {next(key for key in times if times[key] > 1)!r}")
    return record


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, {MAX_DIGITS} is the limit")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _infinite(text: str) -> float:
    return math.inf if text == "Infinity" else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


DECODER = json.JSONDecoder(
    parse_int=_whole, parse_float=_float, parse_constant=_no_number, object_pairs_hook=_object
)  # its raw_decode reads a value that is followed by other text
