"""Thoughts: a model's reasoning before its reply, between marks of its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

Thinking = Literal["show", "hide", "off"]
# Of a reply: undecided, within a message's header, within its thoughts, or after them.
State = Literal["start", "header", "thought", "said"]
NAMES: tuple[Thinking, ...] = ("show", "hide", "off")
_GAP = "\n\n"  # between texts of several messages
_BLOCK = 1 << 16  # characters that are searched for marks at a time: what follows a mark is copied
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates


@dataclass(frozen=True)
class Marks:
    """The marks that open and close thoughts at the beginning of a reply; the text after them is the answer.

    has_headers: the answer has a header, too, before which nothing is said, and earlier thoughts are not given to the
    template. first: the state before a reply. ends: marks that end a reply, if not those that the template writes after
    one.
    """

    open: str
    close: str
    has_headers: ClassVar[bool] = False
    first: ClassVar[State] = "start"
    ends: ClassVar[tuple[str, ...]] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The marks that count only as tokens if the vocabulary has them."""
        return self.open, self.close

    @property
    def closings(self) -> Mapping[State, tuple[str, ...]]:
        """The marks that end the text in a state; a state without any lasts until the end of the reply."""
        return {"thought": (self.close,)}

    def is_in(self, template: str) -> bool:
        return self.close in template

    def is_cut_header(self, text: str) -> bool:
        """True if the text at the end of a reply is the beginning of a header."""
        return False

    def follows(self, state: State, text: str) -> tuple[State, str]:
        """(the state after `text` in a state that its mark ended, text that the answer has before what follows)."""
        return "said", ""

    def closes(self, *, may_call: bool) -> str:
        """The text that closes thoughts past their limit. may_call: a call may follow, not only an answer."""
        return f"\n{self.close}\n\n"

    def none(self, *, may_call: bool) -> str:
        """The beginning of a reply without thoughts, as Qwen3's template writes it. may_call: see `closes`."""
        return f"{self.open}\n\n{self.close}\n\n"

    def state(self, written: str) -> State:
        """The state of thoughts after the template's text before a reply: "start" if it has neither opened nor closed
        them."""
        opened, closed = written.rfind(self.open), written.rfind(self.close)
        last, state = (self.open, "thought") if opened > closed else (self.close, "said")
        after = written[max(opened, closed) + len(last) :]
        return cast(State, state) if max(opened, closed) >= 0 and not after.strip() else "start"

    def header_in(self, written: str) -> str:
        """The header of a reply at the end of the template's text before it; "" for none."""
        return ""

    def are_in(self, begin: str) -> bool:
        """True if the given beginning of a reply opens or closes thoughts."""
        return begin.lstrip().startswith(self.open) or self.close in begin


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_OF_CHANNEL = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True)
class Channels(Marks):
    """The marks of a reply in OpenAI's harmony format: messages, each with a header that names its channel, and ends of
    the reply that are not the end of a message.

    The channel analysis has thoughts, any other one text of the answer. A message with a recipient is a tool call,
    whatever its channel, and text that begins with the recipient: to=functions.NAME {...}, also where the header leaves
    out "functions.".
    """

    open: str = f"{_CHANNEL}analysis{_MESSAGE}"
    close: str = "<|end|>"
    has_headers: ClassVar[bool] = True
    first: ClassVar[State] = "header"
    ends: ClassVar[tuple[str, ...]] = ("<|return|>", "<|call|>")

    @property
    def tokens(self) -> tuple[str, ...]:
        return _START, _CHANNEL, _MESSAGE, self.close

    @property
    def closings(self) -> Mapping[State, tuple[str, ...]]:
        return {"header": (_MESSAGE,), "thought": self.tokens, "said": self.tokens}

    def is_in(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def is_cut_header(self, text: str) -> bool:
        return any(mark in text for mark in self.tokens)

    def follows(self, state: State, text: str) -> tuple[State, str]:
        if state != "header":
            return "header", ""
        channel, recipient = _OF_CHANNEL.search(text), _RECIPIENT.search(text)
        if recipient is not None:
            return "said", f"to=functions.{recipient[1]} "
        return "thought" if channel is not None and channel[1] == "analysis" else "said", ""

    def closes(self, *, may_call: bool) -> str:
        return f"{self.close}{_START}assistant{'' if may_call else _FINAL}"

    def none(self, *, may_call: bool) -> str:
        """The beginning of a reply without thoughts: the header of its answer, or empty thoughts if the model is to
        choose between an answer and a call."""
        return f"{self.open}{self.closes(may_call=True)}" if may_call else _FINAL

    def state(self, written: str) -> State:
        header = self.header_in(written)
        return self.follows("header", header)[0] if header else "start"

    def header_in(self, written: str) -> str:
        _, mark, header = written.rpartition(_START)[2].partition(_CHANNEL)
        return mark + header if header.rstrip().endswith(_MESSAGE) else ""

    def are_in(self, begin: str) -> bool:
        return begin.lstrip().startswith(_CHANNEL)


_FINAL = f"{_CHANNEL}final{_MESSAGE}"
_KNOWN = (
    Channels(),
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    *(Marks(f"<{name}>", f"</{name}>") for name in ("seed:think", "mm:think", "thinking")),
)


def marks_of(template: str) -> Marks | None:
    """The marks in a chat template; None if it has none of the known ones."""
    return next((marks for marks in _KNOWN if marks.is_in(template)), None)


def known(open_: str, close: str) -> Marks:
    """The marks that open and close thoughts with these."""
    return next((marks for marks in _KNOWN if (marks.open, marks.close) == (open_, close)), Marks(open_, close))


def switched_off(render: Callable[..., str]) -> dict[str, bool]:
    """The variables, all False, that turn off a template's thoughts: its text depends on them. render: a function that
    renders a conversation with such variables."""
    return {name: False for name in _SWITCHES if render(**{name: True}) != render(**{name: False})}


@dataclass(frozen=True)
class Piece:
    """A stretch of a reply. is_thought: within its thoughts."""

    text: str
    is_thought: bool


class Splitter:
    """Splits a reply into thoughts and the text of its answer, piece by piece. Marks and headers with the white space
    around them are removed; a blank line stands between texts of several messages."""

    def __init__(
        self,
        marks: Marks | None,
        *,
        begun: bool = False,
        begin: str = "",
        named: Collection[str] = (),
        trims: bool = True,
    ) -> None:
        """begun: the prompt has opened thoughts; a second opening mark in the reply is accepted. begin: the beginning
        of the reply, before the first piece. named: marks that count only as a single token. trims: remove the reply's
        leading white space."""
        self._marks, self._named = marks, named
        self._before: State = "thought" if begun else "said"  # the state if the reply opens no thoughts
        self.state: State = "said" if marks is None else marks.first
        self._held, self._num_past = begin, 0  # characters of the reply before the held ones
        self._num_begin, self._said_from = (
            len(begin),
            0,
        )  # said_from: the character at which the text in this state begins
        self._places = {found.start() for name in named for found in re.finditer(re.escape(name), begin)}
        self._trims = trims and not begin  # whether to remove the white space that follows
        self._is_new, self._shown = False, frozenset[bool]()  # behind a mark; kinds of text so far, True: thoughts
        self._has_header = False
        self._tell()

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet if the text so far is an answer: also without a header where one is due, and in
        white space behind a mark, which is removed."""
        is_space = self.state == "said" and self._is_new and self._trims
        return self.state == "start" or is_space or (self.state == "header" and not self._has_header)

    @property
    def answer_from(self) -> int | None:
        """The index, in all pushed text, of the answer's text that it ends with; None if it ends with another one."""
        return max(self._said_from - self._num_begin, 0) if self.state == "said" else None

    def push(self, text: str, named: Iterable[int] = ()) -> list[Piece]:
        """The pieces that are certain after this text. named: indices in it of tokens that are marks."""
        self._places |= {self._num_past + len(self._held) + place for place in named}
        coming, self._held = self._held + text, ""
        return [
            piece
            for start in range(0, len(coming) or 1, _BLOCK)
            for piece in self._push(coming[start : start + _BLOCK])
        ]

    def _push(self, text: str) -> list[Piece]:
        self._held += text
        self._tell()
        parts: list[Piece] = []
        while self._marks is not None and (found := self._found()) is not None:
            parts += self._close(self._marks, *found)
        return parts if self.state in ("start", "header") else parts + self._show(self._certain())

    def flush(self) -> list[Piece]:
        """The text held back, at the end of the reply. A header that was cut is none; a reply without any is the
        answer."""
        if self.state == "header" and self._marks is not None and self._marks.is_cut_header(self._held):
            return []
        self.state = {"start": self._before, "header": "said"}.get(self.state, self.state)
        return self._show(len(self._held))

    def _tell(self) -> None:
        """Decide whether the reply begins with thoughts, as soon as that is certain."""
        if self._marks is None or self.state != "start":
            return
        mark, begin = self._marks.open, self._held.lstrip()
        if begin.startswith(mark) and self._is_mark(mark, len(self._held) - len(begin)):
            self._taken(len(self._held) - len(begin) + len(mark))
            self.state = "thought"
        elif begin.startswith(mark) or not mark.startswith(begin):
            self.state = self._before
        self._trims |= self.state == "thought"

    def _close(self, marks: Marks, at: int, mark: str) -> list[Piece]:
        """End the text in this state at `at`, where `mark` is, which is a part of a header that follows."""
        text, is_thought = self._taken(at), self.state == "thought"
        shown = "" if self.state == "header" else text.rstrip() if is_thought else text
        parts = self._out(shown, is_thought=is_thought)
        self.state, lead = marks.follows(self.state, text)
        self._taken(0 if self.state == "header" else len(mark))
        self._said_from = self._num_past
        self._trims = self._is_new = self._has_header = True
        return parts + self._out(lead, is_thought=False)

    def _certain(self) -> int:
        """The number of held characters that are certain to be text in this state."""
        text = self._held[: len(self._held) - max((overlap(self._held, mark) for mark in self._closings()), default=0)]
        return len(text.rstrip() if self.state == "thought" else text)

    def _closings(self) -> tuple[str, ...]:
        """The marks that end the text in this state."""
        return () if self._marks is None else self._marks.closings.get(self.state, ())

    def _found(self) -> tuple[int, str] | None:
        """(index, mark) of the first mark in the held text that ends this state."""
        if not (marks := self._closings()):
            return None
        found = ((each.start(), each[0]) for each in re.finditer("|".join(map(re.escape, marks)), self._held))
        return next(((at, mark) for at, mark in found if self._is_mark(mark, at)), None)

    def _is_mark(self, mark: str, at: int) -> bool:
        return mark not in self._named or self._num_past + at in self._places

    def _taken(self, count: int) -> str:
        """Remove the first characters of the held text, and return them."""
        taken, self._held = self._held[:count], self._held[count:]
        self._num_past += count
        return taken

    def _show(self, count: int) -> list[Piece]:
        """The first characters of the held text, as text in this state."""
        return self._out(self._taken(count), is_thought=self.state == "thought")

    def _out(self, text: str, *, is_thought: bool) -> list[Piece]:
        kept = text.lstrip() if self._trims else text
        if self._is_new:
            self._said_from += len(text) - len(kept)
        if not (text := kept):
            return []
        gap = _GAP if self._is_new and is_thought in self._shown else ""
        self._trims = self._is_new = False
        self._shown |= {is_thought}
        return [Piece(gap + text, is_thought)]


def without_thoughts(reply: str, marks: Marks | None, *, begun: bool) -> str:
    """The text of a whole reply in a conversation after its thoughts. begun: the prompt has opened them."""
    if marks is not None and marks.has_headers:
        return reply  # it was kept without
    splitter = Splitter(marks, begun=begun)
    return "".join(piece.text for piece in (*splitter.push(reply), *splitter.flush()) if not piece.is_thought)


def overlap(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may begin `mark`."""
    return next((count for count in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-count:])), 0)
