"""Thoughts: what some models write before a reply, between marks of their template's."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, cast

Thinking = Literal["show", "hide", "off"]
State = Literal["start", "thought", "said"]  # of a reply: whether it has begun with thoughts, or is behind them
NAMES: tuple[Thinking, ...] = ("show", "hide", "off")
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates


@dataclass(frozen=True)
class Marks:
    """What opens thoughts, and what closes them."""

    open: str
    close: str

    @property
    def end(self) -> str:
        """What ends thoughts that take too long."""
        return f"\n{self.close}\n\n"

    @property
    def none(self) -> str:
        """What a reply begins with that has no thoughts, as Qwen3's template writes it."""
        return f"{self.open}\n\n{self.close}\n\n"

    def state(self, written: str) -> State:
        """Of thoughts behind what a template has written before a reply: "start" where it has neither opened nor closed
        them."""
        opened, closed = written.rfind(self.open), written.rfind(self.close)
        last, state = (self.open, "thought") if opened > closed else (self.close, "said")
        after = written[max(opened, closed) + len(last) :]
        return cast(State, state) if max(opened, closed) >= 0 and not after.strip() else "start"

    def are_in(self, begin: str) -> bool:
        """Whether what a reply is to begin with opens thoughts, or closes them."""
        return begin.lstrip().startswith(self.open) or self.close in begin


_KNOWN = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    *(Marks(f"<{name}>", f"</{name}>") for name in ("seed:think", "mm:think", "thinking")),
)


def marks_of(template: str) -> Marks | None:
    """Those that a chat template knows."""
    return next((marks for marks in _KNOWN if marks.close in template), None)


def switched_off(render: Callable[..., str]) -> dict[str, bool]:
    """The variables that ask a template for no thoughts: on, it writes something else than off. render: a conversation
    with such variables."""
    return {name: False for name in _SWITCHES if render(**{name: True}) != render(**{name: False})}


@dataclass(frozen=True)
class Piece:
    """A stretch of a reply; is_thought: of its thoughts, else of what is said."""

    text: str
    is_thought: bool


class Splitter:
    """Tells the thoughts at the beginning of a reply from what is said, piece by piece; marks are left out, and the
    white space beside them."""

    def __init__(
        self,
        marks: Marks | None,
        *,
        begun: bool = False,
        begin: str = "",
        named: Collection[str] = (),
        trims: bool = True,
    ) -> None:
        """begun: the prompt has opened thoughts; a reply that opens them once more does no harm. begin: what the reply
        begins with, before the first piece. named: marks that are a token each, and nothing but that token. trims: the
        white space that the reply begins with."""
        self._marks, self._named = marks, named
        self._before: State = "thought" if begun else "said"  # what a reply begins with that opens no thoughts
        self.state: State = "said" if marks is None else "start"
        self._held, self._num_past = begin, 0  # characters of the reply before those that are held
        self._places = {found.start() for name in named for found in re.finditer(re.escape(name), begin)}
        self._trims = trims and not begin  # the white space that comes next
        self._tell()

    def push(self, text: str, named: Iterable[int] = ()) -> list[Piece]:
        """What is certain with this text. named: where tokens stand in it that are marks."""
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
        """What was held back, at the end."""
        state = self._before if self.state == "start" else self.state
        return self._out(self._taken(len(self._held)), is_thought=state == "thought")

    def _tell(self) -> None:
        """Whether the reply begins with thoughts, as soon as that is certain."""
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
        certain = len(self._held[: len(self._held) - _overlap(self._held, marks.close)].rstrip())
        return self._out(self._taken(certain), is_thought=True)

    def _find(self, mark: str) -> int | None:
        found = (each.start() for each in re.finditer(re.escape(mark), self._held))
        return next((at for at in found if self._is_mark(mark, at)), None)

    def _is_mark(self, mark: str, at: int) -> bool:
        return mark not in self._named or self._num_past + at in self._places

    def _taken(self, count: int) -> str:
        """The first characters of what is held, which is without them then."""
        taken, self._held = self._held[:count], self._held[count:]
        self._num_past += count
        return taken

    def _out(self, text: str, *, is_thought: bool) -> list[Piece]:
        text = text.lstrip() if self._trims else text
        self._trims = self._trims and not text
        return [Piece(text, is_thought)] if text else []


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((count for count in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-count:])), 0)
