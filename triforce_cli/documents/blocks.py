"""Blocks of text in reading order: blank lines between paragraphs, none between items of a list or rows of a table."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from triforce_cli.documents.places import Place

CELL_GAP = " | "


@dataclass(frozen=True)
class Block:
    """A block of text. group: neighbouring blocks of one group, other than "", have no blank line between them.
    is_main: inside the page's main element. is_margin: navigation, comments and the like. title: of a heading, "" for
    other blocks. anchors: names by which links find the block."""

    text: str
    group: str = ""
    is_main: bool = False
    is_margin: bool = False
    title: str = ""
    anchors: tuple[str, ...] = ()


class Writer:
    """Joins blocks into a text; only the text and its places are kept in memory."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._group = ""
        self._headings: list[Place] = []
        self._anchors: dict[str, int] = {}

    def add(self, block: Block) -> None:
        if self._text.tell():
            self._text.write("\n" if block.group and block.group == self._group else "\n\n")
        start = self._text.tell()
        if block.title:
            self._headings.append(Place("heading", start, len(self._headings) + 1, block.title))
        for name in block.anchors:
            self._anchors.setdefault(name, start)
        self._text.write(block.text)
        self._group = block.group

    @property
    def text(self) -> str:
        """The text, with a line end unless it is empty."""
        return f"{self._text.getvalue()}\n" if self._text.tell() else ""

    @property
    def headings(self) -> tuple[Place, ...]:
        """The places of the blocks with a title."""
        return tuple(self._headings)

    @property
    def anchors(self) -> Mapping[str, int]:
        """The positions in the text, by anchor, at which the blocks with anchors begin."""
        return self._anchors


def written(blocks: Iterable[Block]) -> Writer:
    """A writer of the blocks."""
    writer = Writer()
    for block in blocks:
        writer.add(block)
    return writer


def length(blocks: Iterable[Block]) -> int:
    """The number of characters."""
    return sum(len(block.text) for block in blocks)
