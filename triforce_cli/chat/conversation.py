"""A conversation: messages, their roles and documents. Immutable: an operation returns another conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import NoReturn, TypeVar

from offload import strict_json
from offload.errors import UsageError
from triforce_cli.documents import Document

VERSION = 1
_MOST_TOKEN = 2**31 - 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Turn:
    """A question and the reply. complete: False where the reply was stopped or reached its length.

    reply_tokens: as the model gave them, an end token too; without them the reply is encoded from its text.
    """

    user: str
    documents: tuple[Document, ...]
    reply: str
    reply_tokens: tuple[int, ...]
    complete: bool


@dataclass(frozen=True)
class Conversation:
    """pending_documents go before the next question, in this order. question: asked, and not answered yet.

    date: the day it began, "26 Jul 2024". Templates that write a date get this one, so that a conversation which is
    taken up tomorrow begins with the same tokens. Operations raise UsageError for what cannot be done.
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
        """The conversation with an open question, as it is. It replaces an open question."""
        question = _text(question, "the message")
        if not question.strip():
            raise UsageError("the message is empty; it needs at least one character that is not white space")
        return replace(self, question=question)

    def answered(self, reply: str, tokens: Sequence[int], *, complete: bool) -> Conversation:
        """The conversation in which open question, pending documents and `reply` are a turn. reply: as shown, without a
        stop string."""
        if self.question is None:
            raise UsageError("there is no message to answer")
        turn = Turn(self.question, self.pending_documents, _text(reply, "the reply"), tuple(tokens), complete)
        return replace(self, turns=(*self.turns, turn), pending_documents=(), question=None)

    def undo(self) -> tuple[Conversation, str]:
        """As it was before the last message was sent, and that message: its documents are pending again.

        An open question counts as the last message: it is taken back, and nothing else.
        """
        reopened = self._reopened("undo")
        assert reopened.question is not None
        return replace(reopened, question=None), reopened.question

    def regenerate(self) -> Conversation:
        """The conversation with its last question open again."""
        return self._reopened("answer again")

    def edit(self, question: str) -> Conversation:
        """The conversation with `text` in place of the last question, whose documents stay."""
        return self._reopened("edit").asked(question)

    def with_system(self, system: str) -> Conversation:
        """The conversation with another system message, as it is; nothing but white space for none."""
        system = _text(system, "the system message")
        return replace(self, system=system if system.strip() else "")

    def with_document(self, document: Document) -> Conversation:
        """The conversation with one more pending document. It replaces a pending one of the same name."""
        _text(document.name, "the document's name")
        _text(document.text, f"the document {document.name!r}")
        others = (other for other in self.pending_documents if other.name != document.name)
        return replace(self, pending_documents=(*others, document))

    def drop_document(self, name: str) -> Conversation:
        """The conversation without the documents of this name, pending or in earlier turns. What was said about them
        stays."""
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
        return _Reader(source).conversation(data)

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


class _Reader:
    """Parse a conversation from JSON values. Every field must be present and of its type; others are refused."""

    def __init__(self, source: str) -> None:
        self._source = source

    def conversation(self, data: object) -> Conversation:
        version = data.get("version", VERSION) if isinstance(data, dict) else VERSION
        if not isinstance(version, int) or isinstance(version, bool) or version != VERSION:
            self._refuse(f"its version is {_short(version)}, and this program reads version {VERSION}")
        values = self._fields(data, Conversation, "it", "version")
        question = values["question"]
        return Conversation(
            system=self._string(values["system"], "system"),
            turns=self._list(values["turns"], "turns", self._turn),
            pending_documents=self._list(values["pending_documents"], "pending_documents", self._document),
            question=None if question is None else self._string(question, "question"),
            date=self._string(values["date"], "date"),
        )

    def _turn(self, data: object, where: str) -> Turn:
        values = self._fields(data, Turn, where)
        complete = values["complete"]
        if not isinstance(complete, bool):
            self._refuse(f"{where}.complete is {_short(complete)} instead of true or false")
        return Turn(
            user=self._string(values["user"], f"{where}.user"),
            documents=self._list(values["documents"], f"{where}.documents", self._document),
            reply=self._string(values["reply"], f"{where}.reply"),
            reply_tokens=self._list(values["reply_tokens"], f"{where}.reply_tokens", self._token),
            complete=complete,
        )

    def _document(self, data: object, where: str) -> Document:
        values = self._fields(data, Document, where)
        return Document(self._string(values["name"], f"{where}.name"), self._string(values["text"], f"{where}.text"))

    def _token(self, value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_TOKEN:
            self._refuse(f"{where} is {_short(value)} instead of a token id")
        return value

    def _string(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            self._refuse(f"{where} is {_short(value)} instead of a string")
        return _text(value, f"{self._source}: {where}")

    def _list(self, value: object, where: str, read: Callable[[object, str], _T]) -> tuple[_T, ...]:
        if not isinstance(value, (list, tuple)):
            self._refuse(f"{where} is {_short(value)} instead of a list")
        return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(value))

    def _fields(self, data: object, kind: type, where: str, *more: str) -> Mapping[str, object]:
        if not isinstance(data, dict):
            self._refuse(f"{where} is {_short(data)} instead of an object")
        expected = {*more, *(field.name for field in fields(kind))}
        for problem, names in (("no", expected - data.keys()), ("an unknown", data.keys() - expected)):
            if names:
                self._refuse(f"{where} has {problem} field {_short(min(names))}")
        return data

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(f"{self._source} is not a saved conversation: {what}")


def _short(value: object) -> str:
    """A value, which may be huge, shortened for a message."""
    if isinstance(value, (dict, list, tuple)):
        return "a list" if isinstance(value, (list, tuple)) else "an object"
    if isinstance(value, int) and abs(value) > 2**64:  # printing it may be refused
        return "a huge number"
    text = json.dumps(value) if isinstance(value, (str, float, int, type(None))) else repr(type(value))
    return text if len(text) <= 40 else text[:37] + "..."
