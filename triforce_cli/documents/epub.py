"""EPUBs: the text of their chapters in reading order, each chapter once."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from offload.errors import UsageError
from triforce_cli.documents.archive import Archive
from triforce_cli.documents.blocks import written
from triforce_cli.documents.encoding import decoded
from triforce_cli.documents.epub_contents import Contents, chapter_places, contents
from triforce_cli.documents.limits import Meter, OnPart
from triforce_cli.documents.markup import Attributes, local, parse
from triforce_cli.documents.places import Place
from triforce_cli.documents.web import hidden, visible_blocks

CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_PACKAGE = "application/oebps-package+xml"
_NCX = "application/x-dtbncx+xml"  # the table of contents of EPUB 2
_PAGES = (
    *("application/xhtml+xml", "text/html", "text/xml", "application/xml"),
    *("application/x-dtbook+xml", "text/x-oeb1-document"),  # of EPUB 2 and its predecessor
)
_PAGE_NAMES = (".xhtml", ".html", ".htm")  # pages, whatever their media type in the package
_BETWEEN = "\n"  # two chapters, each with a line end
_NUM_NAMED = 8  # parts listed in a remark


def read_epub(path: Path, meter: Meter, on_part: OnPart) -> tuple[str, tuple[Place, ...], str, tuple[str, ...]]:
    """(text, its chapters, "12 chapters", remarks). Raises UsageError. Reads a chapter at a time."""
    with path.open("rb") as stream:
        archive = Archive(stream, meter)
        order = _order(archive, meter)
        names = list(order.chapters)
        _check_readable(archive, names, meter)
        texts, places, num_hidden, start = list[str](), list[Place](), 0, 0
        for number, name in enumerate(names, 1):
            page = decoded(archive.read(name), meter, f"{name} in {meter.name}", is_xml=True)
            blocks, hidden_here = visible_blocks(page, meter)
            chapter = written(blocks)
            if text := chapter.text:
                texts.append(text)
                named = order.contents.get(name, ())
                places += chapter_places(named, chapter.anchors, chapter.headings, start=start, number=len(texts))
                start += len(text) + len(_BETWEEN)
            num_hidden += hidden_here
            on_part(number / len(names))
    if not texts:
        raise UsageError(
            f"{meter.name} has {len(names):,} chapters and no text{order.shown_left_out}; if they are pictures, "
            "ocrmypdf puts text into a PDF of them"
        )
    return (
        _BETWEEN.join(texts),
        tuple(places),
        f"{len(texts):,} chapter{'' if len(texts) == 1 else 's'}",
        (*order.remarks, *filter(None, [hidden(num_hidden)])),
    )


@dataclass(frozen=True)
class _Part:
    """An item of the package's manifest. fallback: the item for readers that cannot show this one, "" for none.
    is_contents: the navigation page with the table of contents."""

    href: str
    media_type: str
    fallback: str
    is_contents: bool = False

    @property
    def is_page(self) -> bool:
        return self.media_type in _PAGES or unquote(urlsplit(self.href).path).lower().endswith(_PAGE_NAMES)


class _Package:
    """A listener for the package file: its items by id, and their reading order."""

    def __init__(self) -> None:
        self.parts: dict[str, _Part] = {}
        self.order: dict[str, bool] = {}  # by id: True if linear, so part of the reading order

    def start(self, tag: str, attributes: Attributes) -> None:
        name = local(tag)
        if name == "item":
            media_type = attributes.get("media-type", "").partition(";")[0].strip().lower()
            is_contents = "nav" in attributes.get("properties", "").split()
            part = _Part(attributes.get("href", ""), media_type, attributes.get("fallback", ""), is_contents)
            self.parts[attributes.get("id", "")] = part
        elif name == "itemref":
            part_name, is_linear = attributes.get("idref", ""), attributes.get("linear") != "no"
            self.order[part_name] = self.order.get(part_name, False) or is_linear

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...

    @property
    def contents(self) -> str:
        """The address of the table of contents: of the navigation page, else of the NCX; "" if there is none."""
        parts = self.parts.values()
        pages = (part.href for part in parts if part.is_contents)
        return next(pages, next((part.href for part in parts if part.media_type == _NCX), ""))

    def page(self, name: str) -> _Part | None:
        """The item `name` if it is a page, else the first of its fallbacks that is one."""
        seen: set[str] = set()
        while name in self.parts and name not in seen:
            if self.parts[name].is_page:
                return self.parts[name]
            seen.add(name)
            name = self.parts[name].fallback
        return None


class _Container:
    """A listener for the container file: the paths of the packages, one for each rendition, the default one first."""

    def __init__(self) -> None:
        self.packages: list[str] = []
        self._others: list[str] = []

    def start(self, tag: str, attributes: Attributes) -> None:
        if local(tag) == "rootfile":
            is_package = attributes.get("media-type", _PACKAGE).strip().lower() == _PACKAGE
            (self.packages if is_package else self._others).append(attributes.get("full-path", ""))

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...

    @property
    def first(self) -> str:
        return next(iter(self.packages + self._others), "")


class _Encrypted:
    """A listener for the names of encrypted parts."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def start(self, tag: str, attributes: Attributes) -> None:
        if local(tag) == "CipherReference":
            self.names.add(unquote(attributes.get("URI", "")))

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...


@dataclass
class _Order:
    """The chapters to read. chapters: members of the archive, each once. left_out: other parts in the spine, with the
    reason. contents: of the table of contents. fault: of a table that cannot be read."""

    chapters: dict[str, None] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    num_renditions: int = 1
    contents: Contents = field(default_factory=dict)
    fault: str = ""

    @property
    def shown_left_out(self) -> str:
        named = ", ".join(self.left_out[:_NUM_NAMED]) + (" ..." if len(self.left_out) > _NUM_NAMED else "")
        return f", without {len(self.left_out):,} of the parts that the spine names: {named}" if self.left_out else ""

    @property
    def remarks(self) -> tuple[str, ...]:
        several = f"the first of its {self.num_renditions} renditions" if self.num_renditions > 1 else ""
        parts = self.shown_left_out.removeprefix(", ")
        return tuple(filter(None, (several, parts, self.fault)))


def _order(archive: Archive, meter: Meter) -> _Order:
    container, package = _Container(), _Package()
    parse(archive.pieces(CONTAINER), "xml", container, meter)
    root = _inside("", container.first, meter)
    parse(archive.pieces(root), "xml", package, meter)
    order, missing = _Order(num_renditions=len(container.packages)), []
    for name, is_linear in package.order.items():
        page = package.page(name)
        member = _member(archive, posixpath.dirname(root), page.href, meter) if page else ""
        if not page:
            part = package.parts.get(name)
            shown = f"{part.href} ({part.media_type or 'of no media type'})" if part else f"{name!r} (not in its list)"
            order.left_out.append(shown)
        elif not is_linear:
            order.left_out.append(f'{page.href} (linear="no")')
        elif member not in archive.names:
            missing.append(member)
        else:
            order.chapters[member] = None
    if missing and not order.chapters:
        order.chapters[missing[0]] = None  # reading it raises the error
    order.left_out.extend(f"{name} (missing)" for name in missing)
    _read_contents(order, archive, posixpath.dirname(root), package.contents, meter)
    return order


def _read_contents(order: _Order, archive: Archive, folder: str, address: str, meter: Meter) -> None:
    """Read the table of contents. Without one that can be read, chapters are called by their headings."""
    if not address:
        return
    try:
        name = _member(archive, folder, address, meter)
        inside = posixpath.dirname(name)
        order.contents = contents(archive, name, meter, lambda link: _member(archive, inside, link, meter))
    except UsageError:
        meter.check()
        order.fault = "its table of contents is damaged, so chapters are called by their headings"


def _member(archive: Archive, folder: str, href: str, meter: Meter) -> str:
    """The member that `href` names; some archives have percent-encoded names."""
    name = _inside(folder, href, meter)
    as_written = posixpath.normpath(posixpath.join(folder, urlsplit(href).path))
    return as_written if name not in archive.names and as_written in archive.names else name


def _inside(folder: str, reference: str, meter: Meter) -> str:
    """The member that `reference` names, relative to `folder`."""
    address = urlsplit(reference)
    path = unquote(address.path)
    found = posixpath.normpath(posixpath.join(folder, path))
    if address.scheme or address.netloc or found.startswith(("/", "../")) or found == "..":
        raise UsageError(
            f"{meter.name} names {reference!r} as a part of itself, which is outside of it; it is no sound EPUB, so "
            "nothing of it is read"
        )
    return found


def _check_readable(archive: Archive, names: list[str], meter: Meter) -> None:
    """Raises UsageError if chapters are encrypted. Encrypted fonts are common and do not matter."""
    if _ENCRYPTION not in archive.names:
        return
    encrypted = _Encrypted()
    parse(archive.pieces(_ENCRYPTION), "xml", encrypted, meter)
    if protected := encrypted.names.intersection(names):
        raise UsageError(
            f"{meter.name} is protected against copying: {len(protected):,} of {len(names):,} chapters are encrypted; "
            "name a copy without protection"
        )
