"""Documents that a person adds to a chat: all that are named, or none of them."""

from __future__ import annotations

from offload.errors import UsageError
from triforce_cli.chat.dialogue import Dialogue
from triforce_cli.documents import Document
from triforce_cli.documents.reading import Reading, read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.utf8 import STDIN


def add_documents(dialogue: Dialogue, named: Named) -> None:
    """Those that the conversation has already, as a session may, are not added again. Raises UsageError, DoesNotFit."""
    if STDIN in named.paths:
        raise UsageError("standard input is where messages come from; name a file")
    output = dialogue.output
    with output:
        readings = read_documents(named, "the document", note=output.note, on_read=output.report)
    there = dialogue.conversation.documents
    kinds = {document: _kind(reading) for reading in readings if (document := _document(reading)) not in there}
    if kinds:
        dialogue.add(kinds)


def _document(reading: Reading) -> Document:
    return Document(reading.name, reading.text)


def _kind(reading: Reading) -> str:
    """What it was made of; "" for text, which is as it is."""
    return "" if reading.kind == "text" else reading.shown_kind
