"""Places of a document: its pages, chapters or headings, and where each begins in the text made of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triforce_cli.ground.text import line_text

_WIDTH = 60  # shown characters of a title


@dataclass(frozen=True)
class Place:
    """A page, a chapter or a heading. start: the character of the text at which it begins. number: of the page, the
    chapter or the heading, from 1. title: of a chapter, "" for one without; the text of a heading."""

    kind: Literal["page", "chapter", "heading"]
    start: int
    number: int
    title: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The place as JSON, without where it begins."""
        return {"kind": self.kind, "number": self.number, "title": self.title}

    def __str__(self) -> str:
        if self.kind == "page":
            return f"p. {self.number}"
        title = line_text(" ".join(self.title.split()))
        return f'"{title if len(title) <= _WIDTH else f"{title[:_WIDTH]} ..."}"' if title else f"chapter {self.number}"


def place_at(places: Sequence[Place], at: int) -> Place | None:
    """The place that character `at` of a text is in, None before the first one; `places` is in order."""
    number = bisect_right([place.start for place in places], at)
    return places[number - 1] if number else None


def marked(text: str, places: Sequence[Place]) -> str:
    """The text with a line above every place: "--- p. 4 ---"."""
    starts = [*(place.start for place in places), len(text)]
    parts = [text[: starts[0]]]
    for place, start, end in zip(places, starts, starts[1:], strict=False):
        line_end = "" if parts[-1].endswith("\n") or not start else "\n"
        parts.append(f"{line_end}--- {place} ---\n{text[start:end]}")
    return "".join(parts)
