"""PDFs: the text of their pages, in drawing order, with a blank line between two pages.

Values of form fields and the text of annotations come after the text of their page. Ligatures that a font draws as one
character become the letters they stand for; an ActualText is read in place of what is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from offload.errors import UsageError
from triforce_cli.documents.limits import Meter, OnPart, library
from triforce_cli.documents.pdf_actual import ActualTexts
from triforce_cli.documents.pdf_marks import Marks
from triforce_cli.documents.places import Place

_LIGATURES = str.maketrans(
    {"\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl", "\ufb05": "st", "\ufb06": "st"}
)
_BETWEEN = "\n\n"  # two pages
_NUM_NAMED = 8  # pages listed in a remark
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)  # of a damaged object
_SHORT = 80  # characters of the library's message


def read_pdf(path: Path, meter: Meter, on_part: OnPart) -> tuple[str, tuple[Place, ...], str, list[str]]:
    """(text, its pages, "12 pages", remarks). Raises UsageError. Reads a page at a time."""
    pypdf = library("pypdf", meter.name)
    with path.open("rb") as stream, _warnings() as warnings:
        reader = _opened(pypdf, stream, meter)
        texts = ActualTexts(reader, meter.name)
        marks = Marks(reader, texts, meter)
        pages = list(_page_texts(reader, texts, marks, meter, on_part))
        remarks = _remarks(marks, meter)
    if not pages:
        raise UsageError(f"{meter.name} has no pages; fetch it again, or save it anew")
    number = f"{len(pages):,} page{'' if len(pages) == 1 else 's'}"
    if not any(pages):
        raise UsageError(
            f"{meter.name} has {number} and no text: a scan, or pictures; ocrmypdf IN.pdf OUT.pdf puts text into it"
        )
    if not all(pages):
        remarks.insert(0, _without_text(pages))
    if warnings:
        remarks.append(f"not well-formed ({warnings[0][:_SHORT]}), so look at its text; pdftotext may read more of it")
    return _BETWEEN.join(filter(None, pages)) + "\n", _places(pages), number, remarks


def _places(pages: Sequence[str]) -> tuple[Place, ...]:
    """The pages that have text, by their numbers in the file."""
    found, start = [], 0
    for number, text in enumerate(pages, 1):
        if text:
            found.append(Place("page", start, number))
            start += len(text) + len(_BETWEEN)
    return tuple(found)


def _opened(pypdf: Any, stream: IO[bytes], meter: Meter) -> Any:
    """The reader of a PDF that needs no password."""
    try:
        reader = pypdf.PdfReader(stream)
        if reader.is_encrypted and not reader.decrypt(""):
            raise UsageError(
                f"{meter.name} is encrypted and needs its password; qpdf --password=PASSWORD --decrypt IN.pdf OUT.pdf "
                "makes one without"
            )
        len(reader.pages)
    except UsageError:
        raise
    except pypdf.errors.DependencyError as error:
        raise UsageError(
            f"{meter.name} is encrypted, and what decrypts it is not installed: pip install cryptography"
        ) from error
    except Exception as error:  # a damaged file can make the library raise any error
        raise _damaged(meter.name, error) from error
    return reader


def _page_texts(reader: Any, texts: ActualTexts, marks: Marks, meter: Meter, on_part: OnPart) -> Iterator[str]:
    num_pages = len(reader.pages)
    for number in range(num_pages):
        meter.check()
        text, around = _page_text(reader, number, texts, meter), _marks_text(reader, number, marks, meter)
        yield "\n".join(filter(None, (text, around)))
        on_part((number + 1) / num_pages)


def _page_text(reader: Any, number: int, texts: ActualTexts, meter: Meter) -> str:
    try:
        page = reader.pages[number]
        text = page.extract_text(**texts.visitors(page, meter.check))
    except UsageError:
        raise
    except Exception as error:
        raise _damaged(f"page {number + 1:,} of {meter.name}", error) from error
    meter.check()  # the library ignores errors within the objects that a page draws
    return _cleaned(str(text))


def _marks_text(reader: Any, number: int, marks: Marks, meter: Meter) -> str:
    """The text of a page's form fields and annotations. Damaged annotations are skipped, and the page is still read."""
    pypdf = library("pypdf", meter.name)
    try:
        return _cleaned(marks.text(reader.pages[number]))
    except UsageError:
        raise
    except (pypdf.errors.PyPdfError, *_FAULTS):
        marks.damaged()
        return ""


def _remarks(marks: Marks, meter: Meter) -> list[str]:
    try:
        return list(marks.remarks)
    except Exception as error:
        raise _damaged(meter.name, error) from error


def _cleaned(text: str) -> str:
    lines = text.translate(_LIGATURES).replace("\0", "").split("\n")
    whole = "\n".join(line.rstrip() for line in lines).strip("\n")
    return whole.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs


def _without_text(pages: Sequence[str]) -> str:
    empty = [f"{number:,}" for number, text in enumerate(pages, 1) if not text]
    named = ", ".join(empty[:_NUM_NAMED]) + (" ..." if len(empty) > _NUM_NAMED else "")
    return f"{len(empty):,} of {len(pages):,} pages have no text ({named}): empty, or pictures"


def _damaged(what: str, error: Exception) -> UsageError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:_SHORT]}"
    return UsageError(f"{what} is damaged ({said}); fetch it again, or qpdf IN.pdf OUT.pdf may mend it")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the library's warnings about skipped content, in place of logging them."""
    heard = _Heard()
    logger = logging.getLogger("pypdf")
    propagates, level = logger.propagate, logger.level
    logger.addHandler(heard)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield heard.lines
    finally:
        logger.removeHandler(heard)
        logger.propagate = propagates
        logger.setLevel(level)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < _NUM_NAMED:
            self.lines.append(" ".join(record.getMessage().split()))
