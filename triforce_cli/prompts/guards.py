"""Guards against injection: special strings of a tokenizer or a template stay ordinary text in people's messages.

Text is cut after the first character of each such string, and the two sides are encoded separately, so that the string
cannot become one token. Strings of one character cannot be cut and are not guarded.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

CUT = "\ud801"  # half a surrogate pair, which no text contains: conversation.py refuses it


class Guard:
    """Inserts CUT into every occurrence of `strings`, also where they overlap."""

    def __init__(self, strings: Collection[str]) -> None:
        rests: dict[str, list[str]] = {}
        for string in strings:
            if len(string) > 1:
                rests.setdefault(string[0], []).append(re.escape(string[1:]))
        firsts = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
        self._firsts = re.compile("|".join(firsts) or "(?!)")

    def __call__(self, text: str) -> str:
        return self._firsts.sub(rf"\g<0>{CUT}", text)

    def all_in(self, value: object) -> object:
        """The JSON value `value` with CUT inserted in all of its texts."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {self(name): self.all_in(each) for name, each in value.items()}
        return [self.all_in(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Guards:
    """The guards of a chat. people: for messages and documents. model: for replies, in which a template may look for
    some of the strings."""

    people: Guard
    model: Guard
