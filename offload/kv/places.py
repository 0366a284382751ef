"""The places of the rows of the forward under way, kept on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from offload.kernels.places import RowPlaces
from offload.kernels.rope import Scoring
from offload.kernels.rows import MAX_ROWS
from offload.kernels.runs import Rows
from offload.plan.fixed_bytes import FEW_ROWS
from offload.transfer.memory import sent, sent_to

_numbers = count()
_ALL_WRITTEN = -(2**31)  # slots before the buffer's first one are negative
QKV = tuple[Tensor, Tensor, Tensor]  # [T, H, D] and [T, H_kv, D] twice, not rotated


class Places:
    """The places of a forward's rows: positions, slots and bounds. On a GPU the places of forwards of equally many
    rows, up to MAX_ROWS, are at the same addresses; on other devices attention takes numbers. number: unique in this
    process, so it names the addresses in the key of a graph."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.number = device, next(_numbers)
        self._kept = torch.zeros(2 + 2 * MAX_ROWS, dtype=torch.long, device=self._device)
        self._first, self._num_rows, self._bounds = (0, 0), 0, (0, _ALL_WRITTEN)
        self._all: RowPlaces | None = None

    @property
    def in_memory(self) -> bool:
        """Whether the places are in a GPU's memory, from which a graph reads them."""
        return self._device.type == "cuda"

    def set(
        self, position: int, slot: int, num_rows: int, *, num_coded: int = 0, first_written: int = _ALL_WRITTEN
    ) -> None:
        """A forward of `num_rows` rows starts: the first row's position and slot. num_coded, first_written: the bounds
        of `RowPlaces`."""
        self._first, self._num_rows, self._all = (position, slot), num_rows, None
        self._bounds = num_coded, first_written
        if self.in_memory:
            kept, numbers = self._kept[: 2 + 2 * num_rows], self._numbers()
            numbers = sent_to(kept, numbers) if num_rows <= MAX_ROWS else sent(numbers, self._device)
            self._all = RowPlaces(numbers[2 : 2 + num_rows], numbers[2 + num_rows :], numbers[:2])

    def rows(self, first: int, qkv: QKV, scoring: Scoring, *, window: int = 0) -> Rows:
        """The forward's rows from the `first` on, as a cache gets them. window: tokens that the rows see of windowed
        runs."""
        position, slot = self._first
        return Rows(*qkv, scoring, position + first, slot + first, window, self._on_gpu(first, len(qkv[0])))

    def blocks(
        self, first: int, qkv: QKV, scoring: Scoring, *, window: int = 0, most: int = FEW_ROWS
    ) -> Iterator[Rows]:
        """The rows of `rows` in blocks of at most `most` rows: on a GPU a block takes scratch for all spans that it
        sees."""
        parts = [qkv] if len(qkv[0]) <= most else zip(*(x.split(most) for x in qkv), strict=True)
        for some in parts:
            yield self.rows(first, some, scoring, window=window)
            first += len(some[0])

    def _on_gpu(self, first: int, count: int) -> RowPlaces | None:
        """The places of `count` rows from the `first` on; None where the device is no GPU, since attention takes
        numbers on it."""
        if self._all is None or count == self._num_rows:
            return self._all
        return self._all.of_rows(slice(first, first + count))

    def _numbers(self) -> Tensor:
        """The bounds, the positions, then the slots, [2 + 2 * T] on the CPU."""
        steps = torch.arange(self._num_rows)
        return torch.cat([torch.tensor(self._bounds), *(steps + first for first in self._first)])


def in_turn(q: Tensor, k: Tensor | None, v: Tensor | None, num_kv_heads: int) -> tuple[QKV, bool]:
    """The rows of `Cache.attend`, and whether they have keys and values to be written. If not, the first queries stand
    in their place, which tell the number of KV heads alone."""
    if k is None or v is None:
        stand_ins = q[:, :num_kv_heads]
        return (q, stand_ins, stand_ins), False
    return (q, k, v), True


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Rows of blocks, one block after the other."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
