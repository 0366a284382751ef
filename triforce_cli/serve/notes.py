"""The lines of a server: where it serves, each answer, each refusal. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triforce_cli.answering.ending import TIMEOUT
from triforce_cli.ground.text import duration, line_text, significant

if TYPE_CHECKING:
    from triforce_cli.serve.guard import Refusal
    from triforce_cli.serve.job import Ending

_MOST_OF_PATH, _MOST_OF_REASON = 80, 300  # characters
_MOST_OF_METHOD = 16


def serving(url: str, model: str, context: int) -> str:
    """The line once requests are taken. url: up to the paths of the APIs."""
    return f"serving {model} at {url}/v1, {context:,} tokens of context; {url} is a page to chat; Ctrl-C stops"


def answered(ending: Ending) -> str:
    """The line after an answer."""
    stats = ending.stats
    cached = f" ({stats.reused_tokens:,} cached)" if stats.reused_tokens else ""
    rate = stats.decode_tokens_per_second
    speed = f", {significant(rate)} tokens/s" if rate else ""
    seconds = duration(stats.first_token_seconds + stats.decode_seconds)
    new = f", {stats.output_tokens:,} new in {seconds}{speed}" if stats.output_tokens else ""
    end = "; the client went away" if ending.is_gone else "; its time was over" if ending.finish == TIMEOUT else ""
    if ending.num_read is not None:
        end += f"; left at {ending.num_read:,} of {stats.prompt_tokens:,} tokens, whose rows are kept"
    return f"{ending.name}: {stats.prompt_tokens:,} prompt tokens{cached}{new}{end}"


def refused(refusal: Refusal) -> str:
    """The line after a request that was not answered."""
    method, path, reason = (
        line_text(text[:most])
        for text, most in (
            (refusal.method, _MOST_OF_METHOD), (refusal.path, _MOST_OF_PATH), (refusal.reason, _MOST_OF_REASON)
        )
    )  # fmt: skip
    return f"{refusal.address or 'a client'} {method} {path}: {refusal.status}, {reason}"
