"""EPUBs: their chapters in reading order, each a page of which all is read."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from offload.errors import UsageError
from triforce_cli.documents.archive import Archive
from triforce_cli.documents.blocks import joined
from triforce_cli.documents.encoding import decoded
from triforce_cli.documents.limits import Meter, OnPart
from triforce_cli.documents.markup import Attributes, local, parse
from triforce_cli.documents.web import visible_blocks

CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_PAGES = ("application/xhtml+xml", "text/html")


def read_epub(path: Path, meter: Meter, on_part: OnPart) -> tuple[str, str]:
    """(text, "12 chapters"). Raises UsageError. Reads a chapter at a time."""
    with path.open("rb") as stream:
        archive = Archive(stream, meter)
        names = list(_chapters(archive, meter))
        _check_readable(archive, names, meter)
        texts = []
        for number, name in enumerate(names, 1):
            page = decoded(archive.read(name), meter, f"{name} in {meter.name}", is_xml=True)
            texts.append(joined(visible_blocks(page, meter)))
            on_part(number / len(names))
    texts = [text for text in texts if text]
    if not texts:
        raise UsageError(
            f"{meter.name} has {len(names):,} chapters and no text; if they are pictures, ocrmypdf puts text into a "
            "PDF of them"
        )
    return "\n".join(texts), f"{len(texts):,} chapter{'' if len(texts) == 1 else 's'}"


class _Package:
    """Hears what the package says: the parts by their names, and which of them are read in which order."""

    def __init__(self) -> None:
        self.root = ""  # of the container: where the package is
        self.pages: dict[str, str] = {}
        self.order: list[str] = []

    def start(self, tag: str, attributes: Attributes) -> None:
        name = local(tag)
        if name == "rootfile":
            self.root = self.root or attributes.get("full-path", "")
        elif name == "item" and attributes.get("media-type") in _PAGES:
            self.pages[attributes.get("id", "")] = attributes.get("href", "")
        elif name == "itemref" and attributes.get("linear") != "no":
            self.order.append(attributes.get("idref", ""))

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...


class _Encrypted:
    """Hears which parts are encrypted."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def start(self, tag: str, attributes: Attributes) -> None:
        if local(tag) == "CipherReference":
            self.names.add(unquote(attributes.get("URI", "")))

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...


def _chapters(archive: Archive, meter: Meter) -> Iterator[str]:
    container, package = _Package(), _Package()
    parse(archive.pieces(CONTAINER), "xml", container, meter)
    root = _inside("", container.root, meter)
    parse(archive.pieces(root), "xml", package, meter)
    for part in package.order:
        if part in package.pages:
            yield _inside(posixpath.dirname(root), package.pages[part], meter)


def _inside(folder: str, reference: str, meter: Meter) -> str:
    """The member that `reference` names from `folder`."""
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
    """Raises UsageError where chapters are protected. Fonts often are, and do not matter."""
    if _ENCRYPTION not in archive.names:
        return
    encrypted = _Encrypted()
    parse(archive.pieces(_ENCRYPTION), "xml", encrypted, meter)
    if protected := encrypted.names.intersection(names):
        raise UsageError(
            f"{meter.name} is protected against copying: {len(protected):,} of {len(names):,} chapters are encrypted; "
            "name a copy without protection"
        )
