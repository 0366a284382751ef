"""The kind of a document: from its content, and from its name if the content does not tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from offload.errors import UsageError
from triforce_cli.documents.archive import opened
from triforce_cli.documents.package import is_word
from triforce_cli.screen.utf8 import HEAD_BYTES, is_binary

Kind = Literal["text", "PDF", "web page", "Word", "EPUB", "binary"]

_PDF = re.compile(rb"%PDF-\d")
_ZIP = b"PK\x03\x04"
_OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # a compound file; an encrypted .docx is one, too
_WEB = re.compile(rb"\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)
_BY_NAME: dict[str, Kind] = {
    ".pdf": "PDF",
    ".docx": "Word",
    ".docm": "Word",
    ".dotx": "Word",
    ".dotm": "Word",
    ".epub": "EPUB",
    ".html": "web page",
    ".htm": "web page",
    ".xhtml": "web page",
}


def kind_of(path: Path) -> Kind:
    """The kind of a file that can be read twice. Raises OSError, and UsageError if name and content contradict each
    other."""
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    named, found = _BY_NAME.get(path.suffix.lower()), _kind_of_content(path, head)
    if named == found or (named == "web page" and found == "text"):
        return named
    if named == "PDF" and _PDF.search(head):  # after a header from a mail or a printer
        return named
    if not path.suffix and found == "text" and _WEB.match(head):
        return "web page"
    if named == "Word" and head.startswith(_OLD_OFFICE):
        raise UsageError(
            f"{path} is encrypted, or an old .doc by another name; open it in Word or LibreOffice and save it as .docx "
            "without a password"
        )
    if named and found in ("text", "binary"):
        if named != "PDF" and found == "binary" and head.startswith(_ZIP):  # damaged; its reader raises the error
            return named
        shown = "is empty" if not head else f"begins with {head[:16]!r}"
        raise UsageError(
            f"{path} is named as a document of kind {named}, and its content is not: it {shown}; fetch it again, or "
            "give it the name that suits it"
        )
    return found


def _kind_of_content(path: Path, head: bytes) -> Kind:
    if _PDF.match(head):
        return "PDF"
    if head.startswith(_ZIP):
        with opened(path) as archive:
            if archive is None:
                return "binary"
            from triforce_cli.documents.epub import CONTAINER

            return "Word" if is_word(archive) else "EPUB" if CONTAINER in archive.names else "binary"
    return "binary" if is_binary(head) else "text"
