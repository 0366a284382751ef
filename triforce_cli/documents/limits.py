"""What reading one document may take: seconds, unpacked bytes, depth. Past a limit it is refused, never cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from offload.errors import UsageError
from offload.interrupts import poll
from offload.units import size

MOST_SECONDS = 300.0
MOST_UNPACKED_BYTES = 256 << 20  # of all that is read of one archive
MOST_MARKUP_BYTES = 32 << 20  # of one page or chapter
MOST_MEMBERS = 10_000
MOST_DIRECTORY_BYTES = 4 << 20
MOST_DEPTH = 1_000  # elements that are open at a time
PIECE_BYTES = 1 << 16  # between two looks at the clock

OnPart = Callable[[float], None]  # hears which share of a document is read


class Meter:
    """Of one document that is being read. Its methods raise UsageError past a limit."""

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
        """So many bytes more came out of an archive."""
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
        """Checks the size of a page before it is parsed. what: the part of the document that it is."""
        if num_bytes > MOST_MARKUP_BYTES:
            raise UsageError(
                f"{what or self.name} has {size(num_bytes)}, a page may have {size(MOST_MARKUP_BYTES)}; split it, or "
                "make text of it (pandoc -t plain)"
            )

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """`data` in pieces, with a look at the clock before each."""
        for start in range(0, len(data), PIECE_BYTES):
            self.check()
            yield data[start : start + PIECE_BYTES]


def library(name: str, document: str) -> Any:
    """The module of a library that not every installation has. Raises UsageError."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{document} needs {name.partition('.')[0]}, which is not installed: pip install 'triforce[documents]'"
        ) from error
