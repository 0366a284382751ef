"""The lines of a server: where it serves, and each answer. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triforce_cli.render.text import duration, significant

if TYPE_CHECKING:
    from offload.metrics import Stats


def serving(url: str, model: str, context: int) -> str:
    """The line once requests are taken. url: up to the paths of the APIs."""
    return f"serving {model} at {url}/v1, {context:,} tokens of context; Ctrl-C stops"


def answered(name: str, stats: Stats, *, is_gone: bool, num_read: int | None = None) -> str:
    """The line after an answer. name: of the request. is_gone: the client went away before its end. num_read: tokens of
    the prompt that were read, if these are not all."""
    cached = f" ({stats.reused_tokens:,} cached)" if stats.reused_tokens else ""
    rate = stats.decode_tokens_per_second
    speed = f", {significant(rate)} tokens/s" if rate else ""
    seconds = duration(stats.first_token_seconds + stats.decode_seconds)
    new = f", {stats.output_tokens:,} new in {seconds}{speed}" if stats.output_tokens else ""
    end = "; the client went away" if is_gone else ""
    if num_read is not None:
        end += f"; left at {num_read:,} of {stats.prompt_tokens:,} tokens, whose rows are kept"
    return f"{name}: {stats.prompt_tokens:,} prompt tokens{cached}{new}{end}"
