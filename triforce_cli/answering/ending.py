"""The end of an answer: its finish reason, and the note, the error and the exit code that follow from it.

| finish reason | the text | exit code |
|---|---|---|
| stop | ended by itself, or at a stop text | 0 |
| length | was cut at its limit of tokens, or at the end of the context | 0, or 6 if it has to follow a constraint |
| timeout | was cut by its time, whatever it has to follow | 124 |
| interrupted | was cut by a signal | the signal's |
| error | was cut by an error | the error's |

A text that is complete when its time is over was not cut. Of several answers the first row from below counts. APIs of
other programs have no word for time, so a timeout is their "length".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from offload.errors import TriforceError
from triforce_cli.ground.deadline import TimedOut

STOP, LENGTH, TIMEOUT, INTERRUPTED, FAILED = "stop", "length", "timeout", "interrupted", "error"


class Unfinished(TriforceError):
    """A text that has to follow a schema or another constraint was cut. Everything generated is written."""

    exit_code = 6
    kind = "unfinished"


class NoCode(Unfinished):
    """A text of which only a code block is wanted has no whole one."""

    kind = "no-code"


def no_code(text: str) -> str:
    """The error message for a text without a whole code block. text: its name."""
    return f"{text} has no whole code block, so nothing is written; all of it stands above"


def ends_here(text: str, max_tokens: str | None, remedy: str = "") -> str:
    """The note on a cut text. text: its name, such as "the reply". max_tokens: the limit that cut it, as the user
    writes it; None: the end of the context. remedy: a way to continue."""
    return f"{text} ends here, {_place(max_tokens)}{f'; {remedy}' if remedy else ''}"


def may_not_match(text: str, max_tokens: str | None, constraint: str, remedy: str) -> str:
    """The error message for a cut text with a constraint. constraint: its name."""
    return f"{text} ends {_place(max_tokens)} and may not match the {constraint}; {remedy}"


@dataclass(frozen=True)
class End:
    """The end of one of several answers. name: of the answer. finish: its finish reason. constraint: the name of what
    it has to follow, or ""."""

    name: str
    finish: str
    constraint: str = ""


def check_ends(ends: Iterable[End]) -> None:
    """Raises TimedOut if some answers were cut by their time, else Unfinished if some were cut that have to follow a
    constraint."""
    ends = list(ends)
    if late := [end for end in ends if end.finish == TIMEOUT]:
        raise TimedOut(f"{_several(late)} cut because the time was over; raise --timeout (see finish_reason)")
    if bound := [end for end in ends if end.finish == LENGTH and end.constraint]:
        whose = f"its {bound[0].constraint}" if len(bound) == 1 else "their constraints"
        raise Unfinished(f"{_several(bound)} cut and may not match {whose}; raise max_tokens (see finish_reason)")


def of_apis(finish: str) -> Literal["stop", "length"]:
    """The finish reason of an answer in the words of other programs' APIs."""
    return "stop" if finish == STOP else "length"


def _several(ends: list[End]) -> str:
    others = len(ends) - 1
    if not others:
        return f"{ends[0].name} was"
    return f"{ends[0].name} and {'1 other' if others == 1 else f'{others} others'} were"


def _place(max_tokens: str | None) -> str:
    return "where the context does" if max_tokens is None else f"at {max_tokens}"
