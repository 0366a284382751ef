"""A conversation: messages, their roles and documents. Immutable: an operation returns another conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Annotated

from offload import strict_json
from offload.errors import UsageError
from offload.fields import Kind, record, versioned, whole
from triforce_cli.documents import Document

VERSION = 1
Token = Annotated[int, Kind("a token id", whole(0, 2**31 - 1).fits)]


@dataclass(frozen=True)
class Turn:
    """A question and its reply. complete: False if the reply was stopped or reached its length.

    reply_tokens: as the model generated them, with an end token; without them the reply is encoded from its text.
    """

    user: str
    documents: tuple[Document, ...]
    reply: str
    reply_tokens: tuple[Token, ...]
    complete: bool


@dataclass(frozen=True)
class Conversation:
    """A conversation. pending_documents precede the next question, in this order. question: the open question, or None.

    date: the day it began, "26 Jul 2024". Templates that write a date get this one, so that a conversation continued
    the next day begins with the same tokens. Operations raise UsageError if they are not possible.
    """

    system: str = ""
    turns: tuple[Turn, ...] = ()
    pending_documents: tuple[Document, ...] = ()
    question: str | None = None
    date: str = ""

    @property
    def documents(self) -> tuple[Document, ...]:
        """All documents, in the order in which they were added."""
        return (*(document for turn in self.turns for document in turn.documents), *self.pending_documents)

    def asked(self, question: str) -> Conversation:
        """The conversation with `question` as its open question, unchanged. It replaces an open question."""
        question = _text(question, "the message")
        if not question.strip():
            raise UsageError("the message is empty; it needs at least one character that is not white space")
        return replace(self, question=question)

    def answered(self, reply: str, tokens: Sequence[int], *, complete: bool) -> Conversation:
        """The conversation in which the open question, the pending documents and `reply` become a turn. reply: as
        shown, without a stop string."""
        if self.question is None:
            raise UsageError("there is no message to answer")
        turn = Turn(self.question, self.pending_documents, _text(reply, "the reply"), tuple(tokens), complete)
        return replace(self, turns=(*self.turns, turn), pending_documents=(), question=None)

    def undo(self) -> tuple[Conversation, str]:
        """The conversation before the last message was sent, and that message. The message's documents are pending
        again.

        An open question counts as the last message: it alone is taken back.
        """
        reopened = self._reopened("undo")
        assert reopened.question is not None
        return replace(reopened, question=None), reopened.question

    def regenerate(self) -> Conversation:
        """The conversation with its last question open again."""
        return self._reopened("answer again")

    def edit(self, question: str) -> Conversation:
        """The conversation with `question` in place of the last question, whose documents stay."""
        return self._reopened("edit").asked(question)

    def with_system(self, system: str) -> Conversation:
        """The conversation with another system message, unchanged; white space alone removes it."""
        system = _text(system, "the system message")
        return replace(self, system=system if system.strip() else "")

    def with_document(self, document: Document) -> Conversation:
        """The conversation with one more pending document. It replaces a pending one of the same name."""
        _text(document.name, "the document's name")
        _text(document.text, f"the document {document.name!r}")
        others = (other for other in self.pending_documents if other.name != document.name)
        return replace(self, pending_documents=(*others, document))

    def drop_document(self, name: str) -> Conversation:
        """The conversation without the documents of this name, pending or in earlier turns. Messages about them
        stay."""
        if all(document.name != name for document in self.documents):
            there = ", ".join(repr(document.name) for document in self.documents) or "none"
            raise UsageError(f"there is no document {name!r} in this conversation; there are: {there}")
        turns = (replace(turn, documents=_without(turn.documents, name)) for turn in self.turns)
        return replace(self, turns=tuple(turns), pending_documents=_without(self.pending_documents, name))

    def drop_turns(self, count: int) -> Conversation:
        """The conversation without the `count` oldest turns and their documents."""
        if not 1 <= count <= len(self.turns):
            raise UsageError(f"{count} turns cannot be dropped; there are {len(self.turns)}")
        return replace(self, turns=self.turns[count:])

    def clear(self) -> Conversation:
        """A new conversation with the same system message."""
        return Conversation(system=self.system, date=self.date)

    def _reopened(self, verb: str) -> Conversation:
        """The conversation before its last reply, with that question open."""
        if self.question is not None:
            return self
        if not self.turns:
            raise UsageError(f"there is nothing to {verb}: no message was sent yet")
        last = self.turns[-1]
        newer = {document.name for document in self.pending_documents}
        documents = (*(each for each in last.documents if each.name not in newer), *self.pending_documents)
        return replace(self, turns=self.turns[:-1], pending_documents=documents, question=last.user)

    def to_data(self) -> dict[str, object]:
        """The conversation as JSON values, which `from_data` reads."""
        return {"version": VERSION, **{name: _plain(value) for name, value in vars(self).items()}}

    @classmethod
    def from_data(cls, data: object, source: str) -> Conversation:
        """The conversation in `data`. Raises UsageError, which names `source` and the wrong field."""
        try:
            return record(cls, versioned(data, VERSION, ""), "")
        except ValueError as error:
            raise UsageError(f"{source} is not a saved conversation: {error}") from error

    def to_json(self) -> str:
        return json.dumps(self.to_data(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, source: str) -> Conversation:
        """The conversation in `text`. Raises UsageError, also for invalid JSON."""
        try:
            data = strict_json.parse(text)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else error
            raise UsageError(f"{source} is not a saved conversation: not valid JSON ({reason})") from error
        return cls.from_data(data, source)


def _without(documents: tuple[Document, ...], name: str) -> tuple[Document, ...]:
    return tuple(document for document in documents if document.name != name)


def _text(text: str, what: str) -> str:
    """`text`, if UTF-8 can encode it: half a surrogate pair stands for bytes that were not UTF-8. Raises UsageError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} has bytes that are not UTF-8; leave them out or convert the text") from error
    return text


def _plain(value: object) -> object:
    """`value` as lists and dicts, ready for JSON."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in vars(value).items()} if is_dataclass(value) else value
