"""Thoughts: what some models write before a reply, between marks of their template's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Thinking = Literal["show", "hide", "off"]
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


_KNOWN = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    *(Marks(f"<{name}>", f"</{name}>") for name in ("seed:think", "mm:think", "thinking")),
)


def marks_of(template: str) -> Marks | None:
    """Those that a chat template knows."""
    return next((marks for marks in _KNOWN if marks.close in template), None)


def switched_off(render: Callable[..., str]) -> dict[str, bool]:
    """The variables that ask a template for no thoughts: those that change what it writes. render: a conversation with
    such variables."""
    usual = render()
    return {name: False for name in _SWITCHES if render(**{name: False}) != usual}


@dataclass(frozen=True)
class Part:
    """A stretch of a reply; is_thought: of its thoughts, else of what is said."""

    text: str
    is_thought: bool


class Splitter:
    """Tells the thoughts at the beginning of a reply from what is said, piece by piece; marks are left out, and the
    white space beside them. begun: the prompt has opened them already."""

    def __init__(self, marks: Marks | None, *, begun: bool = False) -> None:
        self._marks = marks
        self._state: Literal["start", "thought", "said"] = "said" if marks is None else "thought" if begun else "start"
        self._held = ""
        self._trims = True  # the white space that comes next

    @property
    def is_thinking(self) -> bool:
        return self._state == "thought"

    def push(self, text: str) -> list[Part]:
        """What is certain with this text."""
        self._held += text
        parts: list[Part] = []
        if self._marks is not None and self._state == "start":
            self._open(self._marks)
        if self._marks is not None and self._state == "thought":
            parts += self._think(self._marks)
        if self._state == "said":
            parts += self._out(self._held, is_thought=False)
            self._held = ""
        return parts

    def flush(self) -> list[Part]:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return self._out(held, is_thought=self._state == "thought")

    def _open(self, marks: Marks) -> None:
        begin = self._held.lstrip()
        if begin.startswith(marks.open):
            self._state, self._held, self._trims = "thought", begin[len(marks.open) :], True
        elif not marks.open.startswith(begin):
            self._state = "said"

    def _think(self, marks: Marks) -> list[Part]:
        before, close, after = self._held.partition(marks.close)
        if close:
            self._held = after
            parts = self._out(before.rstrip(), is_thought=True)
            self._state, self._trims = "said", True
            return parts
        certain = len(self._held[: len(self._held) - _overlap(self._held, marks.close)].rstrip())
        before, self._held = self._held[:certain], self._held[certain:]
        return self._out(before, is_thought=True)

    def _out(self, text: str, *, is_thought: bool) -> list[Part]:
        text = text.lstrip() if self._trims else text
        self._trims = self._trims and not text
        return [Part(text, is_thought)] if text else []


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((count for count in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-count:])), 0)
