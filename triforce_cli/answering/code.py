"""Fenced code blocks of an answer, as CommonMark has them."""

from __future__ import annotations

from typing import Literal

STOP: Literal["stop"] = "stop"  # the finish reason of an answer that ended by itself, or at a stop string


def last_block(text: str, finish: str | None = STOP) -> str | None:
    """The last code block of `text`, without its fences, ending in a line end; None if there is none.

    finish: how the text ended. A block without a closing fence reaches to the end of a text that ended by itself;
    otherwise it was cut, and the result is None.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])
    blocks = [token for token in parser.parse(f"{text}\n") if token.type == "fence"]
    if not blocks:
        return None
    block = blocks[-1]
    first, after = block.map or (0, 0)
    is_closed = after - first == block.content.count("\n") + 2  # lines of the source: both fences, and the code
    return block.content if is_closed or finish == STOP else None
