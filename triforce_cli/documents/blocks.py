"""Blocks of text in reading order: blank lines between paragraphs, none between items of a list or rows of a table."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

CELL_GAP = " | "


@dataclass(frozen=True)
class Block:
    """A block of text. group: neighbouring blocks of one group, other than "", have no blank line between them.
    is_main: inside the page's main element. is_margin: navigation, comments and the like."""

    text: str
    group: str = ""
    is_main: bool = False
    is_margin: bool = False


class Writer:
    """Joins blocks into a text; only the text is kept in memory."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._group = ""

    def add(self, block: Block) -> None:
        if self._text.tell():
            self._text.write("\n" if block.group and block.group == self._group else "\n\n")
        self._text.write(block.text)
        self._group = block.group

    @property
    def text(self) -> str:
        """The text, with a line end unless it is empty."""
        return f"{self._text.getvalue()}\n" if self._text.tell() else ""


def joined(blocks: Iterable[Block]) -> str:
    """The text of the blocks, with a line end unless it is empty."""
    writer = Writer()
    for block in blocks:
        writer.add(block)
    return writer.text


def length(blocks: Iterable[Block]) -> int:
    """The number of characters."""
    return sum(len(block.text) for block in blocks)
