"""The terminal at the end of a stream, if there is one: whether it erases, and its width."""

from __future__ import annotations

import os
import shutil
from typing import IO

from offload.errors import TriforceError


def is_terminal(stream: IO[str] | None) -> bool:
    """False for a stream that the caller has closed, too."""
    return stream is not None and stream.isatty()


def can_erase(stream: IO[str] | None) -> bool:
    """Whether the stream is a terminal that can erase what was written."""
    return is_terminal(stream) and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")


def columns(stream: IO[str]) -> int:
    """Columns of the stream's terminal; COLUMNS if it is set and less; 0 if nobody says. Raises TriforceError where the
    terminal has gone."""
    try:
        own = os.get_terminal_size(stream.fileno()).columns
    except OSError as error:
        raise TriforceError(f"the terminal's width cannot be read: {error.strerror}") from error
    return min(filter(None, (own, shutil.get_terminal_size((0, 0)).columns)), default=0)
