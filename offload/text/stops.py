"""Stop strings, found in a text while it is generated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

_FIRST_MARK = 0xD800  # half a surrogate pair, which no text has


class StopStrings:
    """A filter that passes text on until a stop string appears, and holds back text that may begin one.

    stops: found anywhere. of_answer: found only in the part of the text that is the answer. unwritten: tokens that add
    no text, by their names. A stop string that contains such a name also matches the token. stop: the string that was
    found, or "".
    """

    def __init__(
        self, stops: Sequence[str], unwritten: Mapping[str, int] | None = None, *, of_answer: Sequence[str] = ()
    ) -> None:
        every = [stop for stop in (*stops, *of_answer) if stop]
        tokens = {name: token for name, token in (unwritten or {}).items() if any(name in stop for stop in every)}
        marks = {name: chr(_FIRST_MARK + i) for i, name in enumerate(sorted(tokens, key=len, reverse=True))}
        self._marks = {tokens[name]: mark for name, mark in marks.items()}
        self._hidden = dict.fromkeys(map(ord, marks.values()), "")
        self._stops, self._of_answer = (
            {written: stop for stop in each if stop for written in (stop, _marked(stop, marks))}
            for each in (stops, of_answer)
        )
        self._held, self._num_read = "", 0  # num_read: characters of the text so far
        self.stop = ""

    @property
    def found(self) -> bool:
        """Whether a stop string has appeared."""
        return self.stop != ""

    def push(self, text: str, token: int | None = None, *, answer_from: int | None = 0) -> str:
        """The text that is safe to show. After the first complete stop string it is always empty.

        token: the token that completed `text`. answer_from: the index of the answer in the whole text, which it ends;
        None: the text ends in no answer.
        """
        if self.found:
            return ""
        self._held += text
        self._num_read += len(text)
        if token in self._marks:
            self._held += self._marks[token]
        begin = len(self._held) if answer_from is None else self._place(answer_from)
        if hits := list(self._hits(begin)):
            _, at, self.stop = min(hits)
            return self._shown(at, len(self._held))
        cut = len(self._held) - self._num_held(begin)
        return self._shown(cut, cut)

    def flush(self) -> str:
        """The held text at the end, which is no stop string."""
        return self._shown(len(self._held), len(self._held))

    def _place(self, index: int) -> int:
        """The place in the held text of a character of the whole text, or 0 for one before it."""
        place, behind = len(self._held), self._num_read - index
        while place and (behind > 0 or ord(self._held[place - 1]) in self._hidden):
            place -= 1
            behind -= ord(self._held[place]) not in self._hidden
        return place

    def _hits(self, begin: int) -> Iterator[tuple[int, int, str]]:
        """(end, start, stop string) of each that is in the held text. begin: of the answer."""
        for stops, start in ((self._stops, 0), (self._of_answer, begin)):
            for written, stop in stops.items():
                if (at := self._held.find(written, start)) >= 0:
                    yield at + len(written), at, stop

    def _shown(self, end: int, dropped: int) -> str:
        """The held text up to `end`; text up to `dropped` is removed."""
        shown, self._held = self._held[:end], self._held[dropped:]
        return shown.translate(self._hidden)

    def _num_held(self, begin: int) -> int:
        """The length of the longest end of the held text that begins some stop string. begin: of the answer."""
        most = len(self._held)
        return max(self._num_begun(self._stops, most), self._num_begun(self._of_answer, most - begin))

    def _num_begun(self, stops: Mapping[str, str], most: int) -> int:
        """The length of the longest end, of `most` characters at most, that begins one of `stops`."""
        longest = max(map(len, stops), default=1) - 1
        for count in range(min(longest, most), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in stops):
                return count
        return 0


def _marked(stop: str, marks: Mapping[str, str]) -> str:
    """The stop string with a mark in place of each name, the longest names first."""
    names = "|".join(map(re.escape, marks))
    return re.sub(names, lambda found: marks[found[0]], stop) if names else stop
