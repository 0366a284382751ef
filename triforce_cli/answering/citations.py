"""Citations of an answer: the document passages that it draws on by attention and by words, by name and by place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triforce_cli.answering import words
from triforce_cli.documents.places import Place, shown, touched
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
_TRIED = 64  # lines by which to find a document in a prompt that has it otherwise


@dataclass(frozen=True)
class Citation:
    """A passage of a document. place: where a person finds it. places: the pages, chapters or headings that it is in.
    Its lines are from 1, in the text that the model reads. share: see `Passage`. text: the passage's text."""

    document: str
    place: str
    places: tuple[Place, ...]
    first_line: int
    last_line: int
    share: float
    text: str

    def __str__(self) -> str:
        text = " ".join(self.text.split())
        shown = text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."
        return f"{line_text(self.document)}, {self.place} ({self.share:.0%}): {shown}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "document": self.document,
            "place": self.place,
            "places": [place.as_dict() for place in self.places],
            "first_line": self.first_line,
            "last_line": self.last_line,
            "share": round(self.share, 4),
            "text": self.text,
        }


@dataclass(frozen=True)
class _Found:
    """A document, and the character of the prompt's text at which it begins."""

    document: Document
    start: int


def citations(
    passages: Sequence[Passage],
    prompt: Sequence[int],
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    answer: str,
) -> list[Citation]:
    """SHOWN of the prompt's `passages` that are in one of `documents`, the best first. Two rankings are fused: the
    order of the passages, and the words that they have in common with the answer."""
    found = [each for each in located(passages, prompt, documents, tokenizer) if each is not None]
    return _fused(found, words.scores(answer, [citation.text for citation in found]))[:SHOWN]


def located(
    passages: Sequence[Passage], prompt: Sequence[int], documents: Sequence[Document], tokenizer: Tokenizer
) -> list[Citation | None]:
    """The citation of each of the prompt's `passages`; None of one that is in no document. Of several occurrences of a
    text, it is the one closest to the passage's place in the prompt."""
    if not documents or not passages:
        return [None] * len(passages)
    found = _placed(tokenizer.decode(prompt), documents)
    starts = _starts(passages, prompt, tokenizer)
    texts = [tokenizer.decode(prompt[passage.start : passage.end])[_CUT:-_CUT].strip() for passage in passages]
    return [
        _citation(text, starts[passage.start], passage.share, found)
        for text, passage in zip(texts, passages, strict=True)
    ]


def _fused(found: Sequence[Citation], scores: Sequence[float]) -> list[Citation]:
    """The citations by the sum of their reciprocal ranks (Cormack et al., 2009) in `found` and by `scores`; those with
    a score of 0 have no second rank."""
    by_score = sorted((i for i, score in enumerate(scores) if score), key=lambda i: -scores[i])
    ranks = {i: rank for rank, i in enumerate(by_score, start=1)}
    sums = [1 / (i + 1) + (1 / ranks[i] if i in ranks else 0.0) for i in range(len(found))]
    return [found[i] for i in sorted(range(len(found)), key=lambda i: -sums[i])]


def _starts(passages: Iterable[Passage], prompt: Sequence[int], tokenizer: Tokenizer) -> dict[int, int]:
    """The character of the prompt's text at which each passage begins, by its first token; off by a few where a
    character was cut."""
    found, token, character = dict[int, int](), 0, 0
    for start in sorted(passage.start for passage in passages):
        character += len(tokenizer.decode(prompt[token:start]))
        found[start], token = character, start
    return found


def _placed(prompt: str, documents: Sequence[Document]) -> list[_Found]:
    """The documents in the order of the prompt, each after the one before it."""
    found: list[_Found] = []
    after = 0
    for document in documents:
        start = _start(prompt, document.text, after)
        found.append(_Found(document, start))
        after = max(after, start + len(document.text.rstrip()))
    return found


def _start(prompt: str, text: str, after: int) -> int:
    """The character of the prompt, from `after` on, at which a document begins. A template may take white space from
    its ends. If a tokenizer changed its text, the longest lines tell: those that it has once and the prompt has, too;
    without such a line it begins at `after`."""
    inside = text.strip()
    if (start := prompt.find(inside, after)) >= 0:
        return start - (len(text) - len(text.lstrip()))
    for line in sorted(set(text.split("\n")), key=lambda line: (-len(line), line))[:_TRIED]:
        if len(line.strip()) >= _TELLING and text.count(line) == 1 and (start := prompt.find(line, after)) >= 0:
            return start - text.index(line)
    return after


def _citation(text: str, start: int, share: float, located: Sequence[_Found]) -> Citation | None:
    parts = [(found, part) for found in located for part in _occurrences(found.document.text, text)]
    if not parts:
        return None
    found, part = min(parts, key=lambda each: abs(each[0].start + each[1].start - start))
    return _at(found.document, _whole_words(found.document.text, part.start, part.stop), share)


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
    last, end = first + text.count("\n"), part.start + len(text)
    place = shown(document.places, part.start, end) if document.places else _lines(first, last)
    return Citation(document.name, place, touched(document.places, part.start, end), first, last, share, text)


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first} to {last}"
