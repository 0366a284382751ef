"""Fields of a line of `--input-jsonl`, checked one by one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import UsageError

_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Fields:
    """Of a line. place: names it."""

    data: Mapping[str, Any]
    place: str

    def get(self, key: str, fits: Callable[[Any], bool], wanted: str, default: Any = None) -> Any:
        value = self.data.get(key, default)
        if key in self.data and not fits(value):
            raise UsageError(f"{self.place}: {key} is {_short(value)}, it must be {wanted}")
        return value


def is_id(value: Any) -> bool:
    return is_text(value) or is_whole(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and is_unicode(value)


def is_meta(value: Any) -> bool:
    return isinstance(value, dict) and is_unicode(json.dumps(value, ensure_ascii=False))


def are_objects(value: Any) -> bool:
    """A list of them, with texts that UTF-8 can encode."""
    is_list = isinstance(value, list) and value != [] and all(isinstance(each, dict) for each in value)
    return is_list and is_unicode(json.dumps(value, ensure_ascii=False))


def is_unicode(text: str) -> bool:
    """True if UTF-8 can encode it: JSON escapes can contain half of a surrogate pair."""
    return _HALF.search(text) is None


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
