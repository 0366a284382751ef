"""The table of contents of an EPUB: what its chapters are called, from its navigation page (EPUB 3) or NCX (EPUB 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from triforce_cli.documents.archive import Archive
from triforce_cli.documents.limits import Meter
from triforce_cli.documents.markup import Attributes, local, parse
from triforce_cli.documents.places import Place


@dataclass(frozen=True)
class Entry:
    """A line of a table of contents. anchor: in the chapter's page, "" for its beginning."""

    anchor: str
    title: str


Contents = Mapping[str, Sequence[Entry]]  # entries by member of the archive
_TABLES = ("nav", "navMap")  # of a navigation page, and of an NCX


class Links:
    """A listener for the links of a navigation page's table of contents, or of an NCX: (address, title) of each."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._tables: list[bool] = []  # of the open tables: True for the one of contents, not of pages or figures
        self._address: str | None = None  # of the open <a>
        self._label: list[str] | None = None  # pieces of the open title
        self._title = ""  # of an NCX's open entry

    def start(self, tag: str, attributes: Attributes) -> None:
        name = local(tag)
        if name in _TABLES:
            kinds = next((value for key, value in attributes.items() if local(key) == "type"), "")
            self._tables.append(name == "navMap" or "toc" in kinds.split())
        elif not any(self._tables):
            return
        elif name == "a" and attributes.get("href"):
            self._address, self._label = attributes["href"], []
        elif name == "navLabel":
            self._label = []
        elif name == "content" and attributes.get("src"):
            self.found.append((attributes["src"], self._title))

    def end(self, tag: str) -> None:
        name = local(tag)
        title = " ".join("".join(self._label or ()).split())
        if name in _TABLES:
            self._tables.pop()
        elif name == "a" and self._address is not None:
            self.found.append((self._address, title))
            self._address = self._label = None
        elif name == "navLabel":
            self._title, self._label = title, None

    def text(self, text: str) -> None:
        if self._label is not None:
            self._label.append(text)


def contents(archive: Archive, name: str, meter: Meter, member: Callable[[str], str]) -> Contents:
    """The entries of the table of contents in the member `name`, with titles. member: the member that an address names.
    Raises UsageError if the table is damaged or leads outside."""
    links, found = Links(), dict[str, list[Entry]]()
    parse(archive.pieces(name), "xml", links, meter)
    for address, title in links.found:
        if title:
            found.setdefault(member(address), []).append(Entry(unquote(urlsplit(address).fragment), title))
    return found


def chapter_places(
    entries: Sequence[Entry], anchors: Mapping[str, int], headings: Sequence[Place], *, start: int, number: int
) -> tuple[Place, ...]:
    """The places of one chapter, whose text begins at `start`: where the table of contents leads to, and its beginning,
    which is called as the chapter's first heading if the table has no name for it. anchors, headings: places in the
    chapter's own text."""
    titles: dict[int, str] = {}
    for entry in entries:
        at = anchors.get(entry.anchor) if entry.anchor else 0
        if at is not None:
            titles.setdefault(at, entry.title)
    titles.setdefault(0, headings[0].title if headings and not titles else "")
    return tuple(Place("chapter", start + at, number, titles[at]) for at in sorted(titles))
