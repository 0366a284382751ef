"""Citations of an answer: the document passages with the most attention mass, by name and line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from triforce_cli.render.text import line_text

if TYPE_CHECKING:
    from offload.decode.tokenizer import Tokenizer
    from offload.engine.attended import Passage
    from triforce_cli.documents import Document

ASKED = 12  # passages of a prompt to look up; some are not in a document
SHOWN = 3
_CUT = 4  # characters at either end, where tokens may be cut
_TELLING = 12  # least characters of half a passage; shorter ones are ambiguous
_WIDTH = 160  # shown characters of a text


@dataclass(frozen=True)
class Citation:
    """Lines of a document, from 1. share: see `Passage`. text: the passage's text."""

    document: str
    first_line: int
    last_line: int
    share: float
    text: str

    def __str__(self) -> str:
        lines = f"line {self.first_line}" if self.first_line == self.last_line else self._lines()
        text = " ".join(self.text.split())
        shown = text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."
        return f"{line_text(self.document)}, {lines} ({self.share:.0%}): {shown}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"share": round(self.share, 4)}

    def _lines(self) -> str:
        return f"lines {self.first_line} to {self.last_line}"


def citations(
    passages: Iterable[Passage], prompt: Sequence[int], documents: Sequence[Document], tokenizer: Tokenizer
) -> list[Citation]:
    """The first SHOWN of the prompt's `passages` that are in one of `documents`. Of several occurrences of a text, the
    citation is the one whose relative position in the documents is closest to the passage's in the prompt."""
    found: list[Citation] = []
    for passage in passages:
        text = tokenizer.decode(prompt[passage.start : passage.end])
        place = passage.start / len(prompt)
        citation = _citation(text[_CUT:-_CUT].strip(), place, passage.share, documents)
        if citation is not None and len(found) < SHOWN:
            found.append(citation)
    return found


def _citation(text: str, place: float, share: float, documents: Sequence[Document]) -> Citation | None:
    before, whole = 0, sum(len(document.text) for document in documents)
    best: tuple[float, Citation] | None = None
    for document in documents:
        for part in _occurrences(document.text, text):
            distance = abs((before + part.start) / whole - place)
            if best is None or distance < best[0]:
                best = distance, _at(document, _whole_words(document.text, part.start, part.stop), share)
        before += len(document.text)
    return None if best is None else best[1]


def _occurrences(text: str, wanted: str) -> list[slice]:
    """The occurrences of a passage in a document. If the passage crosses the document's start or end: those of one of
    its halves, or the whole document."""
    middle = len(wanted) // 2
    halves = [half for half in (wanted[middle:].strip(), wanted[:middle].strip()) if len(half) >= _TELLING]
    for part in filter(None, (wanted, *halves)):
        if found := [slice(match.start(), match.end()) for match in re.finditer(re.escape(part), text)]:
            return found
    return [slice(0, len(text))] if text.strip() and text.strip() in wanted else []


def _whole_words(text: str, start: int, end: int) -> slice:
    """The range extended to whole words at both ends."""
    while start and not text[start - 1].isspace():
        start -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    return slice(start, end)


def _at(document: Document, part: slice, share: float) -> Citation:
    text = document.text[part].rstrip()
    first = document.text.count("\n", 0, part.start) + 1
    return Citation(document.name, first, first + text.count("\n"), share, text)
