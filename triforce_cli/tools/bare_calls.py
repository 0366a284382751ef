"""The beginning of a reply that may be nothing but tool calls without a mark, as long as it can still become that."""

from __future__ import annotations

import re

from triforce_cli.tools.calls import Calls

_FENCE = "```json"
_BETWEEN = re.compile(r"(?:[\s;,]|```(?:json)?(?=[\s{\[]))*")  # calls
_NAME = re.compile(r"[\w.-]+")
_BEHIND_NAME = re.compile(r"[ \t]*\(|[ \t]*\n\s*\{")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class BareCalls:
    """Reads a reply piece by piece, each character once. possible: whether it can still be nothing but calls: JSON,
    Python's name(...), or a name on a line before JSON, of offered tools."""

    def __init__(self, calls: Calls | None) -> None:
        self._calls, self._kinds = calls, calls.bare if calls is not None else frozenset()
        self.possible = bool(self._kinds)
        self._text, self._at, self._start = "", 0, 0  # at: the next character; start: of the call that it is in
        self._open: list[str] = []  # brackets that close the call
        self._quote, self._in_list = "", False

    def push(self, text: str) -> bool:
        """Whether the reply can still be nothing but calls after this text."""
        self._text += text
        while self.possible and self._at < len(self._text) and (self._within() if self._open else self._between()):
            pass
        return self.possible

    def _between(self) -> bool:
        """Read up to the beginning of a call. False if more text is needed, or no call can follow."""
        self._at = _end(_BETWEEN, self._text, self._at)
        rest = self._text[self._at :]
        if _FENCE.startswith(rest):  # also nothing
            return False
        if rest[0] in "[]":
            self.possible = self._in_list != (rest[0] == "[")
            self._in_list, self._at = rest[0] == "[", self._at + 1
            return True
        self._start = self._at
        if rest[0] == "{":
            self.possible = "{" in self._kinds
            return self._begin(self._at)
        return self._named()

    def _named(self) -> bool:
        """Read a name up to the bracket behind it."""
        end = _end(_NAME, self._text, self._at)
        name, behind = self._text[self._at : end], self._text[end:]
        is_kind = self._calls is not None and bool(self._kinds & {"(", "\n"})
        names = [tool["function"]["name"] for tool in self._calls.tools] if self._calls and is_kind else []
        if not behind:
            self.possible = any(each.startswith(name) for each in names)
            return False
        bracket = _BEHIND_NAME.match(behind)
        if bracket is None:
            kinds = {"\n"} if "\n" in behind else {"\n", "("}
            self.possible = name in names and behind.isspace() and bool(kinds & self._kinds)
            return False
        self.possible = name in names and ("(" if bracket[0].endswith("(") else "\n") in self._kinds
        return self._begin(end + bracket.end() - 1)

    def _begin(self, bracket: int) -> bool:
        """Read the first bracket of a call."""
        self._open.append(_CLOSERS[self._text[bracket]])
        self._at = bracket + 1
        return True

    def _within(self) -> bool:
        """Read a character of a call."""
        letter = self._text[self._at]
        if self._quote and letter == "\\":
            if self._at + 1 == len(self._text):
                return False
            self._at += 1
        elif self._quote:
            self._quote = "" if letter == self._quote else self._quote
        elif letter in "\"'":
            self._quote = letter
        elif letter in _CLOSERS:
            self._open.append(_CLOSERS[letter])
        elif letter in ")]}":
            self.possible = self._open.pop() == letter and (bool(self._open) or self._is_call())
        self._at += 1
        return True

    def _is_call(self) -> bool:
        """Whether the text from the call's beginning to here is one of an offered tool."""
        return self._calls is not None and bool(self._calls.read(self._text[self._start : self._at + 1])[0])


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return found.end() if found else start
