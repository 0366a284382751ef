"""Hidden rows of a sequence's first and last tokens, which a next-token head reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.kv.full import FullCache
from offload.kv.parts import Part, Shapes, Unit
from offload.transfer.memory import Memory

PURPOSE = "hidden rows of drafts"


class LastHidden(Part):
    """The model's last hidden rows by position: of the first `sinks` tokens, and of the last ones in a ring. Rows of
    rejected tokens are overwritten. Missing rows read as zeros, which make drafts worse and change nothing else.

    A head that begins to draft after some tokens reads the rows of the first `sinks` and of the last `window` of them.
    slack: rows after the sequence's tokens that may be written and rejected. The ring counts as if `slack` rows had
    always been written, so its contents follow from the tokens alone, and not from what was drafted after them.

    A session's unit is named by its tokens, the number of first rows, the position of the first of the last ones, and
    the numbers of a row. Other texts can begin with the first rows: their unit has no last ones.
    """

    name = "hidden"
    what = "file of hidden rows"

    def __init__(
        self, memory: Memory, *, hidden_size: int, dtype: torch.dtype, sinks: int, window: int, slack: int
    ) -> None:
        self._memory, self.sinks, self.window, self._slack = memory, sinks, window, slack
        self.num_computed = window  # no store has their rows
        size = (sinks + 2 * (window + slack), hidden_size)
        self._rows = memory.allocate(size, dtype, tier="device", purpose=PURPOSE)
        self._ring = self._rows[sinks:]
        self.length = 0
        self._num_first = 0  # first tokens whose rows are there, up to `sinks`
        self._first = 0  # of the rows in the ring since the last gap
        self._longest = 0  # of the sequences since then

    def shapes(self, unit: Unit) -> Shapes:
        stop, num_first, start = _named(unit)
        return {"rows": ((num_first + stop - start, self._rows.shape[1]), self._rows.dtype)}

    def units(self, length: int) -> list[Unit]:
        if not length or self.length != length:
            return []
        return [(length, len(self.first_rows), min(self.oldest, length), self._rows.shape[1])]

    def shared(self, length: int, page: int) -> list[Unit]:
        return self.needed(length) if self.is_whole(length) else []

    def needed(self, length: int) -> list[Unit]:
        count = min(self.sinks, length)
        return [(count, count)] if count else []

    def is_whole(self, length: int) -> bool:
        return len(self.first_rows) == min(self.sinks, length)

    def tensors(self, unit: Unit) -> list[Tensor]:
        stop, num_first, start = _named(unit)
        return [torch.cat([self.first_rows[:num_first], self.read(start, stop)])]

    def filled(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        [rows], (_, num_first, start) = tensors, _named(unit)
        self.fill(rows[:num_first], start, rows[num_first:])

    def restored(self, length: int) -> None:
        self.truncate(length)

    @property
    def oldest(self) -> int:
        """The first position in the ring."""
        return max(self._first, self._longest + self._slack - len(self._ring))

    @property
    def first_rows(self) -> Tensor:
        """The rows of the sequence's first tokens, [n, hidden]: of `sinks` of them, or of as many as are there."""
        return self._rows[: min(self._num_first, self.length)]

    def reachable(self, length: int, stop: int | None = None) -> int:
        """The most tokens, up to `length`, to which a sequence may be cut that then grows to `stop` tokens before
        anything is drafted: of its last `window` tokens the rows that are not there are computed. None: any cut is
        possible."""
        if stop is None:
            return length
        known = length <= self.length and self.oldest <= max(stop - self.window, self.sinks)
        return length if known else min(length, max(stop - self.window, 0))

    def write(self, start: int, rows: Tensor) -> None:
        """Rows at `start` and on, in place of what was there and of all after it. Tokens before them are no drafts."""
        stop = start + len(rows)
        if start > self.length or start < self.oldest:
            self._first = self._longest = start
        self._put(start, rows)
        self._longest = max(self._longest, start, stop - self._slack)

    def write_drafted(self, start: int, rows: Tensor) -> None:
        """Rows of drafted tokens, at most `slack` after the sequence's."""
        self._put(start, rows)

    def copy_from(self, other: LastHidden, length: int | None = None) -> None:
        """Hold what `other`, whose ring may have another size, has of its first `length` tokens."""
        stop = other.length if length is None else min(other.length, length)
        oldest = min(other.oldest, stop)
        self.fill(other.first_rows[:stop], oldest, other.read(oldest, stop))

    def fill(self, first_rows: Tensor, start: int, rows: Tensor) -> None:
        """Hold rows of a sequence's first tokens, and of its last ones, at `start` and on, in place of what was
        there."""
        self.length = self._num_first = 0
        self.write(0, first_rows[: self.sinks])
        self.write(start, rows)

    def read(self, start: int, stop: int) -> Tensor:
        """Rows at positions `start` to `stop`, [n, hidden]."""
        at = torch.arange(start, stop)
        present = (at < self.length) & (at >= self.oldest)
        in_sinks = at < len(self.first_rows)
        places = torch.where(in_sinks, at, self.sinks + at % len(self._ring)).to(self._rows.device)
        found = self._rows[places]
        missing = ~(present | in_sinks)
        return found.masked_fill_(missing.to(found.device).unsqueeze(1), 0.0) if bool(missing.any()) else found

    def truncate(self, length: int) -> None:
        """Only the first `length` rows still belong to the sequence."""
        self.length = min(self.length, length)
        self._num_first = min(self._num_first, length)

    def nbytes(self) -> int:
        return self._rows.nbytes

    def release(self) -> None:
        """Release the memory; the rows are not used again."""
        self._memory.released(self._rows, tier="device", purpose=PURPOSE)

    def _put(self, start: int, rows: Tensor) -> None:
        stop = start + len(rows)
        if start <= self._num_first:
            first = rows[: max(self.sinks - start, 0)]
            self._rows[start : start + len(first)] = first
            self._num_first = start + len(first)
        last = rows[-len(self._ring) :]
        places = torch.arange(stop - len(last), stop, device=rows.device) % len(self._ring)
        self._ring[places] = last
        self.length = stop


class DraftedHidden:
    """The hidden rows as a drafting level writes them: after the rows of the target, whose cache is `full`."""

    def __init__(self, rows: LastHidden, full: FullCache) -> None:
        self._rows, self._full = rows, full

    def write(self, start: int, rows: Tensor) -> None:
        """Rows at `start` and on, but not in place of the target's."""
        known = max(self._full.length - start, 0)
        if known < len(rows):
            self._rows.write_drafted(start + known, rows[known:])

    def truncate(self, length: int) -> None:
        self._rows.truncate(max(length, self._full.length))


def _named(unit: Unit) -> tuple[int, int, int]:
    """(tokens, number of first rows, position of the first of the last ones) of a unit."""
    stop, num_first, *rest = unit
    return stop, num_first, rest[0] if rest else stop
