"""Hidden rows of a sequence's first and last tokens, which a next-token head reads."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kv.full import FullCache
from offload.transfer.memory import Memory

PURPOSE = "hidden rows of drafts"


class LastHidden:
    """The model's last hidden rows by position: of the first `sinks` tokens, and of the last ones in a ring. Rows of
    rejected tokens are overwritten. What is not there reads as zeros: drafts are worse for it, nothing else."""

    def __init__(self, memory: Memory, *, hidden_size: int, dtype: torch.dtype, sinks: int, window: int) -> None:
        self._memory, self._sinks = memory, sinks
        self._rows = memory.allocate((sinks + window, hidden_size), dtype, tier="device", purpose=PURPOSE)
        self._ring = self._rows[sinks:]
        self.length = 0
        self._first = 0  # of the rows in the ring since the last gap
        self._top = 0  # rows were written up to here

    @property
    def oldest(self) -> int:
        """The first position in the ring."""
        return max(self._first, self._top - len(self._ring))

    def write(self, start: int, rows: Tensor) -> None:
        """Rows at `start` and on, in place of what was there and of all after it."""
        if start > self.length or start < self.oldest:
            self._first = self._top = start
        stop = start + len(rows)
        if start < self._sinks:
            head = rows[: self._sinks - start]
            self._rows[start : start + len(head)] = head
        last = rows[-len(self._ring) :]
        places = torch.arange(stop - len(last), stop, device=rows.device) % len(self._ring)
        self._ring[places] = last
        self.length, self._top = stop, max(self._top, stop)

    def copy_from(self, other: LastHidden, length: int) -> None:
        """Hold what `other`, whose ring may have another size, has of its first `length` tokens."""
        stop = min(other.length, length)
        sinks, oldest = min(self._sinks, stop), min(other.oldest, stop)
        self.length = self._first = self._top = 0
        self.write(0, other.read(0, sinks))
        self.write(oldest, other.read(oldest, stop))

    def read(self, start: int, stop: int) -> Tensor:
        """Rows at positions `start` to `stop`, [n, hidden]."""
        at = torch.arange(start, stop)
        there = (at < self.length) & (at >= self.oldest)
        in_sinks = (at < self._sinks) & (at < self.length)
        places = torch.where(in_sinks, at, self._sinks + at % len(self._ring)).to(self._rows.device)
        found = self._rows[places]
        missing = ~(there | in_sinks)
        return found.masked_fill_(missing.to(found.device).unsqueeze(1), 0.0) if bool(missing.any()) else found

    def truncate(self, length: int) -> None:
        """Only the first `length` rows still belong to the sequence."""
        self.length = min(self.length, length)

    def nbytes(self) -> int:
        return self._rows.nbytes

    def release(self) -> None:
        """They are not used again."""
        self._memory.released(self._rows, tier="device", purpose=PURPOSE)


class DraftedHidden:
    """The same as a level writes them that drafts: after the rows of the target, whose cache is `full`."""

    def __init__(self, rows: LastHidden, full: FullCache) -> None:
        self._rows, self._full = rows, full

    def write(self, start: int, rows: Tensor) -> None:
        """Rows at `start` and on, but not in place of the target's."""
        known = max(self._full.length - start, 0)
        if known < len(rows):
            self._rows.write(start + known, rows[known:])

    def truncate(self, length: int) -> None:
        self._rows.truncate(max(length, self._full.length))
