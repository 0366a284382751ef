"""Documents as texts: each from the reader of its kind, which is imported for it, several joined below headings with
their names.

A single text file is its UTF-8 text, unchanged. If one of several documents cannot be read, none is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.errors import UsageError
from offload.interrupts import poll
from triforce_cli.documents import Document
from triforce_cli.documents.limits import MOST_MARKUP_BYTES, Meter, OnPart
from triforce_cli.documents.places import Place
from triforce_cli.documents.selection import Named, Source, select, without
from triforce_cli.ground.inputs import Note
from triforce_cli.ground.text import line_text
from triforce_cli.screen.utf8 import read_input

SHOWN_BYTES, SHOWN_DOCUMENTS = 2 << 20, 16  # from these on, progress is shown
_PACKED, _UNPACKING = ("Word", "EPUB"), 64  # archives; assumed ratio of unpacked to packed size
_NUM_REMARKS = 8

OnRead = Callable[[str, int, int], None]  # stage, bytes read, bytes in all


@dataclass(frozen=True)
class Reading:
    """A document as text. places: its pages, chapters or headings. detail: "12 pages". remarks: content that is not in
    the text, or doubtful."""

    source: Source
    kind: str
    text: str
    places: tuple[Place, ...] = ()
    detail: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def document(self) -> Document:
        return Document(self.name, self.text, self.places)

    @property
    def shown_kind(self) -> str:
        """The kind with its detail: "PDF, 12 pages"."""
        return f"{self.kind}, {self.detail}" if self.detail else self.kind


def read_documents(named: Named, what: str, *, note: Note, on_read: OnRead) -> tuple[Reading, ...]:
    """The named documents as texts. what: their name in errors. Raises UsageError."""
    sources = select(named, note=note)
    total, done = sum(source.num_bytes for source in sources), 0
    unpacked = sum(source.num_bytes * (_UNPACKING if source.kind in _PACKED else 1) for source in sources)
    readings = []
    for source in sources:
        poll()
        on_part: OnPart = _no_part
        if unpacked >= SHOWN_BYTES or len(sources) >= SHOWN_DOCUMENTS:
            on_part = _part(source, done, total, on_read)
        readings.append(_read(source, what, note, on_part))
        done += source.num_bytes
        on_part(1.0)
    _say(readings, note)
    return tuple(readings)


def joined(readings: Sequence[Reading]) -> str:
    """The text of one document, unchanged; several below headings, with a blank line between."""
    if len(readings) == 1:
        return readings[0].text
    return "\n".join(f"{heading(reading.name)}\n{_ended(reading.text)}" for reading in readings)


def heading(name: str) -> str:
    """The heading of one of several documents."""
    return f"===== {name.encode('unicode_escape').decode() if not name.isprintable() else name} ====="


def _read(source: Source, what: str, note: Note, on_part: OnPart) -> Reading:
    try:
        if (read := _READERS.get(source.kind or "text")) is not None:
            return read(source, on_part)
        return Reading(source, "text", read_input(source.path, what, note=note))  # raises for text that is not UTF-8
    except UsageError as error:
        if source.is_found:
            raise UsageError(f"{error}; {without(source.name)}") from error
        raise
    except OSError as error:
        raise UsageError(f"{what} cannot be read from {source.path}: {error.strerror}") from error


def _read_pdf(source: Source, on_part: OnPart) -> Reading:
    from triforce_cli.documents.pdf import read_pdf

    text, pages, detail, remarks = read_pdf(source.path, Meter(str(source.path)), on_part)
    return Reading(source, "PDF", text, pages, detail, tuple(remarks))


def _read_page(source: Source, on_part: OnPart) -> Reading:
    from triforce_cli.documents.web import read_page

    meter = Meter(str(source.path))
    with source.path.open("rb") as stream:
        text, headings, remarks = read_page(stream.read(MOST_MARKUP_BYTES + 1), meter, num_bytes=source.num_bytes)
    return Reading(source, "web page", text, headings, remarks=remarks)


def _read_word(source: Source, on_part: OnPart) -> Reading:
    from triforce_cli.documents.word import read_word

    text, headings, remarks = read_word(source.path, Meter(str(source.path)), on_part)
    return Reading(source, "Word", text, headings, remarks=remarks)


def _read_epub(source: Source, on_part: OnPart) -> Reading:
    from triforce_cli.documents.epub import read_epub

    return Reading(source, "EPUB", *read_epub(source.path, Meter(str(source.path)), on_part))


_READERS: dict[str, Callable[[Source, OnPart], Reading]] = {
    "PDF": _read_pdf,
    "web page": _read_page,
    "Word": _read_word,
    "EPUB": _read_epub,
}


def _no_part(share: float) -> None:
    """Ignore progress: few and small documents are read at once."""


def _part(source: Source, done: int, total: int, on_read: OnRead) -> OnPart:
    return lambda share: on_read("reading", done + int(share * source.num_bytes), total)


def _say(readings: Sequence[Reading], note: Note) -> None:
    """Note the readings' remarks, at most _NUM_REMARKS of them."""
    remarks = [
        f"{line_text(reading.name)} ({reading.shown_kind}): {line}" for reading in readings for line in reading.remarks
    ]
    for line in remarks[:_NUM_REMARKS]:
        note(line)
    if len(remarks) > _NUM_REMARKS:
        note(f"and {len(remarks) - _NUM_REMARKS:,} such remarks on other documents")


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"
