"""Word documents (.docx): paragraphs, items of lists and rows of tables in reading order, then foot- and endnotes.

Headers, footers, comments, charts and diagrams are not read; a remark names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offload.errors import UsageError
from triforce_cli.documents.archive import Archive
from triforce_cli.documents.limits import Meter, OnPart
from triforce_cli.documents.markup import parse
from triforce_cli.documents.package import main_part, related
from triforce_cli.documents.places import Place
from triforce_cli.documents.word_body import Body
from triforce_cli.documents.word_styles import Styles

_NOTES = ("footnotes", "endnotes")
_MARGINS = ("header", "footer")


def read_word(path: Path, meter: Meter, on_part: OnPart) -> tuple[str, tuple[Place, ...], tuple[str, ...]]:
    """(text, its headings, remarks). Raises UsageError. Peak memory: the size of the text."""
    with path.open("rb") as stream:
        archive = Archive(stream, meter)
        main = main_part(archive, meter)
        parts = related(archive, main, meter)
        styles = Styles()
        for name in parts.get("styles", ()):
            parse(archive.pieces(name), "xml", styles, meter)
        body, margins = Body(styles), Body(styles)
        notes = ((kind, name) for kind in _NOTES for name in parts.get(kind, ()))
        for kind, name in (("", main), *notes):
            body.begin_part(kind)
            parse(_heard(archive, name, on_part), "xml", body, meter)
            body.end_part()
        for name in (name for kind in _MARGINS for name in parts.get(kind, ())):
            parse(archive.pieces(name), "xml", margins, meter)
            margins.end_part()
    text = body.written
    if not text:
        raise UsageError(f"{meter.name} has no text; if it shows pictures of text, ocrmypdf puts text into a PDF of it")
    around = len(margins.written.strip())
    remarks = [*body.remarks, f"its headers and footers, {around:,} characters, are not read"][: None if around else -1]
    return text, body.headings, tuple(remarks)


def _heard(archive: Archive, name: str, on_part: OnPart) -> Iterator[bytes]:
    done, total = 0, max(archive.num_bytes(name), 1)
    for piece in archive.pieces(name):
        yield piece
        done += len(piece)
        on_part(min(1.0, done / total))
