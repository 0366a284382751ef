"""Results of `triforce tokens` as text and as a JSON object. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triforce_cli import __version__
from triforce_cli.ground.text import line_text, percent

if TYPE_CHECKING:
    from triforce_cli.documents.reading import Reading

_LEAST_WIDTH = 20
_HEADINGS = ("document", "kind", "characters", "tokens")


@dataclass(frozen=True)
class Counted:
    """A document and its number of tokens, by itself."""

    reading: Reading
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The documents' token counts. num_tokens: of all documents as one prompt, with their headings. context: of the
    model. fitting: the longest context that fits this machine's memory, at most the model's; 0: none."""

    model: str
    documents: tuple[Counted, ...]
    num_tokens: int
    context: int
    fitting: int

    @property
    def fits(self) -> bool:
        """True if the prompt fits with room for one new token."""
        return self.num_tokens < self.fitting


def report(counts: Counts, *, width: int) -> str:
    """A table of the documents, and the contexts that they fit; sentences are wrapped at `width` columns."""
    rows = [_HEADINGS, *map(_row, counts.documents)]
    if len(counts.documents) > 1:
        rows.append(("all in one prompt", "", "", f"{counts.num_tokens:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        f"{row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}  {row[2].rjust(widths[2])}  {row[3].rjust(widths[3])}"
        for row in rows
    ]
    wrapped = (part for line in _room(counts) for part in textwrap.wrap(line, max(width, _LEAST_WIDTH)))
    return "".join(f"{line}\n" for line in (*lines, "", *wrapped))


def document(counts: Counts) -> dict[str, Any]:
    """The counts as JSON."""
    return {
        "documents": [
            {
                "name": counted.reading.name,
                "kind": counted.reading.kind,
                "num_bytes": counted.reading.source.num_bytes,
                "num_characters": len(counted.reading.text),
                "num_tokens": counted.num_tokens,
                "remarks": list(counted.reading.remarks),
            }
            for counted in counts.documents
        ],
        "total": {"num_tokens": counts.num_tokens},
        "model": counts.model,
        "context": counts.context,
        "fitting": counts.fitting,
        "fits": counts.fits,
        "version": __version__,
    }


def _row(counted: Counted) -> tuple[str, str, str, str]:
    reading = counted.reading
    return line_text(reading.name), reading.shown_kind, f"{len(reading.text):,}", f"{counted.num_tokens:,}"


def _room(counts: Counts) -> Iterator[str]:
    share = f"{percent(counts.num_tokens, counts.context)}% of it"
    yield f"context of {line_text(counts.model)}: {counts.context:,} tokens, these are {share}"
    if not counts.fitting:
        yield "fits this machine: not even a short context (triforce plan says why)"
        return
    if counts.fits:
        what = "all of it" if counts.fitting == counts.context else f"{counts.fitting:,} tokens"
        left = counts.fitting - counts.num_tokens
        yield f"fits this machine: {what}, prompt and reply together; {left:,} are left for the reply"
        return
    room = "the context" if counts.fitting == counts.context else "this machine"
    too_many = counts.num_tokens + 1 - counts.fitting
    yield f"does not fit: {room} has room for {counts.fitting:,} tokens, prompt and reply; {too_many:,} too many"
