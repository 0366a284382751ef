"""JSON from a model folder, read with types and limits. Whatever is wrong with it is a ModelError."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from offload.errors import ModelError, unreadable

MAX_JSON_BYTES = 1 << 20
TEXT_CONFIG = "text_config"  # of a wrapper: the language model's own


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The JSON object in `path`. ModelError when it is missing, over `max_bytes`, not JSON or not an object."""
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
        data = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, a number without end
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a JSON {type(data).__name__}, not an object; download it again")
    return data


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def is_neutral(value: object, allowed: tuple[object, ...]) -> bool:
    """True for null and the values in `allowed`. 1 equals 1.0, but true equals neither."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed
    )


class Fields:
    """Typed reading of one JSON object `data`; null reads as absent, and what is absent without a default is refused.

    Every refusal is a ModelError that names `where` the object came from, the field, its value and the limit.
    """

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        self.data, self.where = data, where

    def refuse(self, key: str, limit: str) -> NoReturn:
        value = reprlib.repr(self.data[key]) if key in self.data else "missing"
        raise ModelError(f"{self.where}: {key} is {value}; it must be {limit}")

    def integer(self, key: str, most: int, default: int | None = None) -> int:
        """An integer from 1 to `most`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            self.refuse(key, f"an integer from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0, most: float = 1e12) -> float:
        """A number over 0, from `least` to `most`."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (least <= value <= most and value > 0):
            self.refuse(key, f"a number over 0, from {least:g} to {most:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number over 0, or None where the field is absent."""
        return None if self.data.get(key) is None else self.number(key)

    def is_zero(self, key: str) -> bool:
        """Is the field there, and 0? Where a formula has `value or default` that reads as absent."""
        return is_neutral(self.data.get(key), (0,)) and self.data.get(key) is not None

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        return value if isinstance(value, bool) else self.refuse(key, "true or false")

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of the strings `allowed`."""
        value = self._value(key, default)
        return (
            value if isinstance(value, str) and value in allowed else self.refuse(key, f"one of {', '.join(allowed)}")
        )

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """One id from 0 to `vocab_size` - 1, or None where the field is absent."""
        ids = self.token_ids(key, vocab_size)
        if isinstance(self.data.get(key), list):
            self.refuse(key, "one token id, not a list")
        return ids[0] if ids else None

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """No id, one id or a list of ids, each from 0 to `vocab_size` - 1; repeats are dropped. -1 alone is no id."""
        value = self.data.get(key)
        ids = value if isinstance(value, list) else [] if value is None or self._is_minus_one(key) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            self.refuse(key, f"a token id or a list of ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))

    def _is_minus_one(self, key: str) -> bool:
        return type(self.data.get(key)) is int and self.data[key] == -1

    def _value(self, key: str, default: object) -> object:
        value = self.data.get(key)
        return default if value is None else value
