"""Conversations as tokens: what the model reads before it replies, such that little changes from turn to turn.

A reply stays the tokens that the model gave, never encoded again, and what was encoded once is cut at the same places
ever after: where a question or a reply begins. So the tokens of a conversation begin with those of the conversation
before it, as far as the template writes earlier turns as it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

from offload.errors import ModelError, TriforceError, UsageError
from triforce_cli.answering.arguments import Tools
from triforce_cli.answering.calls import Calls
from triforce_cli.answering.request import Prompt
from triforce_cli.answering.thoughts import State, marks_of, switched_off
from triforce_cli.chat.conversation import Conversation, Turn
from triforce_cli.chat.guards import CUT, Guard, Guards
from triforce_cli.chat.messages import Messages
from triforce_cli.chat.script import Piece, Script, block, write, write_messages
from triforce_cli.chat.steps import TooManySteps, limited_steps
from triforce_cli.chat.templates import OWN

if TYPE_CHECKING:
    from offload.decode.tokenizer import Tokenizer

AUTO = "auto"
NAMES = (AUTO, *OWN)
_CACHED_PIECES = 512
_MOST_SAID = 400  # characters of what a template says when it refuses


@dataclass(frozen=True)
class Part:
    """Tokens that a part of a conversation takes. The parts of a conversation add up to its closing tokens.

    kind "turn": a question, its reply and what the template writes around them, without documents; number: of the turn,
    from 1, also of a document's turn; the turn after the last one holds what is pending. kind "template": the beginning
    of the next message. kind "conversation": all of it, where a template cannot be taken apart.
    """

    kind: Literal["system", "document", "turn", "template", "conversation"]
    num_tokens: int
    number: int = 0
    name: str = ""


class ChatFormat:
    """A chat template with the tokenizer that it writes for.

    end_tokens, stops: what ends a reply besides the model's own end tokens; stops are looked for in its text.
    notice: what to tell the person at the terminal, if anything.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str = AUTO,
        *,
        variables: Mapping[str, Any] | None = None,
        thinks: bool = True,
    ) -> None:
        """name: one of NAMES; "auto" takes the tokenizer's own template, and the plain format where it has none.
        variables: of the template. thinks: False where a model that writes thoughts is to write none."""
        if name not in NAMES:
            raise UsageError(f"there is no chat template {name!r}; choose one of {', '.join(NAMES)}")
        own = tokenizer.chat_template if name == AUTO else None
        self.name = AUTO if own is not None else name if name != AUTO else "plain"
        self.notice = _no_template(tokenizer.named_templates) if name == AUTO and own is None else ""
        self.tokenizer = tokenizer
        self.template = own if own is not None else OWN[self.name]
        self.marks = marks_of(self.template)
        self._start = tokenizer.start_tokens() if own is None else []
        self._special = tokenizer.added_tokens(special=True)
        self._guards = Guards(Guard(self._controls()), Guard(self._special))
        self._tools = (variables or {}).get("tools")
        self._variables = self._guarded(variables or {})
        self._marking = self._tokens_of_marks()
        off = {} if thinks or self.marks is None else switched_off(self._written)
        self._variables = off | self._variables
        self._thinks, self._writes_none = thinks, not thinks and not off
        self._encode = lru_cache(_CACHED_PIECES)(self._encode_piece)
        self.end_tokens, self.stops = self._ends()

    def prompt(self, conversation: Conversation, begin: str = "") -> Prompt:
        """The prompt of the next reply: the whole conversation with its open question, and what the reply begins with.
        That is of what the reply says, unless it has marks of thoughts: thoughts that the template has opened are
        closed before it."""
        if conversation.question is None:
            raise UsageError("there is no message to answer")
        script = self._script(conversation)
        tokens = self._tokens(script.pieces(self._special))
        prompt = self._prompt(tokens, script.literals[-1], begin, self._tools)
        return replace(prompt, documents=conversation.documents)

    def prompt_of_messages(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> Prompt:
        """The same behind messages in any order that the template takes. variables: of the template, for them
        alone."""
        given = variables or {}
        all_variables = self._variables | self._guarded(given)
        render = partial(self._rendered, variables=all_variables, refusal=_refusal_of_messages)
        found = None
        with suppress(UsageError):
            found = write_messages(messages, render, self._guards)
        text, written = found or write_messages(messages.with_older_roles(), render, self._guards)
        tools, tokens = given.get("tools", self._tools), self._tokens([Piece(0, text)])
        return replace(self._prompt(tokens, written, messages.begin, tools), documents=messages.documents)

    def _guarded(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Of the template, as what a person wrote."""
        return {name: self._guards.people.all_in(value) for name, value in variables.items()}

    def _prompt(self, tokens: list[int], written: str, begin: str, tools: Tools | None) -> Prompt:
        """written: what the template has written behind the last message. tools: that it has offered."""
        calls = None if tools is None else Calls(tools, self.template)
        state, closed = self._state(written, begin)
        return Prompt(
            [*tokens, *(self.tokenizer.encode_piece(closed + begin) if closed + begin else [])],
            is_chat=True,
            begin=begin,
            marks=None if state == "said" else self.marks,
            begun=state == "thought",
            named=self._marking if calls is None else self._marking | self._named(calls.marks),
            calls=calls,
            end_tokens=self.end_tokens,
            stops=self.stops,
        )

    def _state(self, written: str, begin: str) -> tuple[State, str]:
        """Of a reply's thoughts, and what closes them, or says that there are none, before `begin`."""
        if self.marks is None:
            return "said", ""
        state = self.marks.state(written)
        if self.marks.are_in(begin) and self._thinks:
            return "start" if state == "said" else state, ""
        if state == "thought" and (begin or not self._thinks):
            return "said", self.marks.end
        return ("said", self.marks.none) if state == "start" and self._writes_none else (state, "")

    def closing_tokens(self, conversation: Conversation) -> list[int]:
        """Everything up to the next question: what its `prompt` begins with, whatever will be asked, unless that
        begins with white space."""
        script = self._script(replace(conversation, question=None))
        return self._tokens(list(script.pieces(self._special))[:-1])

    def spoken(self, tokens: Sequence[int], reply: str) -> list[int]:
        """The tokens of a reply that was shown, without those of a stop string or of text that was held back.

        White space that comes before those goes with them: the template writes its own.
        """
        kept, reply = list(tokens), reply.strip()
        if self._text(kept).strip() != reply:
            while kept and (not reply or len(self._text(kept).lstrip()) > len(reply)):
                kept.pop()
        return kept

    def _text(self, tokens: Sequence[int]) -> str:
        """Of a reply, as it is shown: with marks of thoughts that are special tokens."""
        if not set(self._marking) & set(tokens):
            return self.tokenizer.decode(tokens)
        from offload.decode.tokenizer import Detokenizer

        written = Detokenizer(self.tokenizer, (), named=self._marking)
        return "".join(map(written.push, tokens)) + written.flush()

    def adopted(self, conversation: Conversation) -> Conversation:
        """A conversation that was read from a file, without the tokens of replies that another model gave."""
        turns = (
            turn if self._spell(turn.reply_tokens, turn.reply) else replace(turn, reply_tokens=())
            for turn in conversation.turns
        )
        return replace(conversation, turns=tuple(turns))

    def parts(self, conversation: Conversation) -> tuple[Part, ...]:
        """The parts of the conversation in order, each with the tokens that dropping it would free, but for a few."""
        script = self._script(replace(conversation, question=None))
        pieces = list(script.pieces(self._special))[:-1]
        if script.whole:
            return (Part("conversation", len(self._tokens(pieces))),)
        left = [0] * (len(conversation.turns) + 1)
        for turn, tokens in self._encoded(pieces):
            left[turn] += len(tokens)
        parts = []
        if conversation.system:
            parts.append(Part("system", len(self._own(conversation.system))))
            left[0] -= parts[0].num_tokens
        said = (*(turn.documents for turn in conversation.turns), conversation.pending_documents)
        for i, documents in enumerate(said):
            own = [Part("document", len(self._own(block(each))), i + 1, each.name) for each in documents]
            left[i] -= sum(part.num_tokens for part in own)
            parts += [*own, Part("turn" if i < len(conversation.turns) else "template", left[i], i + 1)]
        return tuple(parts)

    def _written(self, **variables: object) -> str:
        """What the template writes around a question; "" where it refuses one."""
        with suppress(TriforceError):
            return "".join(self._script(Conversation(question="A"), variables).literals)
        return ""

    def _script(self, conversation: Conversation, variables: Mapping[str, object] | None = None) -> Script:
        date = {"date_string": conversation.date} if conversation.date else {}
        given = date | self._variables | dict(variables or {})
        render = partial(self._rendered, variables=given, refusal=partial(_refusal, conversation))
        return write(conversation, render, self._guards)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
        refusal: Callable[[Exception], str],
    ) -> str:
        """variables: all that the template has. refusal: what to say where it refuses. ModelError, UsageError."""
        try:
            with limited_steps():
                return self.tokenizer.render_chat(messages, self.template, **variables)
        except (TooManySteps, ModelError) as error:
            raise ModelError(f"the model's chat template {error}; {_REMEDY}") from error
        except Exception as error:  # the template raises whatever it likes
            raise UsageError(refusal(error)) from error

    def _tokens(self, pieces: Iterable[Piece]) -> list[int]:
        return [token for _, tokens in self._encoded(pieces) for token in tokens]

    def _encoded(self, pieces: Iterable[Piece]) -> Iterator[tuple[int, Sequence[int]]]:
        """(turn, tokens) of each piece."""
        yield 0, self._start
        first = True
        for piece in pieces:
            yield piece.turn, piece.tokens or self._encode(piece.text, first, piece.until)
            first = first and not piece.text

    def _encode_piece(self, text: str, first: bool, until: str) -> tuple[int, ...]:
        *parts, last = text.split(CUT)
        tokens: list[int] = []
        for part in parts:
            tokens += self.tokenizer.encode_piece(part, first=first)
            first = False
        return (*tokens, *self.tokenizer.encode_piece(last, first=first, until=until))

    def _own(self, text: str) -> tuple[int, ...]:
        """Tokens of somebody's text by itself."""
        return self._encode(self._guards.people(text), False, "")

    def _spell(self, tokens: Sequence[int], reply: str) -> bool:
        """Are they this tokenizer's tokens of the reply?"""
        return max(tokens, default=0) < len(self.tokenizer) and self._text(tokens).strip() == reply.strip()

    def _tokens_of_marks(self) -> dict[int, str]:
        """Marks of thoughts that are a token each, by their ids."""
        return self._named(() if self.marks is None else (self.marks.open, self.marks.close))

    def _named(self, marks: Collection[str]) -> dict[int, str]:
        """Those of `marks` that are a token each, special or not, by their ids."""
        added = self.tokenizer.added_tokens(special=False)
        return {added[mark]: mark for mark in marks if mark in added}

    def _controls(self) -> set[str]:
        """Strings that must not become one token if a person wrote them: special tokens, and those of the template.

        Templates write white space too; it ends nobody's turn.
        """
        written = {string for string in self.tokenizer.added_tokens(special=False) if string in self.template}
        return {string for string in (*self._special, *written) if not string.isspace()}

    def _ends(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """The end of a reply in the template: special tokens, or else the text that follows it."""
        script = self._script(Conversation(turns=(Turn("A", (), "A", (0,), True),)))
        after = script.literals[2] if len(script.said) == 3 else ""
        text = after.lstrip()
        end = frozenset(self.tokenizer.encode_piece(text)[:1])
        if end & set(self._special.values()):
            return end, ()
        line_break = "\n" if "\n" in after[: len(after) - len(text)] else ""
        return frozenset(), (line_break + text.splitlines()[0].rstrip(),) if text else ()


_REMEDY = f"choose another template (--template {'|'.join(OWN)})"


def _no_template(named: Sequence[str]) -> str:
    found = f"no default chat template, only others ({', '.join(named)})" if named else "no chat template"
    return (
        f"the model has {found}: messages are written as a plain dialogue (User: ... Assistant: ...); "
        f"--template {'|'.join(OWN)} chooses another format"
    )


def _refusal_of_messages(error: Exception) -> str:
    return f"the model's chat template refuses these messages ({_said(error)})"


def _refusal(conversation: Conversation, error: Exception) -> str:
    again = conversation.turns and conversation.question is not None
    remedy = f"begin a new conversation (/clear), or {_REMEDY}" if again else _REMEDY
    if conversation.system:
        remedy = f"it may have no place for a system message: clear it (/system), or {remedy}"
    return f"the model's chat template refuses this conversation ({_said(error)}); {remedy}"


def _said(error: Exception) -> str:
    """What a template says, as far as a line has room for it; an error without words says what it is."""
    said = str(error) or type(error).__name__
    return said if len(said) <= _MOST_SAID else said[:_MOST_SAID] + " ..."
