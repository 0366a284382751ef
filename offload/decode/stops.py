"""Stop strings, found in a text while it is generated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_FIRST_MARK = 0xD800  # half a surrogate pair, which no text has


class StopStrings:
    """A filter that passes text on until one of `stops` appears, and holds back text that may begin a stop string.

    unwritten: tokens that add no text, by their names. A stop string that contains such a name also matches the token.
    """

    def __init__(self, stops: Sequence[str], unwritten: Mapping[str, int] | None = None) -> None:
        stops = [stop for stop in stops if stop]
        tokens = {name: token for name, token in (unwritten or {}).items() if any(name in stop for stop in stops)}
        marks = {name: chr(_FIRST_MARK + i) for i, name in enumerate(sorted(tokens, key=len, reverse=True))}
        self._marks = {tokens[name]: mark for name, mark in marks.items()}
        self._hidden = dict.fromkeys(map(ord, marks.values()), "")
        self._stops = list(dict.fromkeys([*stops, *(_marked(stop, marks) for stop in stops)]))
        self._held = ""
        self.found = False

    def push(self, text: str, token: int | None = None) -> str:
        """The text that is safe to show. After the first complete stop string it is always empty.

        token: the token that completed `text`.
        """
        if self.found:
            return ""
        self._held += text
        if token in self._marks:
            self._held += self._marks[token]
        hits = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            self.found = True
            _, at = min(hits)
            return self._shown(at, len(self._held))
        cut = len(self._held) - self._num_held()
        return self._shown(cut, cut)

    def flush(self) -> str:
        """The held text at the end, which is no stop string."""
        return self._shown(len(self._held), len(self._held))

    def _shown(self, end: int, dropped: int) -> str:
        """The held text up to `end`; text up to `dropped` is removed."""
        shown, self._held = self._held[:end], self._held[dropped:]
        return shown.translate(self._hidden)

    def _num_held(self) -> int:
        """The length of the longest end of the text that begins some stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0


def _marked(stop: str, marks: Mapping[str, str]) -> str:
    """The stop string with a mark in place of each name, the longest names first."""
    names = "|".join(map(re.escape, marks))
    return re.sub(names, lambda found: marks[found[0]], stop) if names else stop
