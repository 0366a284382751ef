"""Thoughts: a model's reasoning before its reply, between marks of its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, cast

Thinking = Literal["show", "hide", "off"]
State = Literal["start", "thought", "said"]  # of a reply: undecided, within its thoughts, or after them
NAMES: tuple[Thinking, ...] = ("show", "hide", "off")
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates


@dataclass(frozen=True)
class Marks:
    """The marks that open and close thoughts."""

    open: str
    close: str

    @property
    def end(self) -> str:
        """The text that closes thoughts past their limit."""
        return f"\n{self.close}\n\n"

    @property
    def none(self) -> str:
        """The beginning of a reply without thoughts, as Qwen3's template writes it."""
        return f"{self.open}\n\n{self.close}\n\n"

    def state(self, written: str) -> State:
        """The state of thoughts after the template's text before a reply: "start" if it has neither opened nor closed
        them."""
        opened, closed = written.rfind(self.open), written.rfind(self.close)
        last, state = (self.open, "thought") if opened > closed else (self.close, "said")
        after = written[max(opened, closed) + len(last) :]
        return cast(State, state) if max(opened, closed) >= 0 and not after.strip() else "start"

    def are_in(self, begin: str) -> bool:
        """True if the given beginning of a reply opens or closes thoughts."""
        return begin.lstrip().startswith(self.open) or self.close in begin


_KNOWN = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    *(Marks(f"<{name}>", f"</{name}>") for name in ("seed:think", "mm:think", "thinking")),
)


def marks_of(template: str) -> Marks | None:
    """The marks in a chat template; None if it has none of the known ones."""
    return next((marks for marks in _KNOWN if marks.close in template), None)


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
    """Splits a reply into the thoughts at its beginning and the text after them, piece by piece. Marks and the white
    space around them are removed."""

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
        self.state: State = "said" if marks is None else "start"
        self._held, self._num_past = begin, 0  # characters of the reply before the held ones
        self._places = {found.start() for name in named for found in re.finditer(re.escape(name), begin)}
        self._trims = trims and not begin  # whether to remove the white space that follows
        self._tell()

    def push(self, text: str, named: Iterable[int] = ()) -> list[Piece]:
        """The pieces that are certain after this text. named: indices in it of tokens that are marks."""
        self._places |= {self._num_past + len(self._held) + place for place in named}
        self._held += text
        self._tell()
        parts: list[Piece] = []
        if self._marks is not None and self.state == "thought":
            parts += self._think(self._marks)
        if self.state == "said":
            parts += self._out(self._taken(len(self._held)), is_thought=False)
        return parts

    def flush(self) -> list[Piece]:
        """The text held back, at the end of the reply."""
        state = self._before if self.state == "start" else self.state
        return self._out(self._taken(len(self._held)), is_thought=state == "thought")

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

    def _think(self, marks: Marks) -> list[Piece]:
        if (at := self._find(marks.close)) is not None:
            parts = self._out(self._taken(at).rstrip(), is_thought=True)
            self._taken(len(marks.close))
            self.state, self._trims = "said", True
            return parts
        certain = len(self._held[: len(self._held) - overlap(self._held, marks.close)].rstrip())
        return self._out(self._taken(certain), is_thought=True)

    def _find(self, mark: str) -> int | None:
        found = (each.start() for each in re.finditer(re.escape(mark), self._held))
        return next((at for at in found if self._is_mark(mark, at)), None)

    def _is_mark(self, mark: str, at: int) -> bool:
        return mark not in self._named or self._num_past + at in self._places

    def _taken(self, count: int) -> str:
        """Remove the first characters of the held text, and return them."""
        taken, self._held = self._held[:count], self._held[count:]
        self._num_past += count
        return taken

    def _out(self, text: str, *, is_thought: bool) -> list[Piece]:
        text = text.lstrip() if self._trims else text
        self._trims = self._trims and not text
        return [Piece(text, is_thought)] if text else []


def without_thoughts(reply: str, marks: Marks | None, *, begun: bool) -> str:
    """The text of a whole reply after its thoughts. begun: the prompt has opened them."""
    splitter = Splitter(marks, begun=begun)
    return "".join(piece.text for piece in (*splitter.push(reply), *splitter.flush()) if not piece.is_thought)


def overlap(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may begin `mark`."""
    return next((count for count in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-count:])), 0)
