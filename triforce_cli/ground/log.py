"""The log file of --log-file: events with their times, for finding the cause of a failure.

It holds notes, stages, plans, numbers and errors, but no prompt and no reply.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import UsageError

_LOGGER = logging.getLogger("triforce")
_LOGGER.propagate = False
_LOGGER.setLevel(logging.INFO)


def begin(file: Path) -> None:
    """Append to `file` from here on. Raises UsageError."""
    end()
    try:
        handler = _File(file, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the log file {file} cannot be written: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    _LOGGER.addHandler(handler)


def end() -> None:
    for handler in _LOGGER.handlers[:]:
        _LOGGER.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk
            handler.close()


def event(name: str, data: Mapping[str, Any] | None = None) -> None:
    """Log one line: the event's name, and its numbers as JSON."""
    _write(logging.INFO, name if data is None else f"{name} {json.dumps(data, default=str)}")


def failure(text: str) -> None:
    """Log an error, with its traceback."""
    _write(logging.ERROR, text)


def _write(level: int, text: str) -> None:
    if _LOGGER.hasHandlers():  # without one, logging would write to standard error
        _LOGGER.log(level, "%s", text.encode("utf-8", "backslashreplace").decode("utf-8"))  # a path need not be UTF-8


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a log that cannot be written (a full disk)."""
