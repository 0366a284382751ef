"""Web pages: their main text, without navigation, margins and comments, or all visible text.

Paragraphs, headings and code are blocks, items of lists begin with a dash, cells of a table's row are separated by
bars. Of several versions of a formula one is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from offload.errors import UsageError
from triforce_cli.documents.blocks import CELL_GAP, Block, length, written
from triforce_cli.documents.encoding import decoded
from triforce_cli.documents.limits import Meter
from triforce_cli.documents.markup import Attributes, local, parse
from triforce_cli.documents.places import Place
from triforce_cli.documents.versions import Versions, unprefixed


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UNSEEN = _words(
    "head script style noscript template svg button select option datalist textarea iframe object audio video canvas "
    "dialog mphantom"
)
_MARGINS = frozenset(("nav", "aside"))
_ENDS = frozenset(("header", "footer"))  # margins of a page; within an article they are content
_MARGIN_ROLES = _words("navigation banner contentinfo complementary search dialog")
_MARGIN_NAMES = _words(
    "comments comments-area comments-wrapper comment-list commentlist comment-respond disqus_thread sidebar breadcrumb "
    "breadcrumbs cookie-banner cookies related related-articles share sharing social newsletter advertisement ads"
)
_NO_ANCHORS = frozenset(("disqus_thread",))  # ids that no heading's text gives
_CONTAINERS = _words("div ul ol form table")  # an id of another element is where a link leads to
_NOTES = _words(
    "note tip hint warning important caution danger admonition callout footnote footnotes footnote-list topic"
)
_SHOWN = frozenset(("mwe-math-mathml-a11y",))  # hidden MathML beside a picture of the formula
_NEVER_MARGINS = _words("html body main article")
_BLOCKS = _words(
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hr html legend li main nav ol p pre section summary table tbody td tfoot th thead title "
    "tr ul"
)
_HEADINGS = _words("h1 h2 h3 h4 h5 h6")
_TOLD = (
    _UNSEEN | _MARGINS | _ENDS | _HEADINGS | {"article", "main", "pre", "listing", "ul", "ol", "menu"}
)  # they change the state
_HIDDEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)"
    r"|(?:font-size|opacity)\s*:\s*0(?:\.0*)?(?:px|pt|r?em|%)?\s*(?:[;!]|$)",
    re.IGNORECASE,
)
_LEAST_SHARE = 3  # the main text is at least 1/3 of the visible text


class _Place(NamedTuple):
    """The state of an element: its visibility and its role in the page."""

    is_unseen: bool = False
    is_hidden: bool = False  # by an attribute
    is_margin: bool = False
    is_main: bool = False
    is_article: bool = False  # in an article
    is_code: bool = False
    is_heading: bool = False
    num_lists: int = 0


@dataclass(frozen=True)
class Page:
    """The visible blocks of a page. chosen: its main text, or all blocks. num_hidden: characters that the page
    hides."""

    blocks: tuple[Block, ...]
    chosen: tuple[Block, ...]
    num_hidden: int = 0

    @classmethod
    def of(cls, blocks: tuple[Block, ...], num_hidden: int) -> Page:
        inner = tuple(block for block in blocks if not block.is_margin)
        main = tuple(block for block in inner if block.is_main)
        enough = [found for found in (main, inner) if _LEAST_SHARE * length(found) >= length(blocks)]
        return cls(blocks, enough[0] if enough else blocks, num_hidden)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on text that was left out, or on why none was; empty if the page has no other text."""
        return tuple(filter(None, (self._margins, hidden(self.num_hidden))))

    @property
    def _margins(self) -> str:
        if all(not block.is_margin for block in self.blocks) and self.chosen == self.blocks:
            return ""
        if self.chosen == self.blocks:
            return f"less than a third of the page seems to be its main text: all {length(self.blocks):,} characters"
        left_out = "without navigation, margins and comments"
        return f"main text, {length(self.chosen):,} of {length(self.blocks):,} visible characters, {left_out}"


def read_page(data: bytes, meter: Meter, *, num_bytes: int) -> tuple[str, tuple[Place, ...], tuple[str, ...]]:
    """(text, its headings, remarks) of a web page. num_bytes: the file's size, which may exceed `data` past the limit.
    Raises UsageError."""
    meter.markup(max(len(data), num_bytes))
    page = Page.of(*visible_blocks(decoded(data, meter), meter))
    if not page.chosen:
        raise UsageError(
            f"{meter.name} has no visible text in its {len(data):,} bytes: scripts may make it; open it in a browser "
            "and save the page as it is shown, or as PDF"
        )
    text = written(page.chosen)
    return text.text, text.headings, page.remarks


def hidden(num_characters: int) -> str:
    """The remark on text that the page hides; "" if there is none."""
    return f"{num_characters:,} hidden characters are left out" if num_characters else ""


def visible_blocks(text: str, meter: Meter) -> tuple[tuple[Block, ...], int]:
    """(all visible blocks, in document order; number of hidden characters). Raises UsageError."""
    listener = _Listener()
    parse(meter.pieces(text.encode("utf-8")), "html", listener, meter)
    return listener.finished(), listener.num_hidden


class _Listener:
    """A listener that makes blocks of elements."""

    def __init__(self) -> None:
        self._places = [_Place()]
        self._versions = Versions()
        self._is_after_article = False  # in this main element, or outside of any
        self._pieces: list[str] = []
        self._prefix = ""  # of the next block: a dash
        self._anchors: list[str] = []  # of the next block
        self._rows: list[list[list[Block]]] = []  # blocks by cell in the open rows, the innermost last
        self._blocks: list[Block] = []
        self.num_hidden = 0

    def start(self, tag: str, attributes: Attributes) -> None:
        tag = unprefixed(local(tag).lower())
        if tag == "br":
            self._pieces.append("\n")
        if tag in _BLOCKS:
            self._end_block()
        outer, is_again = self._places[-1], self._versions.is_again(tag, attributes)
        is_text = outer.is_article or (outer.is_main and not self._is_after_article)
        place = _inner(outer, tag, attributes, is_text=is_text)
        self._places.append(place._replace(is_unseen=True) if is_again else place)
        if anchor := attributes.get("id") or (attributes.get("name") if tag == "a" else ""):
            self._anchors.append(anchor)
        if tag == "li":
            self._prefix = "  " * (self._places[-1].num_lists - 1) + "- "
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th") and self._rows:
            self._rows[-1].append([])

    def end(self, tag: str) -> None:
        tag = local(tag).lower()
        if tag in _BLOCKS:
            self._end_block()
        if tag == "li":
            self._prefix = ""
        elif tag == "tr" and self._rows:
            self._end_row(self._rows.pop())
        elif tag in ("article", "main"):
            self._is_after_article = tag == "article"
        self._versions.end()
        self._places.pop()

    def text(self, text: str) -> None:
        place = self._places[-1]
        self._versions.text(text)
        if place.is_hidden and not place.is_unseen:
            self.num_hidden += len(" ".join(text.split()))
        elif not place.is_unseen:
            self._pieces.append(text if place.is_code else re.sub(r"\s+", " ", text))

    def finished(self) -> tuple[Block, ...]:
        self._end_block()
        return tuple(self._blocks)

    def _end_block(self) -> None:
        place, whole = self._places[-1], "".join(self._pieces)
        self._pieces.clear()
        text = whole.strip("\n") if place.is_code else _without_gaps(whole)
        if not text.strip():
            return
        group = "list" if place.num_lists else ""
        indent = "" if self._prefix or not place.num_lists or place.is_code else "  " * place.num_lists
        title, anchors = text if place.is_heading else "", tuple(self._anchors)
        self._add(Block(f"{self._prefix or indent}{text}", group, place.is_main, place.is_margin, title, anchors))
        self._prefix = ""
        self._anchors.clear()

    def _end_row(self, cells: list[list[Block]]) -> None:
        """Add the row as one line. If a cell has more than one block, as in a table for layout, add the blocks
        instead."""
        blocks = [block for cell in cells for block in cell]
        if not blocks or max(map(len, cells)) > 1 or any("\n" in block.text for block in blocks):
            for block in blocks:
                self._add(block)
            return
        line = CELL_GAP.join(cell[0].text if cell else "" for cell in cells)
        anchors = tuple(name for block in blocks for name in block.anchors)
        self._add(replace(blocks[0], text=line.rstrip(), group="table", anchors=anchors))

    def _add(self, block: Block) -> None:
        """Add a block to the open cell, or to the page if no cell is open."""
        if self._rows and self._rows[-1]:
            self._rows[-1][-1].append(block)
        else:
            self._blocks.append(block)


def _inner(place: _Place, tag: str, attributes: Attributes, *, is_text: bool) -> _Place:
    """The state inside an element. is_text: around it is an article, or the main element before any article ends."""
    if not attributes and tag not in _TOLD:
        return place
    is_hidden = "hidden" in attributes or bool(_HIDDEN_STYLE.search(attributes.get("style", "")))
    is_main = tag == "main" or attributes.get("role", "").lower() == "main"
    return _Place(
        is_unseen=place.is_unseen or tag in _UNSEEN,
        is_hidden=place.is_hidden or (is_hidden and not _classes(attributes) & _SHOWN),
        is_margin=place.is_margin or _is_margin(place, tag, attributes, is_text=is_text),
        is_main=place.is_main or is_main,
        is_article=place.is_article or tag == "article",
        is_code=place.is_code or tag in ("pre", "listing"),
        is_heading=place.is_heading or tag in _HEADINGS,
        num_lists=place.num_lists + (tag in ("ul", "ol", "menu")),
    )


def _is_margin(place: _Place, tag: str, attributes: Attributes, *, is_text: bool) -> bool:
    """True for navigation, comments and the like, by the element, its role or a name. An id in the text is the place
    of a heading."""
    if tag in _NEVER_MARGINS:
        return False
    role, classes, anchor = attributes.get("role", "").lower(), _classes(attributes), attributes.get("id", "").lower()
    is_named = (tag in _CONTAINERS and "section" not in classes and not is_text) or anchor in _NO_ANCHORS
    if tag == "aside" and is_text and (role == "note" or role.startswith("doc-") or classes & _NOTES):
        return False
    is_end = tag in _ENDS and not (place.is_article or place.is_main)
    by_name = bool(classes & _MARGIN_NAMES) or (is_named and anchor in _MARGIN_NAMES)
    return tag in _MARGINS or is_end or role in _MARGIN_ROLES or by_name


def _classes(attributes: Attributes) -> frozenset[str]:
    return _words(attributes.get("class", "").lower())


def _without_gaps(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()
