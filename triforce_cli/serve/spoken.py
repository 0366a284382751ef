"""The text of a reply outside its tool calls, piece by piece."""

from __future__ import annotations

from triforce_cli.answering.thoughts import overlap
from triforce_cli.apis.api import as_json
from triforce_cli.tools.bare_calls import BareCalls
from triforce_cli.tools.call_forms import Call
from triforce_cli.tools.calls import Calls
from triforce_cli.tools.growing import GrowingCalls, Growth


class Spoken:
    """Tells text and calls as they are certain. What may be a call is held back: from the first mark on, until it grows
    or the reply ends, and from the reply's beginning as long as it can be nothing but calls. calls: None if no tools
    are offered, and nothing is held back."""

    def __init__(self, calls: Calls | None) -> None:
        self._calls = calls
        self._openings = tuple(calls.openings) if calls is not None else ()
        self._bare = BareCalls(calls)
        self._growing: GrowingCalls | None = None  # from the first mark on
        self._reply, self._num_shown = "", 0

    def push(self, text: str) -> tuple[str, list[Growth]]:
        """(text that is certain after this piece not to be in a call, growth of calls)."""
        if self._calls is None:
            return text, []
        self._reply += text
        if self._growing is not None:
            return "", self._growing.push(text)
        if self._bare.possible and self._bare.push(text):
            return "", []
        first, shown = self._first_opening(), self._shown_to(self._certain())
        if first is None:
            return shown, []
        self._growing = GrowingCalls(self._calls, self._reply[:first])
        return shown, self._growing.push(self._reply[first:])

    def end(self) -> tuple[str, list[Growth]]:
        """The rest of the text, and calls that did not grow, whole. A call that cannot be read is text, unless it has
        grown."""
        if self._calls is None:
            return "", []
        if self._growing is not None and self._growing.num_begun:
            more = self._calls.read(self._growing.rest)[0] if self._growing.rest else []
            return "", _whole(more, self._growing.num_begun)
        rest, calls = self._read()
        return rest, _whole(calls, 0)

    def _read(self) -> tuple[str, list[Call]]:
        """The rest of the text, and the calls of a reply of which none have grown."""
        assert self._calls is not None
        calls, first = self._calls.read(self._reply)[0], self._first_opening()
        if not calls or (first is None and not self._bare.possible):
            return self._shown_to(len(self._reply)), []
        if first is None or (self._bare.possible and self._calls.read(self._reply[first:])[0] != calls):
            return "", calls  # without marks, or with one in an argument
        return self._shown_to(first), calls

    def _shown_to(self, end: int) -> str:
        start, self._num_shown = self._num_shown, max(end, self._num_shown)
        return self._reply[start : self._num_shown]

    def _certain(self) -> int:
        """The end of the text before the first mark, or before what may become one."""
        first = self._first_opening()
        return len(self._reply) - self._num_begun() if first is None else first

    def _first_opening(self) -> int | None:
        found = [at for mark in self._openings if (at := self._reply.find(mark, self._num_shown)) >= 0]
        return min(found, default=None)

    def _num_begun(self) -> int:
        """The number of characters at the end that may begin a mark."""
        told_next = self._reply[self._num_shown :]
        return max((overlap(told_next, mark) for mark in self._openings), default=0)


def _whole(calls: list[Call], start: int) -> list[Growth]:
    """Calls that come whole. start: the number of the first."""
    return [Growth(number, call["name"], as_json(call["arguments"])) for number, call in enumerate(calls, start)]
