"""The use of the prefix store: its bytes, and how many it may take."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from offload.session.prefix_store import most_bytes
from offload.session.store_files import nbytes, store_folder

_FRESH_SECONDS = 10.0  # a store has thousands of files


@dataclass(frozen=True)
class StoreUse:
    """nbytes: of all pages. limit: None until the first prompt is kept."""

    nbytes: int
    limit: int | None


class StoreWatch:
    """Looks at the store, at most once in a while. limit: that was set."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._found: tuple[float, StoreUse] | None = None

    def use(self) -> StoreUse:
        if self._found is None or time.monotonic() - self._found[0] > _FRESH_SECONDS:
            self._found = time.monotonic(), self._look()
        return self._found[1]

    def _look(self) -> StoreUse:
        folder = store_folder()
        most = self._limit
        with suppress(OSError):  # there is no store yet
            most = most_bytes(folder, self._limit)
        return StoreUse(nbytes(folder), most)
