"""Blocks of a text in reading order: paragraphs apart, items of a list and rows of a table right below each other."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

CELL_GAP = " | "


@dataclass(frozen=True)
class Block:
    """group: neighbours of one group, "" apart, follow each other without a blank line. is_main: inside the element
    that a page says is its main one. is_margin: navigation, comments and the like."""

    text: str
    group: str = ""
    is_main: bool = False
    is_margin: bool = False


class Writer:
    """A text of blocks, of which it keeps no more than the text."""

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
        """Ends with a line end where there is any."""
        return f"{self._text.getvalue()}\n" if self._text.tell() else ""


def joined(blocks: Iterable[Block]) -> str:
    """The text, which ends with a line end where there is any."""
    writer = Writer()
    for block in blocks:
        writer.add(block)
    return writer.text


def length(blocks: Iterable[Block]) -> int:
    """Characters."""
    return sum(len(block.text) for block in blocks)
