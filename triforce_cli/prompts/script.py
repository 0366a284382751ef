"""A conversation as its chat template writes it, cut where questions and replies begin and end.

The template is rendered with marks in place of the messages' texts, and cut at the marks. A template may change texts,
so two checks apply: the marks must appear once each and in order, and replacing them by the texts must give the
template's rendering of the texts themselves. If that fails for a reply (some templates leave earlier thoughts out), the
reply is the template's text; if it fails otherwise, everything up to the last question is one piece. A message that the
template leaves out, or cuts, is an error.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.errors import UsageError
from triforce_cli.documents import Document
from triforce_cli.ground.text import line_text
from triforce_cli.prompts.conversation import Conversation
from triforce_cli.prompts.guards import Guards
from triforce_cli.prompts.messages import Messages

MARK = "\ud800"  # half a surrogate pair, which no text contains: conversation.py refuses it
_ANY = "A"  # an unknown question; some templates leave empty messages out
_MARKS = re.compile(f"{MARK}([0-9]+){MARK}")
_EDITS: tuple[Callable[[str], str], ...] = (str, str.strip, str.lstrip, str.rstrip)  # templates' changes of texts

Render = Callable[[Sequence[Mapping[str, object]]], str]


@dataclass(frozen=True)
class Piece:
    """A stretch of text between two cuts, or a reply as its tokens.

    turn: the turn it belongs to, counting from 0; the text before a question belongs to the question's turn. until: the
    text that follows, as far as it is certain or at least likely.
    """

    turn: int
    text: str = ""
    until: str = ""
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Message:
    """A message: `lead` (documents) and `text`, guarded; a mark replaces `text` alone. given: all fields, guarded, of a
    message from the API; content: None if it has none."""

    role: str
    turn: int
    text: str
    lead: str = ""
    tokens: tuple[int, ...] = ()
    given: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        """True for a reply whose tokens are not known."""
        return self.role == "assistant" and not self.tokens and self.text != ""


@dataclass(frozen=True)
class Script:
    """Messages and the template's text around them: literals[0], said[0], literals[1], ..., literals[-1].

    said: the messages that are cut out, the last of them the open question, if there is one.
    """

    said: tuple[_Message, ...]
    literals: tuple[str, ...]
    whole: bool

    def pieces(self, special: Mapping[str, int]) -> Iterator[Piece]:
        """Yield the pieces in order; the last one is the open question and the text after it, up to the reply.

        special: strings and ids of special tokens. A special token at the end of a reply is kept if the template
        continues with it, otherwise left out.
        """
        text, turn = self.literals[0], 0
        for message, literal in zip(self.said, self._literals_after(), strict=True):
            if message.role == "user":
                # Most tokenizers merge a space with the next word, and white space with more white space.
                stem = text.rstrip(None if message.text[:1].isspace() else " ")
                space = text[len(stem) :]
                turn = message.turn
                yield Piece(turn, stem, until=space + "A")
                text = space + message.text + literal
            else:
                yield Piece(turn, text)
                tokens, text = _close(message.tokens, literal, special)
                yield Piece(turn, tokens=tokens)
        yield Piece(turn, text)

    def _literals_after(self) -> list[str]:
        """The literal after each message. White space at the end of the literal before a reply is as in the reply's
        prompt: some templates write a space there only if the reply is known."""
        ready = self.literals[-1]
        literals = list(self.literals[1:])
        for i, following in enumerate(self.said[1:]):
            if following.role == "assistant" and literals[i].rstrip() == ready.rstrip():
                literals[i] = ready
        return literals


def _close(tokens: tuple[int, ...], literal: str, special: Mapping[str, int]) -> tuple[tuple[int, ...], str]:
    """(the reply's tokens without an end token, the text after them, which begins with that token's string if the
    template writes it)."""
    end = next((string for string, token in special.items() if tokens and token == tokens[-1]), None)
    if end is None:
        return tokens, literal
    return tokens[:-1], literal.lstrip() if literal.lstrip().startswith(end) else literal


def write(conversation: Conversation, render: Render, guards: Guards) -> Script:
    """The script of `conversation`, up to where the reply to its question begins; without a question, to any question.

    Raises the errors of `render`, and UsageError if the template leaves a message out. Without a question, earlier
    turns may be left out: whether that matters depends on the next question.
    """
    writer, lost = _Writer(tuple(_messages(conversation, guards)), render).complete()
    script = writer.script()
    for message in lost:
        _check_written(message, conversation)
    return script


def write_messages(messages: Messages, render: Render, guards: Guards) -> tuple[str, str]:
    """(the template's text of `messages`, the part of it after the last message). The text is one piece: messages of
    the API have no known tokens. Raises the errors of `render`, and UsageError if the template leaves a message out."""
    writer, lost = _Writer(tuple(_plain(messages, guards)), render).complete()
    text = writer.written()
    if told := [message for message in lost if message.role != "assistant"]:
        number = next(number for number, each in enumerate(writer.messages, start=1) if each is told[0])
        raise UsageError(
            f"the chat template leaves message {number}, of the role {told[0].role}, out, or a part of it; say it in "
            "another message, or choose another model"
        )
    return text, writer.behind_the_last()


def _check_written(lost: _Message, conversation: Conversation) -> None:
    remedy = "choose another template (--template)"
    if lost.role == "system":
        remedy = f"clear it (/system), say it in the first message, or {remedy}"
        raise UsageError(f"the chat template leaves the system message out; {remedy}")
    if lost.turn == len(conversation.turns):
        raise UsageError(f"the chat template leaves the message out, or a part of it; {remedy}")
    if conversation.question is not None:
        what = "the reply to message" if lost.role == "assistant" else "message"
        remedy = f"/clear begins a new conversation, or {remedy}"
        raise UsageError(f"the chat template leaves {what} {lost.turn + 1} out, or a part of it; {remedy}")


def block(document: Document) -> str:
    """The text of a document in a message, before the question."""
    end = "" if document.text.endswith("\n") else "\n"
    return f"[file: {line_text(document.name)}]\n{document.text}{end}[end of file]\n\n"


def _messages(conversation: Conversation, guards: Guards) -> Iterator[_Message]:
    def question(turn: int, documents: Sequence[Document], text: str) -> _Message:
        return _Message("user", turn, guards.people(text), guards.people("".join(map(block, documents))))

    if conversation.system:
        yield _Message("system", 0, guards.people(conversation.system))
    for i, turn in enumerate(conversation.turns):
        yield question(i, turn.documents, turn.user)
        yield _Message("assistant", i, guards.model(turn.reply), tokens=turn.reply_tokens)
    asked = _ANY if conversation.question is None else conversation.question
    yield question(len(conversation.turns), conversation.pending_documents, asked)


def _plain(messages: Messages, guards: Guards) -> Iterator[_Message]:
    for message in messages.said:
        guard = guards.model if message["role"] == "assistant" else guards.people
        given = {guard(name): guard.all_in(value) for name, value in message.items()}
        yield _Message(str(given["role"]), 0, str(given["content"] or ""), given=given)


@dataclass(frozen=True)
class _Writer:
    """Renders the same messages with marks in place of some of them.

    in_parts: roles whose text the template gets as a list of parts, for templates that also take images.
    """

    messages: tuple[_Message, ...]
    render: Render
    in_parts: frozenset[str] = frozenset()

    def complete(self) -> tuple[_Writer, tuple[_Message, ...]]:
        """(this writer, or one with texts in parts if the template then loses fewer messages; the messages lost even
        so)."""
        lost = self.lost()
        if not lost:
            return self, lost
        in_parts = replace(self, in_parts=frozenset(message.role for message in lost))
        return min((self, lost), (in_parts, in_parts.lost()), key=lambda found: len(found[1]))

    def written(self) -> str:
        """The template's text of the messages."""
        return self._render(())

    def behind_the_last(self) -> str:
        """The template's text after the last message; "" if it cannot be located."""
        last = len(self.messages) - 1
        parts = self._render((last,)).rsplit(f"{MARK}{last}{MARK}", 1)
        return parts[1] if len(parts) == 2 else ""

    def lost(self) -> tuple[_Message, ...]:
        """The messages that the template leaves out or cuts; all if it refuses them.

        A template may change a text and strip its white space, but must keep its ends, which are marked by numbers.
        Only replies may lose their beginning: thoughts are not part of the conversation.
        """
        texts = [message.lead + message.text for message in self.messages]
        number, width = _number_outside(texts), len(str(len(texts)))
        begins, ends = ([f"{number}{side}{i:0{width}}" for i in range(len(texts))] for side in (1, 2))
        try:
            written = self._write(map("".join, zip(begins, texts, ends, strict=True)))
        except UsageError:
            return self.messages
        found = set(re.findall(rf"(?=({number}[12][0-9]{{{width}}}))", written))
        return tuple(
            message
            for message, begin, text, end in zip(self.messages, begins, texts, ends, strict=True)
            if text.strip() and not (end in found and (begin in found or message.role == "assistant"))
        )

    def script(self) -> Script:
        real = self.written()
        said = [i for i, message in enumerate(self.messages) if message.role != "system" and not message.is_text]
        found = self._cut(said, real)
        if found is None:
            said = [i for i in said if self.messages[i].role == "user" or self._cut([i], real) is not None]
            found = self._cut(said, real)
        return found or replace(self._cut(said[-1:], real) or Script((), (real,), True), whole=True)

    def _cut(self, marked: Sequence[int], real: str) -> Script | None:
        """The script with `marked` messages cut out, with the template's edit of their texts; None if no known edit
        gives `real`, the template's text of the messages."""
        parts = _MARKS.split(self._render(marked))
        literals = parts[::2]
        if [int(number) for number in parts[1::2]] != list(marked):
            return None
        for edit in _EDITS:
            said = tuple(replace(self.messages[i], text=edit(self.messages[i].text)) for i in marked)
            if real == "".join(_alternating(literals, iter([message.text for message in said]))):
                return Script(said, tuple(literals), whole=False)
        return None

    def _render(self, marked: Collection[int]) -> str:
        return self._write(
            message.lead + (f"{MARK}{i}{MARK}" if i in marked else message.text)
            for i, message in enumerate(self.messages)
        )

    def _write(self, texts: Iterable[str]) -> str:
        """The template's text of the messages with these contents."""
        return self.render(
            [
                {**message.given, "role": message.role, "content": self._content(message, text)}
                for message, text in zip(self.messages, texts, strict=True)
            ]
        )

    def _content(self, message: _Message, text: str) -> object:
        if message.given.get("content", text) is None:
            return None
        return [{"type": "text", "text": text}] if message.role in self.in_parts else text


def _number_outside(texts: Sequence[str]) -> str:
    """A number of ten digits that is in none of the texts. It is drawn: a text can hold many numbers in a row."""
    drawn = iter(lambda: str(10**9 + secrets.randbelow(9 * 10**9)), "")
    return next(number for number in drawn if not any(number in text for text in texts))


def _alternating(literals: Sequence[str], texts: Iterator[str]) -> Iterator[str]:
    for literal, text in zip(literals, (*texts, ""), strict=True):
        yield literal
        yield text
