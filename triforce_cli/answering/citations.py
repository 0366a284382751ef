"""Citations of an answer: the document passages that it draws on by attention and by words, in whole sentences, by name
and by place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from triforce_cli.answering import bm25, sentences
from triforce_cli.documents.places import Place, place_at
from triforce_cli.ground.text import line_text

if TYPE_CHECKING:
    from offload.engine.passages import Passage
    from offload.text.tokenizer import Tokenizer
    from triforce_cli.documents import Document

ASKED = 12  # passages of a prompt to look up; some are not in a document
SHOWN = 3
_CUT = 4  # characters at either end, where tokens may be cut
_TELLING = 12  # least characters of half a passage; shorter ones are ambiguous
_NEAR = 2.0  # shares between which words decide: within this factor
_WIDTH = 480  # shown characters of a text
_TRIED = 64  # lines by which to find a document in a prompt that has it otherwise


@dataclass(frozen=True)
class Citation:
    """A passage of a document. place: where a person finds it. places: the page, the chapter or the heading that it is
    in, if the document has some. Its lines are from 1, in the text that the model reads. share: see `Passage`. text:
    the passage's text, in whole sentences."""

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


def cited(citations: Sequence[Citation]) -> str:
    """The passages of documents that an answer draws on, a line each, or a note that there are none."""
    lines = [f"[{number}] {citation}" for number, citation in enumerate(citations, start=1)]
    return "\n".join(lines) or "no place in a document stands out as the one that the answer came from"


def citations(
    passages: Sequence[Passage],
    prompt: Sequence[int],
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    answer: str,
) -> list[Citation]:
    """SHOWN of the prompt's `passages` that are in one of `documents`, the greatest share first; of near shares, the
    one with more words in common with the answer."""
    found = [each for each in located(passages, prompt, documents, tokenizer) if each is not None]
    return _ordered(found, bm25.scores(answer, [citation.text for citation in found]))[:SHOWN]


def located(
    passages: Sequence[Passage], prompt: Sequence[int], documents: Sequence[Document], tokenizer: Tokenizer
) -> list[Citation | None]:
    """The citation of each of the prompt's `passages`; None of one that is in no document. Of several occurrences of a
    text, it is the one closest to the passage's place in the prompt."""
    if not documents or not passages:
        return [None] * len(passages)
    found = _placed(tokenizer.decode(prompt), documents)
    starts = _starts(passages, prompt, tokenizer)
    return [_citation(_Wanted.of(passage, prompt, tokenizer), starts[passage.start], found) for passage in passages]


def _ordered(found: Iterable[Citation], scores: Iterable[float]) -> list[Citation]:
    """The citations in groups of near shares, each group by `scores`."""
    left = sorted(zip(found, scores, strict=True), key=lambda pair: -pair[0].share)
    ordered = list[Citation]()
    while left:
        near = [pair for pair in left if _NEAR * pair[0].share >= left[0][0].share]
        ordered += [citation for citation, _ in sorted(near, key=lambda pair: -pair[1])]
        left = left[len(near) :]
    return ordered


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


@dataclass(frozen=True)
class _Wanted:
    """A passage to find. text: without the characters at its ends that may be cut. ends: of each of its chunks, the
    character of `text` at which it ends. shares: of each of its chunks."""

    text: str
    ends: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, passage: Passage, prompt: Sequence[int], tokenizer: Tokenizer) -> _Wanted:
        tokens, chunks = prompt[passage.start : passage.end], len(passage.shares)
        whole = tokenizer.decode(tokens)
        text = whole[_CUT:-_CUT].strip()
        left_out = whole.index(text, _CUT) if text else 0
        ends = (len(tokenizer.decode(tokens[: len(tokens) * number // chunks])) for number in range(1, chunks + 1))
        return cls(text, tuple(min(max(end - left_out, 0), len(text)) for end in ends), passage.shares)

    def share_within(self, first: int, last: int) -> float:
        """The share of the characters `first` to `last`, as if a chunk's were spread over its characters."""
        found, start = 0.0, 0
        for end, share in zip(self.ends, self.shares, strict=True):
            found += share * max(min(end, last) - max(start, first), 0) / max(end - start, 1)
            start = end
        return found


@dataclass(frozen=True)
class _Occurrence:
    """The characters `start` to `end` of a document, which are those of a passage from its character `first` on."""

    start: int
    end: int
    first: int

    def inside(self, start: int, end: int) -> tuple[int, int]:
        """Characters of the document as characters of the passage."""
        return start - self.start + self.first, end - self.start + self.first


def _citation(wanted: _Wanted, start: int, located: Sequence[_Found]) -> Citation | None:
    parts = [(found, part) for found in located for part in _occurrences(found.document.text, wanted.text)]
    if not parts:
        return None
    found, part = min(parts, key=lambda each: abs(each[0].start + each[1].start - each[1].first - start))
    return _at(found.document, part, wanted)


def _occurrences(text: str, wanted: str) -> list[_Occurrence]:
    """The occurrences of a passage in a document. If the passage crosses the document's start or end: of its part in
    the document, or of one of its halves."""
    middle = len(wanted) // 2
    halves = [half for half in (wanted[middle:].strip(), wanted[:middle].strip()) if len(half) >= _TELLING]
    for part in filter(None, (wanted, _crossing(text.strip(), wanted), *halves)):
        if found := [match.span() for match in re.finditer(re.escape(part), text)]:
            return [_Occurrence(start, end, wanted.index(part)) for start, end in found]
    return []


def _crossing(text: str, wanted: str) -> str:
    """The part of a passage that is all of a document, its end or its start; "" if there is none that tells."""
    if text in wanted:
        return text
    ends = (wanted[:length] for length in range(len(wanted) - 1, _TELLING - 1, -1) if text.endswith(wanted[:length]))
    starts = (wanted[at:] for at in range(1, len(wanted) - _TELLING + 1) if text.startswith(wanted[at:]))
    return next(ends, next(starts, ""))


def _at(document: Document, occurrence: _Occurrence, wanted: _Wanted) -> Citation:
    """The citation of the sentences around an occurrence, in the place that has most of its share."""
    parts = [
        (wanted.share_within(*occurrence.inside(first, last)), first, last)
        for first, last in _parts(document, occurrence)
    ]
    share, first, last = max(parts, key=lambda part: part[0])
    place = place_at(document.places, first)
    start, end = sentences.whole(document.text, first, last, *_reach(document, place))
    text = document.text[start:end].rstrip()
    first_line = document.text.count("\n", 0, start) + 1
    last_line = first_line + text.count("\n")
    shown = _shown(document, place) or _lines(first_line, last_line)
    return Citation(document.name, shown, (place,) if place else (), first_line, last_line, share, text)


def _parts(document: Document, occurrence: _Occurrence) -> Iterator[tuple[int, int]]:
    """The characters of an occurrence, place by place."""
    starts = (place.start for place in document.places if occurrence.start < place.start < occurrence.end)
    return pairwise((occurrence.start, *starts, occurrence.end))


def _shown(document: Document, place: Place | None) -> str:
    """A place's name; "" in a document without places."""
    if place is None and document.places:
        return f"before {document.places[0]}"
    return str(place or "")


def _reach(document: Document, place: Place | None) -> tuple[int, int]:
    """The characters in which the sentences of a place are: its own, and of a page those of its neighbours, too."""
    if place is not None and place.kind == "page":
        return 0, len(document.text)
    first = 0 if place is None else place.start
    return first, min((each.start for each in document.places if each.start > first), default=len(document.text))


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first} to {last}"
