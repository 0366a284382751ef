"""Limits on reading one document: seconds, unpacked bytes, depth. A document past a limit is refused, never cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from offload.errors import UsageError
from offload.interrupts import poll
from offload.units import size

MOST_SECONDS = 300.0
MOST_UNPACKED_BYTES = 256 << 20  # of all members read from one archive
MOST_MARKUP_BYTES = 32 << 20  # of one page or chapter
MOST_MEMBERS = 10_000
MOST_DIRECTORY_BYTES = 4 << 20
MOST_DEPTH = 1_000  # of nested elements
PIECE_BYTES = 1 << 16  # between two checks of the time

OnPart = Callable[[float], None]  # called with the share of a document that is read


class Meter:
    """The meter of one document's reading. Its methods raise UsageError past a limit."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._clock = name, clock
        self._end = clock() + MOST_SECONDS
        self._num_unpacked = 0

    def check(self) -> None:
        poll()
        if self._clock() >= self._end:
            raise UsageError(
                f"{self.name} takes over {MOST_SECONDS:g} s to read, the most for one document; make text of it with "
                "another program (pdftotext, pandoc -t plain), or split it"
            )

    def unpacked(self, num_bytes: int) -> None:
        """Count bytes that were unpacked from an archive."""
        self.check()
        self._num_unpacked += num_bytes
        if self._num_unpacked > MOST_UNPACKED_BYTES:
            raise UsageError(
                f"{self.name} unpacks to over {size(MOST_UNPACKED_BYTES)}, the most for one document; is it a real "
                "one? unpack it yourself and name the texts in it"
            )

    def depth(self, number: int) -> None:
        if number > MOST_DEPTH:
            raise UsageError(
                f"{self.name} nests over {MOST_DEPTH:,} elements, the most that is read; is it a real document? "
                "pandoc -t plain may make text of it"
            )

    def markup(self, num_bytes: int, what: str = "") -> None:
        """Check the size of a page before parsing. what: the page's name in errors."""
        if num_bytes > MOST_MARKUP_BYTES:
            raise UsageError(
                f"{what or self.name} has {size(num_bytes)}, a page may have {size(MOST_MARKUP_BYTES)}; split it, or "
                "make text of it (pandoc -t plain)"
            )

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """`data` in pieces, with a check of the time before each."""
        for start in range(0, len(data), PIECE_BYTES):
            self.check()
            yield data[start : start + PIECE_BYTES]


def library(name: str, document: str) -> Any:
    """The module of an optional library. Raises UsageError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{document} needs {name.partition('.')[0]}, which is not installed: pip install 'triforce[documents]'"
        ) from error
