"""The parts of an Office document, which its relationships name, whatever their files are called.

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
_USUAL = {"officeDocument": "word/document.xml"}  # of a package without relationships, as programs write by hand
_USUAL_BESIDE = {"styles": "styles.xml", "footnotes": "footnotes.xml", "endnotes": "endnotes.xml"}


def is_word(archive: Archive) -> bool:
    """A document or a template of Word's, with macros or without."""
    if _USUAL["officeDocument"] in archive.names:
        return True
    return TYPES in archive.names and bool(_WORD.search(archive.read(TYPES)))


def main_part(archive: Archive, meter: Meter) -> str:
    """The name of the part with the text. Raises UsageError."""
    found = related(archive, "", meter).get("officeDocument", ())
    return found[0] if found else _USUAL["officeDocument"]


def related(archive: Archive, part: str, meter: Meter) -> Mapping[str, tuple[str, ...]]:
    """The parts that `part` names, by the last word of the type ("footnotes"); part: "" for the package itself. Only
    the ones that are there."""
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
    """Hears which parts a part names."""

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
