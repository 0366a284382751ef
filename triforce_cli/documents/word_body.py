"""The visible text of a Word document's part.

Deleted and hidden text is left out, inserted text is read. A field is its result, a check box is ☒ or ☐. Items of lists
begin with a dash, cells of a table's row are separated by bars.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from triforce_cli.documents.blocks import CELL_GAP, Block, Writer
from triforce_cli.documents.markup import Attributes, local
from triforce_cli.documents.places import Place
from triforce_cli.documents.word_styles import Styles, is_on, is_outlined, value

_TYPED = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_GONE = ("del", "moveFrom")  # tracked changes: deleted, and moved to another place
_LEFT_OUT = frozenset((*_GONE, "pPrChange", "rPrChange", "sectPrChange", "tblPrChange", "numberingChange"))
_UNREAD = {"chart": "chart", "relIds": "diagram", "altChunk": "embedded document", "commentReference": "comment"}
_BOXES = {True: "☒", False: "☐"}
_SYMBOLS = {  # symbol fonts: characters by code
    "wingdings": dict(zip(b"\x6c\x6e\x6f\x71\x9f\xa7\xa8\xfb\xfc\xfd\xfe", "●■□❑•▪◻✗✔☒☑", strict=True)),
    "wingdings 2": dict(zip(b"\x4f\x50\x51\x52\x53\x54\xa3", "✗✓☒☑☒☒☐", strict=True)),
    "symbol": dict(
        zip(
            b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz\xb0\xb1\xb3\xb4\xb7\xb9\xbb\xae\xde\xe5",
            "ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖαβχδεφγηιϕκλμνοπθρστυϖωξψζ°±≥×•≠≈→⇒∑",
            strict=True,
        )
    ),
}
_DEEPEST_LIST = 8
_OFFICE = "http://schemas.microsoft.com/office/"
_UNDERSTOOD = re.compile(  # namespaces of which a reader shows the content, and not what stands there for older ones
    r"http://(?:schemas\.openxmlformats\.org|purl\.oclc\.org/ooxml)/.*|urn:schemas-microsoft-com:(?:vml|office:\w+)"
    rf"|{re.escape(_OFFICE)}word/(?:2006/wordml|2010/wordprocessing(?:Canvas|Group|Ink|Shape|Drawing)|201[028]/wordml)"
    rf"|{re.escape(_OFFICE)}drawing/(?:2010/main|2014/chartex|201[56](?:/\d+)+/chartex|2016/ink|2017/model3d)"
)


@dataclass
class _Paragraph:
    pieces: list[str] = field(default_factory=list)
    style: str = ""
    level: int | None = None  # in a list
    is_heading: bool | None = None  # None if its style decides
    is_joined: bool = False  # joined with the next one: its paragraph mark is deleted or hidden


@dataclass
class _Run:
    """A run of text. is_hidden: None if its styles decide."""

    style: str = ""
    is_hidden: bool | None = None


@dataclass
class _Table:
    rows: list[list[list[str]]] = field(default_factory=list)  # paragraphs by row and cell


@dataclass
class _Choice:
    """A drop-down list of a form."""

    entries: list[str] = field(default_factory=list)
    chosen: int = 0


_HEX = re.compile("[0-9A-Fa-f]{1,8}")


class Body:
    """A listener that writes the text of parts. Paragraphs of a text box come before the paragraph that contains it."""

    def __init__(self, styles: Styles) -> None:
        self._writer, self._styles = Writer(), styles
        self._path: list[str] = []  # names of the open elements
        self._num_skipped = 0  # open elements inside one that is left out
        self._branches: list[bool] = []  # for each open alternative: True if one of its branches was read
        self._namespaces: dict[str, list[str]] = {}  # by prefix, the innermost declaration last
        self._paragraphs: list[_Paragraph] = []
        self._runs: list[_Run] = []
        self._tables: list[_Table] = []
        self._carried: list[str] = []  # pieces of a paragraph that is joined with the next one
        self._fields: list[bool] = []  # for each open field: True in its result
        self._box: bool | None = None  # check box of a form
        self._controls: list[bool | None] = []  # for each open content control: True if its box is checked
        self._choice = _Choice()
        self._mark = ""  # last mark of a field: begin, separate or end
        self._unread: Counter[str] = Counter()
        self._num_hidden = self._num_unended = 0
        self._notes = ""

    @property
    def written(self) -> str:
        return self._writer.text

    @property
    def headings(self) -> tuple[Place, ...]:
        return self._writer.headings

    @property
    def remarks(self) -> tuple[str, ...]:
        unread = [f"{number:,} {what}{'' if number == 1 else 's'}" for what, number in self._unread.items()]
        lines = (
            f"{self._num_hidden:,} hidden characters are left out" if self._num_hidden else "",
            f"{self._num_unended:,} characters of a field that has no end are left out" if self._num_unended else "",
            f"not read: {', '.join(unread)}" if unread else "",
        )
        return tuple(filter(None, lines))

    def begin_part(self, notes: str) -> None:
        """Begin a part. notes: the name of the notes in it, which stands for their heading."""
        self._notes = notes if self._writer.headings else ""

    def end_part(self) -> None:
        """Close what a part has left open, so that it does not affect the next part."""
        self._end_joined()
        if all(self._fields):
            self._num_unended = 0
        self._fields.clear()

    def start_ns(self, prefix: str, namespace: str) -> None:
        self._namespaces.setdefault(prefix, []).append(namespace)

    def end_ns(self, prefix: str) -> None:
        self._namespaces[prefix].pop()

    def start(self, tag: str, attributes: Attributes) -> None:
        name = local(tag)
        if self._num_skipped or self._is_left_out(name, attributes):
            self._num_skipped += 1
            return
        if name == "p":
            self._paragraphs.append(_Paragraph())
            if len(self._paragraphs) == 1:
                self._paragraphs[0].pieces, self._carried = self._carried, []
        elif name == "r":
            self._runs.append(_Run())
        elif name == "tbl":
            self._tables.append(_Table())
        elif name == "tr" and self._tables:
            self._tables[-1].rows.append([])
        elif name == "tc" and self._tables and self._tables[-1].rows:
            self._tables[-1].rows[-1].append([])
        elif name == "AlternateContent":
            self._branches.append(False)
        elif name == "sdt":
            self._controls.append(None)
        else:
            self._part(name, attributes)
        self._path.append(name)

    def end(self, tag: str) -> None:
        if self._num_skipped:
            self._num_skipped -= 1
            return
        name = self._path.pop()
        if name == "p":
            self._end_paragraph(self._paragraphs.pop())
        elif name == "r":
            self._runs.pop()
        elif name == "tc":
            self._end_joined()
        elif name == "tbl":
            self._end_table(self._tables.pop())
        elif name == "AlternateContent":
            self._branches.pop()
        elif name == "sdt":
            self._controls.pop()
        elif name == "checkBox":
            self._write(_BOXES[bool(self._box)])
        elif name == "ddList" and self._choice.chosen < len(self._choice.entries):
            self._write(self._choice.entries[self._choice.chosen])
        elif name == "fldChar":
            self._end_field_mark()

    def text(self, text: str) -> None:
        if self._path and self._path[-1] == "t" and not self._num_skipped:
            self._write(text)

    def _is_left_out(self, name: str, attributes: Attributes) -> bool:
        if name in ("Choice", "Fallback") and self._path[-1:] == ["AlternateContent"]:
            is_read = not self._branches[-1] and (name == "Fallback" or self._is_understood(attributes))
            self._branches[-1] |= is_read
            return not is_read  # another version of the same content
        if name in _GONE and self._path[-2:] == ["pPr", "rPr"] and self._paragraphs:
            self._paragraphs[-1].is_joined = True
        return name in _LEFT_OUT

    def _is_understood(self, attributes: Attributes) -> bool:
        """True if all namespaces that a choice requires are known (ECMA-376 part 3, 7.6)."""
        declared = (self._namespaces.get(prefix, [""]) for prefix in value(attributes, "Requires").split())
        return all(found and _UNDERSTOOD.fullmatch(found[-1]) for found in declared)

    def _part(self, name: str, attributes: Attributes) -> None:
        """Handle an element of a paragraph, a run or a field."""
        within = self._path[-1] if self._path else ""
        if name in _UNREAD:
            self._unread[_UNREAD[name]] += 1
        elif within == "r":
            self._part_of_run(name, attributes)
        elif within == "rPr":
            self._property(name, attributes)
        elif within in ("ffData", "checkBox", "ddList", "sdtPr", "checkbox"):
            self._part_of_form(name, attributes)
        elif self._paragraphs:
            self._part_of_paragraph(name, attributes)

    def _part_of_run(self, name: str, attributes: Attributes) -> None:
        if name in _TYPED:
            self._write(_TYPED[name])
        elif name == "sym":
            self._write(self._symbol(value(attributes, "font"), value(attributes, "char")))
        elif name == "fldChar":
            self._mark = value(attributes, "fldCharType")

    def _property(self, name: str, attributes: Attributes) -> None:
        """Handle a property of a run, or of the mark at a paragraph's end."""
        owner = self._path[-2] if len(self._path) > 1 else ""
        if owner == "r" and name == "rStyle":
            self._runs[-1].style = value(attributes, "val")
        elif owner == "r" and name == "vanish":
            self._runs[-1].is_hidden = is_on(attributes)
        elif owner == "pPr" and name == "vanish" and self._paragraphs:
            self._paragraphs[-1].is_joined = is_on(attributes)

    def _part_of_form(self, name: str, attributes: Attributes) -> None:
        said, within = value(attributes, "val"), self._path[-1]
        if name == "checkBox":
            self._box = False
        elif name == "ddList":
            self._choice = _Choice()
        elif name == "checkbox" and self._controls:
            self._controls[-1] = False
        elif within == "checkBox" and name in ("default", "checked"):
            self._box = is_on(attributes)
        elif within == "checkbox" and name == "checked" and self._controls:
            self._controls[-1] = is_on(attributes)
        elif within == "ddList" and name == "listEntry":
            self._choice.entries.append(said)
        elif within == "ddList" and name in ("default", "result") and said.isdecimal():
            self._choice.chosen = int(said[:4])

    def _part_of_paragraph(self, name: str, attributes: Attributes) -> None:
        paragraph = self._paragraphs[-1]
        if name == "pStyle":
            paragraph.style = value(attributes, "val")
            if self._styles.is_list(paragraph.style):
                paragraph.level = paragraph.level or 0
        elif name == "outlineLvl":
            paragraph.is_heading = is_outlined(attributes)
        elif name == "numPr":
            paragraph.level = paragraph.level or 0
        elif name == "ilvl":
            level = value(attributes, "val")
            paragraph.level = min(int(level), _DEEPEST_LIST) if level.isdecimal() and len(level) < 3 else 0
        elif name == "numId" and value(attributes, "val") == "0":  # removes the list of the style
            paragraph.level = None

    def _end_field_mark(self) -> None:
        if self._mark == "begin":
            self._fields.append(False)
        elif self._mark == "separate" and self._fields:
            self._fields[-1] = True
        elif self._mark == "end" and self._fields:
            self._fields.pop()
            self._num_unended = self._num_unended if self._fields else 0

    def _symbol(self, font: str, code: str) -> str:
        """The character of a symbol font; in a check box control, the box, whatever the font's character."""
        if self._controls and self._controls[-1] is not None:
            return _BOXES[self._controls[-1]]
        found = _SYMBOLS.get(font.lower(), {}).get(int(code, 16) & 0xFF, "") if _HEX.fullmatch(code) else ""
        if not found:
            self._unread["symbol"] += 1
        return found

    def _write(self, text: str) -> None:
        """Add text to the paragraph if it is visible."""
        if not self._paragraphs:
            return
        if not all(self._fields):  # a field's instruction
            self._num_unended += len(text)
        elif self._is_hidden():
            self._num_hidden += len(text)
        else:
            self._paragraphs[-1].pieces.append(text)

    def _is_hidden(self) -> bool:
        run = self._runs[-1] if self._runs else _Run()
        if run.is_hidden is not None:
            return run.is_hidden
        return self._styles.is_hidden(self._paragraphs[-1].style, run.style)

    def _end_paragraph(self, paragraph: _Paragraph) -> None:
        if paragraph.is_joined and not self._paragraphs:
            self._carried = paragraph.pieces
            return
        text = "".join(paragraph.pieces).strip("\n")
        if not text.strip():
            return
        group, title = "" if paragraph.level is None else "list", self._title(paragraph, text)
        if paragraph.level is not None:
            text = f"{'  ' * paragraph.level}- {text.lstrip()}"
        if self._tables and self._tables[-1].rows and self._tables[-1].rows[-1]:
            self._tables[-1].rows[-1][-1].append(text)
        else:
            self._writer.add(Block(text, group, title=title))

    def _title(self, paragraph: _Paragraph, text: str) -> str:
        """The paragraph's text if it is a heading; of the first note, the notes' name."""
        notes, self._notes = self._notes, ""
        own = paragraph.is_heading
        return text.strip() if (self._styles.is_heading(paragraph.style) if own is None else own) else notes

    def _end_joined(self) -> None:
        """End a joined paragraph that has no next one."""
        pieces, self._carried = self._carried, []
        self._end_paragraph(_Paragraph(pieces))

    def _end_table(self, table: _Table) -> None:
        """Write the rows as lines; the lines of a nested table go to its cell."""
        lines = [CELL_GAP.join(" ".join(" ".join(cell).split()) for cell in row).rstrip() for row in table.rows]
        lines = [line for line in lines if line.strip(CELL_GAP)]
        if self._tables and self._tables[-1].rows and self._tables[-1].rows[-1]:
            self._tables[-1].rows[-1][-1].extend(lines)
        else:
            for line in lines:
                self._writer.add(Block(line, "table"))
