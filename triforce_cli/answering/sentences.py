"""Sentences of a text, and the items and rows of its lists and tables: where they begin."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FAR = 240  # characters to look for the beginning of a sentence
_GAP = re.compile(r"\s+|(?<=[。！？])(?=\S)")
_ENDED = re.compile(r"[.!?…][\"'”’»)\]]*$")
_SHORTENED = re.compile(r"(?:^|[\s(])(?:[A-Z][a-z]{0,2}|[a-z]|pp|cf|ca|vs|approx|[a-z]\.[a-z])\.$|^\s*\d+\.$")
_CELLS = re.compile(r"\||\t|\S {2,}\S|;\S.*;\S|,\S.*,\S")  # of a row
_ITEM = re.compile(r"(?:[-*•☐☒]|\(?\w{1,3}[.)])\s")
_PARAGRAPH = 2000  # characters on either side that are looked at
_WRAPPED = 30  # least characters of a line that goes on below


def whole(text: str, start: int, end: int, least: int = 0, most: int | None = None) -> tuple[int, int]:
    """The range of characters, extended to whole sentences between `least` and `most`; to whole words where a sentence
    begins or ends far away."""
    most = len(text) if most is None else most
    first, last = max(least, start - _FAR), min(most, end + _FAR)
    begins = [at for at in _beginnings(text, first, last) if at <= start]
    ends = [at for at in _beginnings(text, max(start, end - 1), last) if at >= end]
    near_start = first if first == least else _word_start(text, start)
    near_end = last if last == most else _word_end(text, end)
    return begins[-1] if begins else near_start, ends[0] if ends else near_end


def _beginnings(text: str, first: int, last: int) -> Iterator[int]:
    """The positions in the text, from `first` to `last`, at which sentences begin."""
    while first and text[first - 1].isspace():
        first -= 1
    for gap in _GAP.finditer(text, first, last):
        if _is_between(text, gap.start(), gap.end()):
            yield gap.end()


def _is_between(text: str, start: int, end: int) -> bool:
    """Whether the white space is between two sentences, or two rows or items."""
    gap, line = text[start:end], text[text.rfind("\n", 0, start) + 1 : start]
    if gap.count("\n") > 1 or not gap:
        return True
    if "\n" in gap:
        return not _goes_on(text, line, start, end)
    return bool(_ENDED.search(line)) and not _SHORTENED.search(line) and not text[end : end + 1].islower()


def _goes_on(text: str, line: str, start: int, end: int) -> bool:
    """Whether the line before a line break goes on after it: it is long, and the next word had no room on it."""
    stop = text.find("\n", end)
    below = text[end : stop if stop >= 0 else len(text)]
    if _CELLS.search(line) or _CELLS.search(below) or _ITEM.match(below) or _ENDED.search(line):
        return False
    return len(line) >= _WRAPPED and len(line) + 1 + len(below.split(" ", 1)[0]) > _width(text, start)


def _width(text: str, at: int) -> int:
    """The characters of the longest line of the paragraph around `at`."""
    first = max(text.rfind("\n\n", 0, at) + 2, at - _PARAGRAPH, 0)
    last = text.find("\n\n", at, at + _PARAGRAPH)
    return max(map(len, text[first : last if last >= 0 else at + _PARAGRAPH].split("\n")))


def _word_start(text: str, at: int) -> int:
    while at and not text[at - 1].isspace():
        at -= 1
    return at


def _word_end(text: str, at: int) -> int:
    while at < len(text) and not text[at].isspace():
        at += 1
    return at
