"""Tool calls that grow: the arguments of calls in JSON, piece by piece, from where the call's form is certain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from triforce_cli.tools.call_forms import Form
from triforce_cli.tools.calls import Calls

MOST_BEFORE = 512  # characters of a call before its arguments; a longer one does not grow


@dataclass(frozen=True)
class Growth:
    """A piece of a call. number: of the call in its reply, from 0. arguments: more of their JSON text."""

    number: int
    name: str
    arguments: str


class GrowingCalls:
    """Reads calls piece by piece. Once a call has its name and the first bracket of its arguments, all up to the
    bracket that closes them is their text, also if it is cut or no JSON. A reply that does not begin a call so at its
    first mark has none that grow: it is to be read whole, at its end. num_begun: calls that grow or have grown."""

    def __init__(self, calls: Calls, before: str = "") -> None:
        """before: the reply up to its first mark."""
        self._is_one, self._names = calls.choice.is_one, {each["name"] for each in calls.allowed}
        self._forms = [form for form in calls.forms if form.read.grows is not None]
        self._reply = before[-1:]  # a form may need a line's beginning
        self._at = len(self._reply)  # the next character to read
        self.num_begun, self._name, self._is_inside = 0, "", False
        self._num_open, self._is_quoted, self._is_escaped = 0, False, False  # in the arguments that are read
        self._looked = 0  # the place before which no further call begins

    def push(self, text: str) -> list[Growth]:
        """The growth by the next text; the first one begins with the mark."""
        self._reply += text
        found = list[Growth]()
        while self._is_inside or self._begins():
            start = self._at
            self._read_arguments()
            if self._at == start:
                break
            found.append(Growth(self.num_begun - 1, self._name, self._reply[start : self._at]))
        return found

    @property
    def rest(self) -> str:
        """The text behind the calls, in which there may be some that do not grow."""
        return "" if self._is_inside or self._is_one else self._reply[self._at :]

    def _begins(self) -> bool:
        """Whether a call has begun, whose arguments are next. The first one tells the form of all."""
        if self._is_one and self.num_begun:
            return False
        for form, found in self._beginnings():
            if found and found[1] in self._names and found.end() - found.start() <= MOST_BEFORE:
                self._forms, self._name, self._at = [form], found[1], found.end()
                self.num_begun, self._is_inside = self.num_begun + 1, True
                return True
        self._looked = len(self._reply) - MOST_BEFORE
        if not self.num_begun and self._looked > 0:
            self._forms = []
        return False

    def _beginnings(self) -> Iterator[tuple[Form, re.Match[str] | None]]:
        """Matches at the places where the next call may begin."""
        for form in self._forms:
            grows, goes_on = form.read.grows, form.read.goes_on
            if grows is None:
                continue
            if not self.num_begun:
                yield form, grows.match(self._reply, self._behind(form.around))
                continue
            if goes_on is not None:
                yield form, goes_on.match(self._reply, self._at, self._at + MOST_BEFORE)
            for each in grows.finditer(self._reply, max(self._at, self._looked)):
                yield form, each

    def _behind(self, around: Iterable[str]) -> int:
        """The place behind a mark that stands before all calls, if there is one."""
        mark = next((mark for mark in around if self._reply.startswith(mark, self._at)), "")
        return len(self._reply) - len(self._reply[self._at + len(mark) :].lstrip()) if mark else self._at

    def _read_arguments(self) -> None:
        """Read up to the bracket that closes the arguments, or to the end of what has come."""
        while self._is_inside and self._at < len(self._reply):
            letter = self._reply[self._at]
            self._at += 1
            if self._is_quoted:
                self._is_quoted = self._is_escaped or letter != '"'
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter in "{[":
                self._num_open += 1
            elif letter in "}]":
                self._num_open -= 1
                self._is_inside = self._num_open > 0
            else:
                self._is_quoted = letter == '"'
