"""Word wrap of streamed text, on a terminal's screen: words stay whole, all text is there at once, and code and data
are the terminal's own affair."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from itertools import pairwise

import pyte
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from triforce_cli.screen.word_wrap import WordWrap

ROWS = 400


class Screen(pyte.Screen):
    """A wide character that does not fit the last column goes to the next row, as on terminals that people use."""

    def draw(self, data: str) -> None:
        for char in data:
            if cell_len(char) == 2 and self.cursor.x == self.columns - 1:
                self.cursor.x = self.columns
            super().draw(char)


class Shown:
    """What a terminal shows of a text."""

    def __init__(self, columns: int, *, width: Callable[[], int] | None = None) -> None:
        self.screen = Screen(columns, ROWS)
        self._stream = pyte.Stream(self.screen)
        self._wrap = WordWrap(width or (lambda: columns))

    def add(self, piece: str) -> Shown:
        self._stream.feed(self._wrap.push(piece).replace("\n", "\r\n"))  # as terminals are set
        return self

    @property
    def rows(self) -> list[str]:
        """Without white space at their ends; so many as there are up to the cursor."""
        cells = [self.screen.buffer[row] for row in range(self.screen.cursor.y + 1)]
        return ["".join(row[x].data for x in range(self.screen.columns)).rstrip() for row in cells]


def shown(text: str, columns: int) -> list[str]:
    return Shown(columns).add(text).rows


def pieces(text: str, ends: Iterable[int]) -> list[str]:
    """The text cut at some of its places."""
    places = [0, *sorted({end % (len(text) + 1) for end in ends}), len(text)]
    return [text[start:stop] for start, stop in pairwise(places)]


def black(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


COLUMNS = st.integers(13, 50)  # of no word more
ENDS = st.lists(st.integers(0, 400), max_size=40)
WORD = st.text("abcdefgh.,-", min_size=1, max_size=12).map(lambda word: f"w{word}")


@given(st.lists(st.lists(WORD, max_size=30), max_size=4), ENDS, COLUMNS)
def test_rows_are_those_of_textwrap_and_all_text_is_there_at_once(
    lines: list[list[str]], ends: list[int], columns: int
) -> None:
    text, screen, so_far = "\n".join(map(" ".join, lines)), Shown(columns), ""
    for piece in pieces(text, ends):
        so_far += piece
        screen.add(piece)
        assert black("".join(screen.rows)) == black(so_far)
    wrapped = [textwrap.wrap(line, columns, break_on_hyphens=False) or [""] for line in text.split("\n")]
    assert screen.rows == [row for rows in wrapped for row in rows]


MARK = "\u0332"  # below the character before it
WIDE = "日本語漢字한국어。、（）😀「」"
OTHER = st.text("ab" + MARK + WIDE, min_size=1, max_size=9).filter(lambda word: word[0] in "ab")


@given(
    st.lists(st.tuples(WORD | OTHER, st.sampled_from([" ", "  ", "\t", "\n", "\n\n", "      "])), max_size=40),
    ENDS,
    COLUMNS,
)
@example([("waaaaaaaaaaaa", "\t"), ("a", " ")], [], 14)  # a tab in the last column
def test_no_word_is_cut_beside_wide_characters_tabs_and_combining_marks(
    words: list[tuple[str, str]], ends: list[int], columns: int
) -> None:
    text = "".join(word + space for word, space in words)
    text = re.sub(r"\n[ \t]+", "\n", text)  # no code
    screen, so_far = Shown(columns), ""
    for piece in pieces(text, ends):
        so_far += piece
        screen.add(piece)
        assert black("".join(screen.rows)) == black(so_far)
    narrow = re.compile(rf"[^\s{WIDE}]+")
    assert [part for row in screen.rows for part in narrow.findall(row)] == narrow.findall(text)
    assert not any(row.startswith(tuple("。、）」")) for row in screen.rows)


def test_wide_characters_fill_their_rows_without_line_ends_of_ours() -> None:
    text = "漢字" * 20
    assert WordWrap(lambda: 15).push(text) == text
    assert shown(text, 15) == [text[start : start + 7] for start in range(0, 40, 7)]


def test_a_stop_after_a_wide_character_takes_it_to_the_next_row() -> None:
    assert shown("漢字漢字漢。字", 10) == ["漢字漢字", "漢。字"]
    assert shown("漢字漢字（漢", 10) == ["漢字漢字", "（漢"]


def test_a_row_may_end_after_a_wide_character_and_its_marks() -> None:
    assert shown("漢字漢字abc", 10) == ["漢字漢字", "abc"]
    assert shown(f"漢字漢字{MARK}abc", 10) == [f"漢字漢字{MARK}", "abc"]
    assert WordWrap(lambda: 10).push(f"0123456789 {MARK}") == f"0123456789{MARK}"


def test_the_beginning_of_a_word_is_erased_where_the_word_does_not_fit() -> None:
    wrap = WordWrap(lambda: 10)
    assert wrap.push("one two th") == "one two th"
    assert wrap.push("r") == "\x1b[9G\x1b[K\nthr"
    assert wrap.push("ee") == "ee"


def test_a_word_longer_than_a_row_begins_one_and_has_no_line_ends_of_ours() -> None:
    address = "https://example.com/a/long/path"
    assert WordWrap(lambda: 12).push(f"see {address} there").count("\n") == 2
    assert shown(f"see {address} there", 12) == ["see", *textwrap.wrap(address, 12, break_on_hyphens=False), "there"]
    assert WordWrap(lambda: 12).push(address) == address


def test_spaces_that_would_begin_a_row_are_left_out() -> None:
    assert shown("0123456789   x", 10) == ["0123456789", "x"]
    assert shown("0123456789\nx", 10) == ["0123456789", "x"]
    assert shown("0123456789   \nx", 10) == ["0123456789", "x"]
    assert shown("01234567\t\tx y", 10) == ["01234567 x", "y"]


LONG = "some words of code that are longer than a row"


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG}\n```",
        f"```python\n{LONG}\n\n~~~\n``\n{LONG}\n",
        f"~~~\n{LONG}\n```\n{LONG}\n~~~~",
        f"````\n```\n{LONG}\n```\n{LONG}\n````",
        f"1. ```sh\n   {LONG}\n   ```",
        f"> ```\n> {LONG}\n> ```",
        f"- x\n\n    ```\n    {LONG}\n    ```",
        f"| a | {LONG} |\n|---|---|\n  | b | {LONG} |",
        f"    {LONG}",
        f"\t{LONG}",
        f'{{"a": "{LONG}",\n"b": "{LONG}"}}\n{LONG}',
        f'\n["{LONG}"]',
    ],
)
def test_code_tables_and_data_are_left_to_the_terminal(text: str) -> None:
    assert WordWrap(lambda: 20).push(text) == text
    if not text.lstrip().startswith(("{", "[")) and not text.endswith(f"{LONG}\n"):
        after = WordWrap(lambda: 20)
        after.push(f"{text}\n")
        assert after.push(LONG) == WordWrap(lambda: 20).push(LONG) != LONG


@pytest.mark.parametrize("begin", ["", "- ", "    - ", "\t1. ", "> ", "# ", "a | b ", "`` ```", "```a``` ", "x {"])
def test_prose_is_wrapped_also_in_lists_and_quotations(begin: str) -> None:
    text = begin + LONG
    assert shown(text, 20)[0].split() == text.split()[: len(shown(text, 20)[0].split())]
    assert WordWrap(lambda: 20).push(text) != text


def test_the_width_is_asked_at_the_beginning_of_each_row() -> None:
    widths = iter([20, 10, 29, 29])
    screen = Shown(40, width=lambda: next(widths))
    screen.add("some words in rows of many widths, as a person drags the window")
    assert screen.rows == ["some words in rows", "of many", "widths, as a person drags the", "window"]


def test_a_terminal_of_unknown_width_gets_the_text_alone() -> None:
    assert WordWrap(lambda: 0).push(LONG * 9) == LONG * 9
