"""A document that a client sends, as the text that a question has of it."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from offload.errors import UsageError
from triforce_cli.documents import Document
from triforce_cli.documents.reading import read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.prompts.script import block

_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}", re.ASCII)
_MOST_OF_NAME = 120  # characters


def _ignore(line: str, *, urgent: bool = False) -> None:
    """A `Note` that shows nothing: remarks are in the reading."""


def sent_document(name: str, data: bytes) -> dict[str, Any]:
    """The document as JSON: its name, its kind, and its text as a question begins with it, with remarks on what is not
    in the text. Its file is gone afterwards. Raises UsageError if it cannot be read."""
    name = PurePath(name.replace("\\", "/")).name[-_MOST_OF_NAME:] or "document"
    suffix = PurePath(name).suffix.lower()
    with TemporaryDirectory(prefix="triforce-") as folder:
        path = Path(folder) / f"document{suffix if _SUFFIX.fullmatch(suffix) else ''}"
        path.write_bytes(data)
        try:
            [reading] = read_documents(Named((path,)), "the document", note=_ignore, on_read=lambda *_: None)
        except UsageError as error:
            raise UsageError(str(error).replace(str(path), name)) from error
    if reading.source.kind == "binary":
        raise UsageError(f"{name} is no text, and no PDF, Word document, EPUB or web page")
    if not reading.text.strip():
        raise UsageError(f"{name} has no text in it")
    text = block(Document(name, reading.text))
    return {"name": name, "kind": reading.shown_kind, "text": text, "remarks": list(reading.remarks)}
