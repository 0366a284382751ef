"""Conversations as tokens: the prompt of the next reply, stable from turn to turn so that KV rows can be reused.

A reply keeps the tokens that the model generated and is never encoded again. All other text is always split at the same
places: where a question or a reply begins. So the tokens of a conversation begin with those of the conversation
before it, as far as the template writes earlier turns as it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

from offload.errors import ModelError, TriforceError, UsageError
from triforce_cli.answering.request import Prompt
from triforce_cli.answering.thoughts import State, marks_of, switched_off
from triforce_cli.prompts.adaptations import adaptations
from triforce_cli.prompts.conversation import Conversation, Turn
from triforce_cli.prompts.guards import CUT, Guard, Guards
from triforce_cli.prompts.messages import Messages
from triforce_cli.prompts.refusals import REMEDY, no_template, refusal, refusal_of_messages
from triforce_cli.prompts.script import Piece, Render, Script, block, write, write_messages
from triforce_cli.prompts.steps import TooManySteps, TooMuchWork, limited_steps
from triforce_cli.prompts.templates import OWN
from triforce_cli.tools.arguments import Tools
from triforce_cli.tools.calls import Calls

if TYPE_CHECKING:
    from offload.text.tokenizer import Tokenizer
    from triforce_cli.answering.answer import Answer

AUTO = "auto"
NAMES = (AUTO, *OWN)
_CACHED_PIECES = 512


@dataclass(frozen=True)
class Part:
    """The number of tokens of one part of a conversation. The parts add up to its closing tokens.

    kind "turn": a question, its reply and the template's text around them, without documents; number: of the turn, from
    1, also for a document in it; the turn after the last one has the pending documents. kind "template": the beginning
    of the next message. kind "conversation": all of it, if the template's text cannot be split into parts.
    """

    kind: Literal["system", "document", "turn", "template", "conversation"]
    num_tokens: int
    number: int = 0
    name: str = ""


class ChatFormat:
    """A chat template and its tokenizer.

    end_tokens, stops: the ends of a reply besides the model's own end tokens; stops are searched for in its text.
    notice: a note for the person at the terminal, or "".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str = AUTO,
        *,
        variables: Mapping[str, Any] | None = None,
        thinks: bool = True,
        may_call: bool = True,
    ) -> None:
        """name: one of NAMES; "auto" is the tokenizer's own template, or the plain format if it has none. variables: of
        the template. thinks: False turns off a model's thoughts. may_call: False for replies that are no tool calls,
        since they have to follow a constraint."""
        if name not in NAMES:
            raise UsageError(f"there is no chat template {name!r}; choose one of {', '.join(NAMES)}")
        own = tokenizer.chat_template if name == AUTO else None
        self.name = AUTO if own is not None else name if name != AUTO else "plain"
        self.notice = no_template(tokenizer.named_templates) if name == AUTO and own is None else ""
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
        self._thinks, self._writes_none, self._may_call = thinks, not thinks and not off, may_call
        self._encode = lru_cache(_CACHED_PIECES)(self._encode_piece)
        self.end_tokens, self.stops = self._ends()

    def prompt(self, conversation: Conversation, begin: str = "") -> Prompt:
        """The prompt of the next reply: the whole conversation with its open question, and the beginning of the reply.

        begin: text after the thoughts, unless it has marks of thoughts itself: thoughts that the template has opened
        are closed before it.
        """
        if conversation.question is None:
            raise UsageError("there is no message to answer")
        script = self._script(conversation)
        tokens = self._tokens(script.pieces(self._special))
        prompt = self._prompt(tokens, script.literals[-1], begin, self._tools)
        return replace(prompt, documents=conversation.documents)

    def prompt_of_messages(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> Prompt:
        """The prompt of the reply to messages in any order that the template accepts. variables: of the template, for
        this prompt alone."""
        self.tokenizer.check(len(messages.said))  # a message has a token at least
        given = variables or {}
        all_variables = self._variables | self._guarded(given)
        render = partial(self._rendered, variables=all_variables, refusal=refusal_of_messages)
        text, written, notes = self._written_messages(messages, render)
        tools, tokens = given.get("tools", self._tools), [*self._start, *self._encode_piece(text, True, "")]
        prompt = self._prompt(tokens, written, messages.begin, tools)
        return replace(prompt, documents=messages.documents, notes=notes)

    def _written_messages(self, messages: Messages, render: Render) -> tuple[str, str, tuple[str, ...]]:
        """`write_messages` of the messages, or of an adaptation if the template refuses them, with its notes."""
        first, *others = adaptations(messages)
        try:
            return (*write_messages(first, render, self._guards), first.notes)
        except UsageError:
            for each in others:
                with suppress(UsageError):
                    return (*write_messages(each, render, self._guards), each.notes)
            raise

    def _guarded(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The template's variables, guarded like text that a person wrote."""
        return {name: self._guards.people.all_in(value) for name, value in variables.items()}

    def _prompt(self, tokens: list[int], written: str, begin: str, tools: Tools | None) -> Prompt:
        """The prompt with the reply's beginning. written: the template's text after the last message. tools: those
        offered."""
        calls = None if tools is None else Calls(tools, self.template)
        state, closed = self._state(written, begin, may_call=self._may_call and calls is not None)
        headed = self.marks if self.marks is not None and self.marks.has_headers else None
        return Prompt(
            [*tokens, *(self.tokenizer.encode_piece(closed + begin) if closed + begin else [])],
            is_chat=True,
            begin=begin if headed is None else headed.header_in(written) + closed + begin,
            marks=headed if state == "said" else self.marks,
            begun=state == "thought" and headed is None,
            named=self._marking if calls is None else self._marking | self._named(calls.marks),
            calls=calls,
            end_tokens=self.end_tokens,
            stops=self.stops,
        )

    def _state(self, written: str, begin: str, *, may_call: bool) -> tuple[State, str]:
        """(state of the reply's thoughts, text before `begin` that closes them or says that there are none). may_call:
        the reply may be a call."""
        marks = self.marks
        if marks is None:
            return "said", ""
        state = marks.state(written)
        if marks.are_in(begin) and self._thinks:
            return "start" if state == "said" else state, ""
        closed = ""
        if state == "thought" and (begin or not self._thinks):
            closed = marks.closes(may_call=may_call and not begin)
        elif state == "start" and (self._writes_none or (marks.has_headers and begin)):
            closed = marks.none(may_call=may_call and not begin)
        return "said" if closed else state, closed

    def closing_tokens(self, conversation: Conversation) -> list[int]:
        """The tokens up to the next question. Its `prompt` begins with them, whatever the question, unless that begins
        with white space."""
        script = self._script(replace(conversation, question=None))
        return self._tokens(list(script.pieces(self._special))[:-1])

    def remembered(self, answer: Answer) -> tuple[str, list[int]]:
        """(text, tokens) of a reply in a conversation: with its thoughts, unless its answer has a header of its own,
        which the template writes."""
        if self.marks is None or not self.marks.has_headers:
            return answer.written.strip(), self.spoken(answer.tokens, answer.written)
        text = answer.text.strip()
        message = self.tokenizer.added_tokens(special=False).get(self.marks.closings["header"][0])
        tokens = self.spoken(_behind(answer.tokens, message), text)
        return text, tokens if self._spell(tokens, text) else []

    def spoken(self, tokens: Sequence[int], reply: str) -> list[int]:
        """The tokens of a reply as shown, without those of a stop string or of held-back text.

        White space before them is dropped, too: the template writes its own.
        """
        kept, reply = list(tokens), reply.strip()
        if self._text(kept).strip() != reply:
            while kept and (not reply or len(self._text(kept).lstrip()) > len(reply)):
                kept.pop()
        return kept

    def _text(self, tokens: Sequence[int]) -> str:
        """The text of a reply as shown: with marks of thoughts that are special tokens."""
        if not set(self._marking) & set(tokens):
            return self.tokenizer.decode(tokens)
        from offload.text.tokenizer import Detokenizer

        written = Detokenizer(self.tokenizer, (), named=self._marking)
        return "".join(map(written.push, tokens)) + written.flush()

    def adopted(self, conversation: Conversation) -> Conversation:
        """A conversation read from a file, without the tokens of replies by another model."""
        turns = (
            turn if self._spell(turn.reply_tokens, turn.reply) else replace(turn, reply_tokens=())
            for turn in conversation.turns
        )
        return replace(conversation, turns=tuple(turns))

    def parts(self, conversation: Conversation) -> tuple[Part, ...]:
        """The parts of the conversation in order, each with the approximate number of tokens that dropping it would
        free."""
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
        """The template's text around a question; "" if it refuses one."""
        with suppress(TriforceError):
            return "".join(self._script(Conversation(question="A"), variables).literals)
        return ""

    def _script(self, conversation: Conversation, variables: Mapping[str, object] | None = None) -> Script:
        date = {"date_string": conversation.date} if conversation.date else {}
        given = date | self._variables | dict(variables or {})
        render = partial(self._rendered, variables=given, refusal=partial(refusal, conversation))
        return write(conversation, render, self._guards)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
        refusal: Callable[[Exception], str],
    ) -> str:
        """The template's text. variables: all variables of the template. refusal: the message for an error of the
        template. Raises TooMuchWork, UsageError."""
        try:
            with limited_steps():
                return self.tokenizer.render_chat(messages, self.template, **variables)
        except (TooManySteps, ModelError) as error:
            raise TooMuchWork(f"the model's chat template {error}; {REMEDY}") from error
        except RecursionError as error:
            said = "calls itself too often, or is given values nested too deep"
            raise TooMuchWork(f"the model's chat template {said}; {REMEDY}") from error
        except Exception as error:  # a template may raise any error
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
        self.tokenizer.check(len(parts))  # none of them is empty
        tokens: list[int] = []
        for part in parts:
            tokens += self.tokenizer.encode_piece(part, first=first)
            first = False
        return (*tokens, *self.tokenizer.encode_piece(last, first=first, until=until))

    def _own(self, text: str) -> tuple[int, ...]:
        """The tokens of a person's text by itself."""
        return self._encode(self._guards.people(text), False, "")

    def _spell(self, tokens: Sequence[int], reply: str) -> bool:
        """True if `tokens` are this tokenizer's tokens of the reply."""
        return max(tokens, default=0) < len(self.tokenizer) and self._text(tokens).strip() == reply.strip()

    def _tokens_of_marks(self) -> dict[int, str]:
        """The marks of thoughts that are a single token, by id."""
        return self._named(() if self.marks is None else self.marks.tokens)

    def _named(self, marks: Collection[str]) -> dict[int, str]:
        """The marks that are a single token, special or not, by id."""
        added = self.tokenizer.added_tokens(special=False)
        return {added[mark]: mark for mark in marks if mark in added}

    def _controls(self) -> set[str]:
        """Strings that must not become one token if a person wrote them: special tokens, and added tokens in the
        template.

        White space in the template is not among them: it ends no turn.
        """
        written = {string for string in self.tokenizer.added_tokens(special=False) if string in self.template}
        return {string for string in (*self._special, *written) if not string.isspace()}

    def _ends(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """The end of a reply in the template: special tokens, or else the text that follows it."""
        if self.marks is not None and self.marks.ends:
            ends = self._named(self.marks.ends)
            return frozenset(ends), tuple(mark for mark in self.marks.ends if mark not in ends.values())
        script = self._script(Conversation(turns=(Turn("A", (), "A", (0,), True),)))
        after = script.literals[2] if len(script.said) == 3 else ""
        text = after.lstrip()
        end = frozenset(self.tokenizer.encode_piece(text)[:1])
        if end & set(self._special.values()):
            return end, ()
        line_break = "\n" if "\n" in after[: len(after) - len(text)] else ""
        return frozenset(), (line_break + text.splitlines()[0].rstrip(),) if text else ()


def _behind(tokens: Sequence[int], mark: int | None) -> Sequence[int]:
    """The tokens behind the last `mark`; all if it is not there."""
    return tokens[max((i + 1 for i, token in enumerate(tokens) if token == mark), default=0) :]
