"""Ten documents of offices as files of several programs, each with questions and the passage that answers each.

benchmarks/office/NAME.txt has a text and, below a line of equals signs, its questions. In the text "#" and "##" begin
headings, "|" begins the row of a table, "-" the item of a list; every other line is a paragraph. What is planted in a
novel is in benchmarks/office/planted.txt, in the same form: its text has a sentence a line.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "office"
_WIDTH = 76  # characters of a line of plain text
_LINES = 48  # of a page of typed lines


@dataclass(frozen=True)
class Question:
    """A question, and words of the document that stand in the passage with its answer and nowhere else."""

    text: str
    passage: str


@dataclass(frozen=True)
class Line:
    """A line of a text. kind: "title", "heading", "row", "item" or "paragraph"."""

    kind: str
    text: str

    @property
    def cells(self) -> list[str]:
        return [cell.strip() for cell in self.text.strip("| ").split("|")]


def source(name: str) -> tuple[list[Line], list[Question]]:
    """The lines and the questions of a document or of what is planted in a novel."""
    text, _, below = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").partition("\n=====\n")
    asked = [Question(*line.split(" => ")) for line in below.splitlines()]
    return [_line(line) for line in text.splitlines()], asked


def write(name: str, folder: Path) -> Path:
    """Write the document `name` as a file of its program."""
    ending, program = PROGRAMS[name]
    path = folder / f"{name}{ending}"
    program(source(name)[0], path)
    return path


def _line(line: str) -> Line:
    for mark, kind in (("# ", "title"), ("## ", "heading"), ("- ", "item")):
        if line.startswith(mark):
            return Line(kind, line.removeprefix(mark))
    return Line("row" if line.startswith("|") else "paragraph", line)


def _parts(lines: Sequence[Line]) -> Iterator[Line | list[list[str]]]:
    """Lines, and tables as rows of cells."""
    for is_row, group in groupby(lines, lambda line: line.kind == "row"):
        if is_row:
            yield [line.cells for line in group]
        else:
            yield from group


def _word(lines: Sequence[Line], path: Path, *, styled: bool) -> None:
    """A .docx by python-docx. styled: headings have their styles, otherwise bold type alone."""
    from docx import Document

    document = Document()
    for part in _parts(lines):
        if isinstance(part, list):
            table = document.add_table(len(part), len(part[0]), style="Table Grid")
            for row, cells in zip(table.rows, part, strict=True):
                for cell, text in zip(row.cells, cells, strict=True):
                    cell.text = text
        elif styled and part.kind in ("title", "heading"):
            document.add_heading(part.text, level=1 if part.kind == "title" else 2)
        else:
            style = "List Bullet" if part.kind == "item" else None
            document.add_paragraph(style=style).add_run(part.text).bold = part.kind in ("title", "heading")
    document.save(str(path))


def _set(lines: Sequence[Line], path: Path) -> None:
    """A .pdf by reportlab's typesetter, with a number at the foot of each page."""
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import Paragraph, SimpleDocTemplate, Table

    styles = getSampleStyleSheet()
    names = {"title": "Title", "heading": "Heading2", "item": "Bullet", "paragraph": "BodyText"}
    story: list[Any] = [
        Table(part, hAlign="LEFT", repeatRows=1)
        if isinstance(part, list)
        else Paragraph(html.escape(part.text, quote=False), styles[names[part.kind]])
        for part in _parts(lines)
    ]

    def foot(canvas: Any, _: Any) -> None:
        canvas.drawString(280, 30, f"Page {canvas.getPageNumber()}")

    SimpleDocTemplate(str(path), invariant=1).build(story, onFirstPage=foot, onLaterPages=foot)


def _typed(lines: Sequence[Line], path: Path) -> None:
    """A .pdf of lines drawn one below the other."""
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(path), invariant=1)
    typed = _wrapped(lines)
    for start in range(0, len(typed), _LINES):
        for number, line in enumerate(typed[start : start + _LINES]):
            canvas.drawString(60, 780 - 15 * number, line)
        canvas.showPage()
    canvas.save()


def _plain(lines: Sequence[Line], path: Path) -> None:
    path.write_text("\n".join(_wrapped(lines)) + "\n", encoding="utf-8")


def _wrapped(lines: Sequence[Line]) -> list[str]:
    found: list[str] = []
    for line in lines:
        if line.kind in ("title", "heading"):
            found += ["", line.text.upper() if line.kind == "title" else line.text, ""]
        else:
            found += ["   ".join(line.cells)] if line.kind == "row" else textwrap.wrap(line.text, _WIDTH)
    return found


def _page(lines: Sequence[Line], path: Path) -> None:
    """A web page as one writes it by hand."""
    tags = {"title": "h1", "heading": "h2", "item": "li", "paragraph": "p"}
    body: list[str] = []
    for part in _parts(lines):
        if isinstance(part, list):
            rows = "\n".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in part)
            body.append(f"<table>\n{rows}\n</table>")
        else:
            body.append(f"<{tags[part.kind]}>{html.escape(part.text)}</{tags[part.kind]}>")
    path.write_text("\n".join(["<!doctype html>", "<meta charset=utf-8>", "<body>", *body, ""]), encoding="utf-8")


def _markdown(lines: Sequence[Line], path: Path) -> None:
    path.write_text("\n".join(_marked(lines)), encoding="utf-8")


def _rendered(lines: Sequence[Line], path: Path) -> None:
    """A web page made of Markdown by markdown-it-py."""
    from markdown_it import MarkdownIt

    page = MarkdownIt().enable("table").render("\n".join(_marked(lines)))
    path.write_text(f"<!doctype html>\n<meta charset=utf-8>\n{page}", encoding="utf-8")


def _marked(lines: Sequence[Line]) -> Iterator[str]:
    marks = {"title": "# ", "heading": "## ", "item": "- ", "paragraph": ""}
    for part in _parts(lines):
        if isinstance(part, list):
            first, *others = (f"| {' | '.join(cells)} |" for cells in part)
            yield from (first, f"|{' --- |' * len(part[0])}", *others, "")
        else:
            yield from (f"{marks[part.kind]}{part.text}", "")


def _with_styles(lines: Sequence[Line], path: Path) -> None:
    _word(lines, path, styled=True)


def _with_bold(lines: Sequence[Line], path: Path) -> None:
    _word(lines, path, styled=False)


PROGRAMS: dict[str, tuple[str, Callable[[Sequence[Line], Path], None]]] = {
    "lease": (".docx", _with_styles),
    "minutes": (".docx", _with_bold),
    "employment": (".docx", _with_styles),
    "invoice": (".pdf", _set),
    "policy": (".pdf", _set),
    "tender": (".pdf", _typed),
    "manual": (".html", _page),
    "board": (".html", _rendered),
    "insurance": (".txt", _plain),
    "house_rules": (".md", _markdown),
}
