"""Word documents (.docx): paragraphs, items of lists and rows of tables in reading order, then foot- and endnotes.

Deleted text of tracked changes is left out, inserted text is read. Items of lists begin with a dash, cells of a table's
row are between bars. Headers, footers and comments are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from offload.errors import UsageError
from triforce_cli.documents.archive import Archive
from triforce_cli.documents.blocks import CELL_GAP, Block, joined
from triforce_cli.documents.limits import Meter
from triforce_cli.documents.markup import Attributes, local, parse

BODY = "word/document.xml"
STYLES = "word/styles.xml"
NOTES = ("word/footnotes.xml", "word/endnotes.xml")
_TYPED = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_LEFT_OUT = frozenset(("moveFrom", "Fallback"))  # where text was moved from; a text box a second time
_DEEPEST_LIST = 8


def read_word(path: Path, meter: Meter) -> str:
    """The text. Raises UsageError. Memory: that of the text."""
    with path.open("rb") as stream:
        archive = Archive(stream, meter)
        styles = _Styles()
        if STYLES in archive.names:
            parse(archive.pieces(STYLES), "xml", styles, meter)
        body = _Body(frozenset(styles.of_lists))
        for name in (BODY, *(name for name in NOTES if name in archive.names)):
            parse(archive.pieces(name), "xml", body, meter)
    if not body.blocks:
        raise UsageError(f"{meter.name} has no text; if it shows pictures of text, ocrmypdf puts text into a PDF of it")
    return joined(body.blocks)


class _Styles:
    """Hears which styles of paragraphs make them items of lists."""

    def __init__(self) -> None:
        self.of_lists: set[str] = set()
        self._style = ""

    def start(self, tag: str, attributes: Attributes) -> None:
        if local(tag) == "style":
            self._style = _value(attributes, "styleId")
        elif local(tag) == "numPr":
            self.of_lists.add(self._style)

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...


@dataclass
class _Paragraph:
    pieces: list[str] = field(default_factory=list)
    level: int | None = None  # of a list


@dataclass
class _Table:
    rows: list[list[list[str]]] = field(default_factory=list)  # paragraphs by row and cell


class _Body:
    """Hears paragraphs; those of a text box come before the one that holds it."""

    def __init__(self, styles_of_lists: frozenset[str]) -> None:
        self.blocks: list[Block] = []
        self._styles = styles_of_lists
        self._paragraphs: list[_Paragraph] = []
        self._tables: list[_Table] = []
        self._is_text = False
        self._num_left_out = 0

    def start(self, tag: str, attributes: Attributes) -> None:
        name = local(tag)
        self._num_left_out += name in _LEFT_OUT
        if name == "p":
            self._paragraphs.append(_Paragraph())
        elif name == "tbl":
            self._tables.append(_Table())
        elif name == "tr" and self._tables:
            self._tables[-1].rows.append([])
        elif name == "tc" and self._tables and self._tables[-1].rows:
            self._tables[-1].rows[-1].append([])
        elif self._paragraphs:
            self._part(name, attributes)

    def end(self, tag: str) -> None:
        name = local(tag)
        self._num_left_out -= name in _LEFT_OUT
        if name == "t":
            self._is_text = False
        elif name == "p" and self._paragraphs:
            self._end_paragraph(self._paragraphs.pop())
        elif name == "tbl" and self._tables:
            self._end_table(self._tables.pop())

    def text(self, text: str) -> None:
        if self._is_text and not self._num_left_out and self._paragraphs:
            self._paragraphs[-1].pieces.append(text)

    def _part(self, name: str, attributes: Attributes) -> None:
        """Of a paragraph."""
        paragraph = self._paragraphs[-1]
        if name == "t":
            self._is_text = True
        elif name in _TYPED and not self._num_left_out and _value(attributes, "pos") == "":  # no stop of a ruler
            paragraph.pieces.append(_TYPED[name])
        elif name == "numPr" or (name == "pStyle" and _value(attributes, "val") in self._styles):
            paragraph.level = paragraph.level or 0
        elif name == "ilvl":
            level = _value(attributes, "val")
            paragraph.level = min(int(level), _DEEPEST_LIST) if level.isdecimal() and len(level) < 3 else 0
        elif name == "numId" and _value(attributes, "val") == "0":  # a style's list, taken off again
            paragraph.level = None

    def _end_paragraph(self, paragraph: _Paragraph) -> None:
        text = "".join(paragraph.pieces).strip("\n")
        if not text.strip():
            return
        group = "" if paragraph.level is None else "list"
        if paragraph.level is not None:
            text = f"{'  ' * paragraph.level}- {text.lstrip()}"
        if self._tables and self._tables[-1].rows and self._tables[-1].rows[-1]:
            self._tables[-1].rows[-1][-1].append(text)
        else:
            self.blocks.append(Block(text, group))

    def _end_table(self, table: _Table) -> None:
        """Rows as lines; those of a table in a cell are that cell's."""
        lines = [CELL_GAP.join(" ".join(" ".join(cell).split()) for cell in row).rstrip() for row in table.rows]
        lines = [line for line in lines if line.strip(CELL_GAP)]
        if self._tables and self._tables[-1].rows and self._tables[-1].rows[-1]:
            self._tables[-1].rows[-1][-1].extend(lines)
        else:
            self.blocks.extend(Block(line, "table") for line in lines)


def _value(attributes: Attributes, name: str) -> str:
    return next((value for key, value in attributes.items() if local(key) == name), "")
