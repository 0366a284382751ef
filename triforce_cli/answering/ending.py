"""Texts that were cut, at --max-tokens or where the context ends: the line that says so, and the error of a text that
had to follow a constraint."""

from __future__ import annotations

from offload.errors import TriforceError


class Unfinished(TriforceError):
    """A text that has to follow a schema, or another constraint, was cut. All that was generated is written."""

    exit_code = 6
    kind = "unfinished"


def ends_here(text: str, max_tokens: str | None, remedy: str = "") -> str:
    """text: what it is, as "the reply". max_tokens: the limit that cut it, as the user writes it; None: the context's
    end did. remedy: what lets it go on."""
    return f"{text} ends here, {_place(max_tokens)}{f'; {remedy}' if remedy else ''}"


def may_not_match(text: str, max_tokens: str | None, constraint: str, remedy: str) -> str:
    """The same of a text that has to follow a constraint of this name."""
    return f"{text} ends {_place(max_tokens)} and may not match the {constraint}; {remedy}"


def some_may_not_match(name: str, constraint: str, num_others: int) -> str:
    """The same of results of a batch: one by its name, and how many others."""
    remedy = "raise max_tokens or --timeout (see finish_reason)"
    if not num_others:
        return f"{name} was cut and may not match its {constraint}; {remedy}"
    others = "1 other" if num_others == 1 else f"{num_others} others"
    return f"{name} and {others} were cut and may not match their constraints; {remedy}"


def _place(max_tokens: str | None) -> str:
    return "where the context does" if max_tokens is None else f"at {max_tokens}"
