"""The next white space of a JSON text, guessed from its style so far."""

from __future__ import annotations

import re

NUMBER = frozenset("-01")  # first letters of numbers; two digits stand for all
STRUCTURE = '{}[],:"tfn-01'  # first letters of values and of the punctuation between them
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPEN, _CLOSE = ("{", "["), ("}", "]")


def bare(text: str) -> str | None:
    """The structure of a JSON text: its strings are replaced by empty ones. None where it ends inside a string."""
    found = _STRING.sub("\0", text)
    return None if '"' in found else found.replace("\0", '""')


def gap(written: str, following: str) -> str:
    """The white space that is still missing before the letter `following`, or before a value of any kind ("").

    written: the structure so far, see `bare`. Spaces after colons and commas are as after the last ones. Lines break
    in a bracket as after its opening bracket, and there as after the last bracket of the same kind. The first bracket
    of a kind breaks lines, indented by two spaces, except nested lists of values.
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
    """The spaces after the last `letter` that is not at the end of its line; `at_first` if there is none."""
    found: list[str] = re.findall(letter + r"( *)(?=\S)", inside)
    return found[-1] if found else at_first


def _opened(inside: str, start: int, following: str) -> str:
    """The white space after the opening bracket at `start`, which is the last letter."""
    earlier: list[str] = re.findall(re.escape(inside[start]) + r"(\s*)(?=[^\s\]}])", inside[1:])
    if earlier and "\n" not in earlier[-1]:
        return earlier[-1]
    if not earlier and inside[start] == "[" and start and following != "{":
        return ""
    step = re.search(r"\n([ \t]+)", inside)
    return "\n" + _indentation(inside[:start]) + (step[1] if step else "  ")


def _innermost(inside: str) -> int:
    """The index of the innermost open bracket, -1 for none."""
    depth = 0
    for place in range(len(inside) - 1, -1, -1):
        depth += (inside[place] in _CLOSE) - (inside[place] in _OPEN)
        if depth < 0:
            return place
    return -1


def _indentation(before: str) -> str:
    """The indentation of the last line of `before`."""
    line = before.rpartition("\n")[2]
    return line[: len(line) - len(line.lstrip(" \t"))]
