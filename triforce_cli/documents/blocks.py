"""Blocks of a text in reading order: paragraphs apart, items of a list and rows of a table right below each other."""

from __future__ import annotations

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


def joined(blocks: Iterable[Block]) -> str:
    """The text, which ends with a line end where there is any."""
    parts: list[str] = []
    group = ""
    for block in blocks:
        if parts:
            parts.append("\n" if block.group and block.group == group else "\n\n")
        parts.append(block.text)
        group = block.group
    return "".join(parts) + ("\n" if parts else "")


def length(blocks: Iterable[Block]) -> int:
    """Characters."""
    return sum(len(block.text) for block in blocks)
