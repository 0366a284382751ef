"""The parts of an Office document, found by its relationships and not by their file names.

Open Packaging Conventions (ECMA-376, part 2). The types of relationships end alike in transitional and strict files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from urllib.parse import unquote

from triforce_cli.documents.archive import Archive
from triforce_cli.documents.limits import Meter
from triforce_cli.documents.markup import Attributes, local, parse

TYPES = "[Content_Types].xml"
_WORD = re.compile(
    rb"application/vnd\.(openxmlformats-officedocument\.wordprocessingml\.(document|template)"
    rb"|ms-word\.(document|template)\.macroEnabled(Template)?)\.main\+xml",
    re.IGNORECASE,
)
_USUAL = {"officeDocument": "word/document.xml"}  # for a package without relationships, as simple programs write
_USUAL_BESIDE = {"styles": "styles.xml", "footnotes": "footnotes.xml", "endnotes": "endnotes.xml"}


def is_word(archive: Archive) -> bool:
    """True for a document or a template of Word, with macros or without."""
    if _USUAL["officeDocument"] in archive.names:
        return True
    return TYPES in archive.names and bool(_WORD.search(archive.read(TYPES)))


def main_part(archive: Archive, meter: Meter) -> str:
    """The name of the part with the text. Raises UsageError."""
    found = related(archive, "", meter).get("officeDocument", ())
    return found[0] if found else _USUAL["officeDocument"]


def related(archive: Archive, part: str, meter: Meter) -> Mapping[str, tuple[str, ...]]:
    """The existing parts that `part` refers to, by the last word of the relationship's type ("footnotes"). part: "" for
    the package itself."""
    folder, name = posixpath.split(part)
    relationships = posixpath.join(folder, "_rels", f"{name}.rels")
    if relationships in archive.names:
        heard = _Relationships(folder)
        parse(archive.pieces(relationships), "xml", heard, meter)
        found = heard.found
    else:
        usual = {kind: posixpath.join(folder, name) for kind, name in _USUAL_BESIDE.items()} if part else _USUAL
        found = {kind: [name] for kind, name in usual.items()}
    present = {kind: tuple(name for name in names if name in archive.names) for kind, names in found.items()}
    return {kind: names for kind, names in present.items() if names}


class _Relationships:
    """A listener for the parts that a part refers to."""

    def __init__(self, folder: str) -> None:
        self.found: dict[str, list[str]] = {}
        self._folder = folder

    def start(self, tag: str, attributes: Attributes) -> None:
        if local(tag) != "Relationship" or attributes.get("TargetMode") == "External":
            return
        target = posixpath.normpath(posixpath.join("/", self._folder, unquote(attributes.get("Target", ""))))
        names = self.found.setdefault(attributes.get("Type", "").rpartition("/")[2], [])
        if target.lstrip("/") not in names:
            names.append(target.lstrip("/"))

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...
