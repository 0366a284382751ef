"""Strings that end a text, found in it as it is generated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_FIRST_MARK = 0xD800  # half a surrogate pair, which no text has


class StopStrings:
    """Passes text on until one of `stops` appears in it; holds back what may be the beginning of one.

    unwritten: the tokens that add nothing to the text, by their names. A stop string that has such a name in it is
    also found where the token stands.
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
        """The text that is safe to show. After the stop string that is the first to be complete nothing more comes.

        token: the one that `text` was complete with.
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
        """What was held back and turned out to be no stop string."""
        return self._shown(len(self._held), len(self._held))

    def _shown(self, end: int, dropped: int) -> str:
        """The held text up to `end`, which is let go up to `dropped`."""
        shown, self._held = self._held[:end], self._held[dropped:]
        return shown.translate(self._hidden)

    def _num_held(self) -> int:
        """The longest end of the text that is a beginning of some stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0


def _marked(stop: str, marks: Mapping[str, str]) -> str:
    """With a mark in place of each name, the longest names first."""
    names = "|".join(map(re.escape, marks))
    return re.sub(names, lambda found: marks[found[0]], stop) if names else stop
