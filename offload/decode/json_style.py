"""The white space that somebody who writes JSON would write next, judged by what was written so far."""

from __future__ import annotations

import re

NUMBER = frozenset("-01")  # what one may begin with, of the digits two
STRUCTURE = '{}[],:"tfn-01'  # what a value, or what is between two, may begin with
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPEN, _CLOSE = ("{", "["), ("}", "]")


def bare(text: str) -> str | None:
    """Its structure, with empty strings in place of the strings; None where it ends inside one."""
    found = _STRING.sub("\0", text)
    return None if '"' in found else found.replace("\0", '""')


def gap(written: str, following: str) -> str:
    """What is still to be written before the letter `following`, or before a value of any kind ("").

    written: structure so far, see `bare`. Colons and commas are as the last ones. Lines are broken in a bracket as they
    are behind its opening one, and there as behind the last one of the kind; at first they are, by two spaces, but not
    in lists of values within others.
    """
    inside = written.rstrip()
    whole = _gap(inside, following)
    started = written[len(inside) :]
    return whole.removeprefix(started) if whole.startswith(started) else ""


def _gap(inside: str, following: str) -> str:
    last = inside[-1:]
    if not last or following in (":", ","):
        return ""
    if last == ":":
        return _within_line(inside, ":", " ")
    start = _innermost(inside)
    if last in _OPEN:
        return "" if following in _CLOSE else _opened(inside, start, following)
    behind = inside[start + 1 :]
    broken = re.match(r"[ \t]*\n[ \t]*", behind)
    if last == ",":
        colon = _within_line(inside, ":", " ")
        return "\n" + broken[0].rpartition("\n")[2] if broken else _within_line(inside, ",", colon)
    return "\n" + _indentation(inside[:start]) if broken and following in _CLOSE else ""


def _within_line(inside: str, letter: str, at_first: str) -> str:
    """Behind the last `letter` that something follows in its line."""
    found: list[str] = re.findall(letter + r"( *)(?=\S)", inside)
    return found[-1] if found else at_first


def _opened(inside: str, start: int, following: str) -> str:
    """Behind the opening bracket at `start`, the last letter."""
    earlier: list[str] = re.findall(re.escape(inside[start]) + r"(\s*)(?=[^\s\]}])", inside[1:])
    if earlier and "\n" not in earlier[-1]:
        return earlier[-1]
    if not earlier and inside[start] == "[" and start and following != "{":
        return ""
    step = re.search(r"\n([ \t]+)", inside)
    return "\n" + _indentation(inside[:start]) + (step[1] if step else "  ")


def _innermost(inside: str) -> int:
    """The place of the bracket that is open, -1 for none."""
    depth = 0
    for place in range(len(inside) - 1, -1, -1):
        depth += (inside[place] in _CLOSE) - (inside[place] in _OPEN)
        if depth < 0:
            return place
    return -1


def _indentation(before: str) -> str:
    """Of the line that `before` ends in."""
    line = before.rpartition("\n")[2]
    return line[: len(line) - len(line.lstrip(" \t"))]
