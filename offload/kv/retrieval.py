"""The retrieval cache: the part of the full cache that matters now, on the device.

It never makes up its own memory: after each verification it holds chosen chunks of the full cache, as they are or in 4
bits, and, as its *tail*, the exact rows after the chunks that were chosen among. Only rows drafted since are its own,
and the next verification drops them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from offload.formats.quantised_kv import GROUP
from offload.kernels.device import NONE, DeviceKernels
from offload.kv import Phase
from offload.kv.chunk_store import QuantisedChunks, RetrievedRows, RetrievedStore
from offload.kv.fetch import Tail
from offload.kv.full import FullCache
from offload.kv.places import Places, in_turn
from offload.kv.selection import Assignment, Selector, assign, choose
from offload.plan.sizing import TAIL_TOKENS


class RetrievalCache:
    """Chunks under a budget, and a tail, per layer: also where layers share keys and values, since each has its own
    chunks.

    `budget` tokens of chunks in `bits`, 16 or 4, chosen per layer and KV head by `selector`; the tail comes on top,
    with room for at least `tail` tokens, and in 4 bits the first tokens. kernels: that attend.
    """

    def __init__(
        self,
        full: FullCache,
        *,
        budget: int,
        chunk: int,
        selector: Selector,
        kernels: DeviceKernels = NONE,
        tail: int = TAIL_TOKENS,
        bits: int = 16,
    ) -> None:
        self.full, self._tail, self._bits = full, tail, bits
        self._kernels, self._places = kernels, Places(full.device)
        self._resize(budget, chunk)
        self.selector = selector
        self.chunks: Tensor | None = None  # int64 [L, H_kv, slots filled]: the chunk in each
        self._tail_start = self._chosen.leading
        self._exact = 0  # tokens up to here are the full cache's, not drafted
        self.length = 0
        self._taken = [0] * len(full.reads)

    def start_over(self, selector: Selector, *, budget: int, chunk: int) -> None:
        """Hold nothing; from the next refresh on, what `selector` chooses. For benchmarks, which compare selectors."""
        self.truncate(0)
        self._drop()
        self._resize(budget, chunk)
        self.selector = selector
        selector.forget()

    @property
    def num_chunks(self) -> int:
        """Chunks before the tail: the last choice was made among these, but for those that are held anyway."""
        return self._tail_start // self.chunk

    def begin(self, phase: Phase, num_rows: int) -> None:
        self._taken = [0] * len(self.full.reads)
        self._open()
        drafted = self.length - self._tail_start
        self._chosen.reserve(drafted + num_rows)
        self._chosen.begin(self.length, self._tail_at + drafted, self._num_filled, num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attention over the chosen chunks and the tail, the new rows among it; see `Cache`."""
        taken = self._taken[layer]
        self._taken[layer] += len(q)
        qkv, writes = in_turn(q, k, v, self.full.shape.num_kv_heads)
        return self._chosen.attend(layer, taken, qkv, writes=writes)

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens

    def truncate(self, length: int) -> None:
        """Chunks chosen past `length` go too: then the cache is empty until the next `refresh`."""
        self._taken = [0] * len(self.full.reads)
        if length < self._exact:
            self.selector.forget()
        if length < self._chosen.leading:
            self._chosen.forget_leading()
        if length < self._first:
            self._drop()
            length = 0
        self.length = min(self.length, length)
        self._exact = min(self._exact, length)

    def release(self) -> None:
        """The cache is not used again."""
        self.truncate(0)
        self._chosen.close()

    @property
    def graph_key(self) -> Hashable:
        """The key of the store of chosen chunks."""
        return self._chosen.graph_key

    def nbytes(self) -> int:
        return self._chosen.nbytes()

    def prepare(self, num_rows: int, *, wanted: bool) -> bool:
        """After a verification whose first `num_rows` rows stay: refresh, if that is wanted and possible. Returns
        whether it was.

        It is possible where the verification recorded masses; the next one records them where this cache is wanted now.
        """
        ready = wanted and self.full.record_mass
        self.full.record_mass = wanted
        if ready:
            self.refresh(num_rows)
        return ready

    def refresh(self, num_rows: int) -> None:
        """Fetch the chunks that the last verification attended to most; the tokens of its first `num_rows` rows stayed.

        The full cache has been truncated to the verified tokens; this cache then has exactly these.
        """
        with torch.inference_mode():
            self._open()
            length = self.full.length
            whole = (length - self._chosen.latest) // self.chunk * self.chunk
            self._exact = self._tail_start = max(whole, self._chosen.leading)
            slots = self._choose(num_rows)
            chunks, wanted = (None, None) if slots is None else (slots.held, slots.wanted)
            self._fill(length, chunks, wanted)

    def _scores(self, num_rows: int) -> Tensor:
        """Scores of the whole chunks, [L, H_kv, C] fp32."""
        return self.selector.scores(self.full, num_rows, self.chunk, self.num_chunks)

    def _drop(self) -> None:
        self.chunks = None
        self._tail_start = self._chosen.leading

    def _choose(self, num_rows: int) -> Assignment | None:
        """Slots for the chosen chunks; None: there is no whole chunk to choose."""
        leading = self._chosen.leading // self.chunk
        if self.num_chunks == leading:
            return None
        return assign(choose(self._scores(num_rows), self.budget // self.chunk, leading=leading), self.chunks)

    def _fill(self, length: int, chunks: Tensor | None, wanted: Tensor | None) -> None:
        """Hold `chunks` in the slots, of which those `wanted` are fetched, and exact rows for the tail up to `length`
        tokens: what the drafts left there was computed from a part of the cache."""
        self._chosen.reserve(length - self._tail_start)
        self.chunks = None  # known again when they are there: this may be broken off
        at = self._chosen.tail_at(0 if chunks is None else chunks.shape[-1])
        self._chosen.fill(Tail(self._tail_start, self._tail_start, length, at), wanted)
        self.chunks = chunks
        self.length = self._exact = length

    @property
    def _num_filled(self) -> int:
        """Slots filled, the same in every layer and head."""
        return 0 if self.chunks is None else self.chunks.shape[-1]

    @property
    def _tail_at(self) -> int:
        return self._chosen.tail_at(self._num_filled)

    @property
    def _first(self) -> int:
        """The first token that is in the tail and not among what is held anyway."""
        return self._tail_start if self._tail_start > self._chosen.leading else 0

    def _open(self) -> None:
        """Have the buffer. Where a prefill took its place, fetch what was in it to the same slots: the full cache has
        the same rows still."""
        if self._chosen.is_open:
            return
        self.full.arena.begin(self._give_up)
        self._chosen.open()
        known, self._exact = self._exact, min(self._exact, self._tail_start)
        if self.chunks is not None or known > self._first:
            self._fill(known, self.chunks, self.chunks)

    def _give_up(self) -> None:
        """Leave the bytes to another user. Rows that were drafted into the tail are stored nowhere else, so their
        tokens are pending again."""
        self.length = self._exact
        self._chosen.close()

    def _resize(self, budget: int, chunk: int) -> None:
        self.budget, self.chunk = budget, chunk
        sizes: dict[str, Any] = {"num_slots": budget // chunk, "tail": self._tail, "kernels": self._kernels}
        sizes["places"] = self._places
        self._chosen: RetrievedStore
        if self._bits == 16:
            self._chosen = RetrievedRows(self.full, chunk=chunk, **sizes)
        else:
            assert chunk == GROUP
            self._chosen = QuantisedChunks(self.full, **sizes)
