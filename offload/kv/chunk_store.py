"""The store of the retrieval cache on the device: chosen chunks, exact or in 4 bits, and the exact rows after them.

All of it is in the arena's bytes. A prefill takes the bytes; after it the store is opened again, empty.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from offload.formats.quantised_kv import GROUP, KVCodes
from offload.kernels.device import DeviceKernels
from offload.kernels.runs import Rows, Run, attended
from offload.kv.fetch import Tail, make_fetch
from offload.kv.full import FullCache
from offload.kv.places import QKV, Places, joined
from offload.kv.quantised_attention import EXACT, QuantisedAttention
from offload.plan.sizing import KV_TAIL, TAIL_TOKENS


class RetrievedStore(Protocol):
    """Chunks of the full cache in slots, and a tail: exact rows from some chunk's first token on.

    places: of the rows of a forward, kept by the caller, since graphs have them.
    leading: tokens that a sequence begins with, whole chunks, which are held whatever is chosen. latest: its last ones,
    which are in the tail.
    """

    leading: int
    latest: int

    @property
    def is_open(self) -> bool: ...

    def open(self) -> None:
        """Take memory from the arena, whose turn is the caller's. Nothing is held."""
        ...

    def close(self) -> None:
        """Leave the memory to another user."""
        ...

    def reserve(self, tail: int) -> None:
        """Have room for a tail of so many tokens."""
        ...

    def tail_at(self, num_filled: int) -> int:
        """Row of the tail's first token among the exact ones, where so many slots are filled."""
        ...

    def fill(self, tail: Tail, wanted: Tensor | None) -> None:
        """Fetch the tail, with `wanted` chunks, see `Fetch.fetch`, and the first tokens where they are missing."""
        ...

    def forget_leading(self) -> None:
        """The sequence may begin otherwise."""
        ...

    def begin(self, position: int, row: int, num_filled: int, num_rows: int) -> None:
        """A forward of `num_rows` rows starts: the first one's position, its row among the exact ones, and the number
        of slots filled."""
        ...

    def attend(self, layer: int, taken: int, qkv: QKV, *, writes: bool) -> Tensor:
        """See `Cache.attend`. taken: rows of the forward before these. writes: they are new, also in the tails of the
        layers that share the keys and values of this one."""
        ...

    @property
    def graph_key(self) -> Hashable: ...

    def nbytes(self) -> int: ...


class _InArena:
    """Exact rows of all layers that read the full cache, [L, 2, H_kv, before | tail, D]; what is before the tail is the
    subclass's."""

    def __init__(self, full: FullCache, *, before: int, tail: int, step: int) -> None:
        """tail: tokens for which there is room at first, rounded up to a multiple of `step`."""
        self.full, self._before, self._step = full, before, step
        self._room = -(-tail // step) * step
        self._rows: Tensor | None = None

    @property
    def is_open(self) -> bool:
        return self._rows is not None

    def open(self) -> None:
        self._rows = self.full.arena.take(self._size, self.full.shape.dtype)

    def close(self) -> None:
        self._rows = None

    def reserve(self, tail: int) -> None:
        if tail <= self._room:
            return
        old = self._held
        self._room = -(-tail // self._step) * self._step
        self.open()
        self._held[:, :, :, : old.shape[3]] = old
        self.full.arena.put_back(old)

    def nbytes(self) -> int:
        return math.prod(self._size) * self.full.shape.dtype.itemsize

    @property
    def _held(self) -> Tensor:
        assert self._rows is not None
        return self._rows

    @property
    def _size(self) -> tuple[int, ...]:
        shape = self.full.shape
        return len(self.full.reads), 2, shape.num_kv_heads, self._before + self._room, shape.head_dim

    def _tails(self, layer: int, *, writes: bool) -> list[Tensor]:
        """The rows, of all layers with the keys and values of `layer`, to which new ones go."""
        reads = self.full.reads
        return [held for held, own in zip(self._held, reads, strict=True) if own == reads[layer]] if writes else []


class RetrievedRows(_InArena):
    """Chunks as they are, before the tail: [L, 2, H_kv, chosen | tail, D]. It follows the slots that are filled."""

    leading = latest = 0

    def __init__(
        self, full: FullCache, *, num_slots: int, chunk: int, tail: int, kernels: DeviceKernels, places: Places
    ) -> None:
        super().__init__(full, before=num_slots * chunk, tail=tail, step=max(TAIL_TOKENS, chunk))  # whole chunks
        self._chunk, self._places = chunk, places
        self._attention = kernels.attention(dtype=full.shape.dtype)
        self._fetch = make_fetch(full, chunk, kernels, self.nbytes(), full.reads)

    def tail_at(self, num_filled: int) -> int:
        return num_filled * self._chunk

    def fill(self, tail: Tail, wanted: Tensor | None) -> None:
        self._fetch.fetch(self._held, tail, wanted)

    def forget_leading(self) -> None: ...

    def begin(self, position: int, row: int, num_filled: int, num_rows: int) -> None:
        self._places.set(position, row, num_rows)

    def attend(self, layer: int, taken: int, qkv: QKV, *, writes: bool) -> Tensor:
        blocks, into = self._places.blocks(taken, qkv, self.full.scorings[layer]), self._tails(layer, writes=writes)
        return joined([self._attend(self._held[layer], rows, into) for rows in blocks])

    @property
    def graph_key(self) -> Hashable:
        """The buffer's place and size. It is given up to every prefill, and had again at the same place as a rule;
        whatever else a pass uses is had once, or made anew in each."""
        return self._places.number, self._held.data_ptr(), self._held.shape

    def _attend(self, held: Tensor, rows: Rows, into: Sequence[Tensor]) -> Tensor:
        stop = rows.index + len(rows.q) if rows.places is None else held.shape[2]  # a graph is used when there are more
        beside = [Run(each, stop) for each in into]
        return attended(self._attention, rows, [Run(held, stop)], into=0, beside=beside)


class QuantisedChunks(_InArena):
    """Chunks in 4 bits, encoded as they are fetched, and exact rows of the first tokens and the tail:
    [L, 2, H_kv, first | tail, D]. Chunks are the tokens that share a step: `GROUP`."""

    leading, latest = EXACT, KV_TAIL

    def __init__(self, full: FullCache, *, num_slots: int, tail: int, kernels: DeviceKernels, places: Places) -> None:
        super().__init__(full, before=EXACT, tail=tail, step=GROUP)
        self._attention = QuantisedAttention(kernels, full.scorings, full.shape.dtype, places)
        self._order, self._num_slots = kernels.order, num_slots
        token_bytes = super().nbytes() // self._size[3]
        num_bytes = (num_slots * GROUP + self._room) * token_bytes
        self._fetch = make_fetch(full, GROUP, kernels, num_bytes, full.reads)
        self._codes: KVCodes | None = None
        self._has_leading = False

    def open(self) -> None:
        super().open()
        if self._codes is None:
            self._codes = KVCodes(
                self.full.arena.take(self._code_size, torch.uint8), self.full.shape.head_dim, self._order
            )
            self._has_leading = False

    def close(self) -> None:
        super().close()
        self._codes = None

    def tail_at(self, num_filled: int) -> int:
        return EXACT

    def fill(self, tail: Tail, wanted: Tensor | None) -> None:
        if not self._has_leading:
            self._fetch.fetch(self._held, Tail(0, 0, min(tail.stop, EXACT), 0))
            self._has_leading = tail.stop >= EXACT
        if wanted is not None:
            assert self._codes is not None
            self._fetch.encode(self._codes, wanted)
        self._fetch.fetch(self._held, tail)

    def forget_leading(self) -> None:
        self._has_leading = False

    def begin(self, position: int, row: int, num_filled: int, num_rows: int) -> None:
        assert self._codes is not None
        self._attention.begin(position, row, num_rows, num_filled * GROUP, self._codes)

    def attend(self, layer: int, taken: int, qkv: QKV, *, writes: bool) -> Tensor:
        into = self._tails(layer, writes=writes)
        return self._attention.attend(layer, taken, qkv, self._held[layer], into)

    @property
    def graph_key(self) -> Hashable:
        assert self._codes is not None
        return self._held.data_ptr(), self._held.shape, self._codes.blocks.data_ptr(), self._attention.graph_key

    def nbytes(self) -> int:
        return super().nbytes() + math.prod(self._code_size)

    @property
    def _code_size(self) -> tuple[int, ...]:
        shape = self.full.shape
        return KVCodes.shape_of_blocks(
            len(self.full.reads), shape.num_kv_heads, self._num_slots * GROUP, shape.head_dim
        )
