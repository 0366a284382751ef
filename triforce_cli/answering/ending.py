"""The note on a text that was cut, at --max-tokens or at the end of the context, and the error if the text had to
follow a constraint or to have a code block."""

from __future__ import annotations

from offload.errors import TriforceError


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


def some_may_not_match(name: str, constraint: str, num_others: int) -> str:
    """The error message for cut results of a batch. name: one of them; num_others: the number of others."""
    remedy = "raise max_tokens or --timeout (see finish_reason)"
    if not num_others:
        return f"{name} was cut and may not match its {constraint}; {remedy}"
    others = "1 other" if num_others == 1 else f"{num_others} others"
    return f"{name} and {others} were cut and may not match their constraints; {remedy}"


def _place(max_tokens: str | None) -> str:
    return "where the context does" if max_tokens is None else f"at {max_tokens}"
