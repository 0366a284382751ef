"""Word wrap of a text that is streamed to a terminal.

Every character is written at once. Where a word turns out not to fit the row, its beginning is erased and written again
on the next row. Code, tables and data are left to the terminal: it knows that their rows are one line, so what a person
copies of them has no more line ends than the text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from rich.cells import get_character_cell_size

_FENCE = re.compile(r"[\s>]*(?:(?:[-*+]|\d+[.)])\s+)?(`{3,}(?=[^`]*$)|~{3,})")
_LITERAL = re.compile(r"\s*\||(?: {4}| {0,3}\t)(?!\s*(?:[-*+]|\d+[.)])\s)")  # a table's row; indented, but no list
_DATA = "{["  # first characters of an answer that is JSON
_LINE_BEGINNING = 200  # characters that show what a line is
_TAB = 8
_WIDE = 2  # columns of a character beside which a line may break
_CLOSING = frozenset(",.;:!?)]}%'\"、。，．・：；！？）」』】》〉〕］｝ー々…”’")  # no row begins with one
_OPENING = frozenset("（「『【《〈〔［｛“‘\u200d")  # no row ends with one, nor within an emoji of several


class WordWrap:
    """Wraps one text. columns: called at the beginning of each row for the terminal's width; 0: there is no limit."""

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._fence = ""  # that has opened the code block in which the text is
        self._is_data: bool | None = None  # None: nothing was written yet
        self._line = self._word = self._last = ""
        self._column = self._word_column = self._last_columns = 0
        self._begin_line()

    def push(self, text: str) -> str:
        """The characters to write to the terminal for the next piece of text, which has no control characters."""
        return "".join(map(self._add, text))

    def _add(self, char: str) -> str:
        if char == "\n":
            self._end_line()
            return char
        if len(self._line) < _LINE_BEGINNING:
            self._line += char
        if char in " \t":
            return self._add_space(char)
        if self._is_data is None and not char.isspace():
            self._is_data = char in _DATA
        return char if char == "\r" else self._add_visible(char)

    def _add_space(self, space: str) -> str:
        """A space, or none where it would begin a row; the line may break after it."""
        is_stuck = space == "\t" and self._column == self._width - 1 and self._column > self._word_column
        if (self._column >= self._width or is_stuck) and self._is_prose:  # a tab does not leave the last column
            self._is_due = True
            return ""
        tab = min((self._column // _TAB + 1) * _TAB, self._width - 1)
        self._column = self._column + 1 if space == " " else tab
        self._begin_word()
        return space

    def _add_visible(self, char: str) -> str:
        columns, written = get_character_cell_size(char), ""
        if columns and self._is_due:
            written = "\n"
            self._begin_row()
        if columns and _WIDE in (columns, self._last_columns) and self._may_break(char):
            self._begin_word()
        if columns and self._column + columns > self._width:
            written += self._next_row()
        self._column += columns
        self._last, self._last_columns = char, columns or self._last_columns
        if self._word_column:
            self._word += char
        return written + char

    def _next_row(self) -> str:
        """Go to the next row, with the word that has begun. The terminal does so by itself where no word has, and for a
        word longer than a row, which it breaks."""
        word, begin = self._word, self._word_column
        if not word or not begin or not self._is_prose:
            self._begin_row()
            return ""
        columns = self._column - begin
        self._begin_row()
        self._column = columns
        return f"\x1b[{begin + 1}G\x1b[K\n{word}"

    @property
    def _is_prose(self) -> bool:
        return not self._fence and not self._is_data and not _LITERAL.match(self._line)

    def _may_break(self, char: str) -> bool:
        """Whether a row may begin with `char`, as far as wide characters decide."""
        return char not in _CLOSING and self._last not in _OPENING

    def _begin_line(self) -> None:
        self._line = ""
        self._begin_row()

    def _begin_row(self) -> None:
        self._width = self._columns() or sys.maxsize
        self._column, self._is_due = 0, False
        self._begin_word()

    def _begin_word(self) -> None:
        """A word begins here. word: its characters, kept where it could go to the next row."""
        self._word, self._word_column = "", self._column
        self._last, self._last_columns = "", 0

    def _end_line(self) -> None:
        """A line is over, which may have been the fence of a code block."""
        alone = self._line.strip("> \t\r")
        if not self._fence:
            found = _FENCE.match(self._line)
            self._fence = found[1] if found else ""
        elif len(alone) >= len(self._fence) and set(alone) == {self._fence[0]}:
            self._fence = ""
        self._begin_line()
