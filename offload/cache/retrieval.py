"""The retrieval cache: the part of the full cache that matters now, on the device.

It never makes up its own memory: after each verification it holds chosen chunks of the full cache and, as its *tail*,
the exact rows after the last whole chunk. Only rows drafted since are its own, and the next verification drops them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from offload.cache import Phase
from offload.cache.fetch import Tail, make_fetch
from offload.cache.full import FullCache
from offload.cache.places import Places
from offload.cache.selection import Selection, Selector, choose
from offload.cache.slots import Assignment, assign
from offload.kernels.attention import attend, fold, unfold
from offload.kernels.card import Card
from offload.kernels.decode_attention import DecodeAttention, decode_attention
from offload.kernels.native import FEW_ROWS, NONE, Kernels
from offload.kernels.rope import rotate
from offload.kernels.spans import Rows
from offload.plan.sizing import TAIL_TOKENS


class RetrievalCache:
    """Chunks under a budget, and a tail, per layer: [2, H_kv, chosen | tail, D].

    `budget` tokens of chunks, chosen per layer and KV head by `selector`; the tail comes on top, with room for at least
    `tail` tokens. Where a selector chooses once, it chooses anew before `drafted` more would need another buffer.
    """

    _room: int

    def __init__(
        self,
        full: FullCache,
        *,
        budget: int,
        chunk: int,
        selection: Selection,
        kernels: Kernels | Card = NONE,
        tail: int = TAIL_TOKENS,
        drafted: int = 0,
    ) -> None:
        self.full, self._tail, self._drafted = full, tail, drafted
        self._kernels = kernels
        self._spans = decode_attention(kernels, full.rope, dtype=full.shape.dtype)
        self._places = Places(full.rope)
        self._resize(budget, chunk)
        self._buffer: Tensor | None = None  # None: before the first pass, and where a prefill took its place
        self.selector = selection.selector()
        self.chunks: Tensor | None = None  # int64 [L, H_kv, slots filled]: the chunk in each
        self._tail_start = 0
        self._exact = 0  # tokens up to here are the full cache's, not drafted
        self.length = 0
        self._num_fetched = torch.zeros((), dtype=torch.long, device=full.device)
        self._taken = [0] * full.num_layers

    def start_over(self, selector: Selector, *, budget: int, chunk: int) -> None:
        """Hold nothing; from the next refresh on, what `selector` chooses. For benchmarks, which compare selectors."""
        self.truncate(0)
        self._drop()
        self._buffer = None
        self._resize(budget, chunk)
        self.selector = selector
        selector.forget()

    @property
    def needs_mass(self) -> bool:
        """True where `refresh` asks the full cache for masses."""
        return self.selector.needs_mass

    @property
    def num_chunks(self) -> int:
        """Chunks that the last choice was made among: all before the tail."""
        return self._tail_start // self.chunk

    @property
    def num_fetched(self) -> int:
        """Chunks that crossed from the full cache, of all layers and heads. On a card the host waits for this."""
        return int(self._num_fetched)

    def begin(self, phase: Phase, num_rows: int) -> None:
        self._taken = [0] * self.full.num_layers
        self._open()
        self._reserve(self.length + num_rows - self._tail_start)
        self._places.set(self.length, self._num_filled * self.chunk + self.length - self._tail_start, num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Cache`."""
        start, num_rows = self.length + self._taken[layer], q.shape[0]
        self._taken[layer] += num_rows
        at = self._num_filled * self.chunk + start - self._tail_start
        if self._spans is not None and num_rows <= FEW_ROWS:
            return self._attend_spans(self._spans, layer, Rows(q, k, v, start, at, places=self._places.on_card()))
        places = self._places.rows(start - self.length, num_rows)
        table = places.table()
        places.write((rotate(k, *table), v), self._held[layer])
        query = fold(rotate(q, *table), k.shape[1])
        # All slots, the empty ones hidden: a slice of the buffer would be copied by the matrix product, every pass.
        keys, values = self._held[layer, :, None]
        return unfold(attend(query, keys, values, places.up_to_own(query.shape[1] // num_rows)).out, num_rows).to(
            q.dtype
        )

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens

    def truncate(self, length: int) -> None:
        """Chunks chosen past `length` go too: then the cache is empty until the next `refresh`."""
        self._taken = [0] * self.full.num_layers
        if length < self._exact:
            self.selector.forget()
        if length < self._tail_start:
            self._drop()
            length = 0
        self.length = min(self.length, length)
        self._exact = min(self._exact, length)

    def release(self) -> None:
        """The cache is not used again."""
        self.truncate(0)
        self._buffer = None

    @property
    def graph_memory(self) -> Hashable:
        """See `Cache`: the buffer's place and size. It is given up to every prefill, and had again at the same place
        as a rule; whatever else a pass uses is had once, or made anew in each."""
        return self._held.data_ptr(), self._held.shape

    def nbytes(self) -> int:
        return math.prod(self._size) * self.full.shape.dtype.itemsize

    def prepare(self, num_rows: int, *, wanted: bool) -> bool:
        """After a verification whose first `num_rows` rows stay: refresh, if that is wanted and possible. Returns
        whether it was.

        It is possible where the verification recorded masses, or none are needed; the next one records them where this
        cache is wanted now.
        """
        ready = wanted and (self.full.record_mass or not self.needs_mass)
        self.full.record_mass = wanted
        if ready:
            self.refresh(num_rows)
        return ready

    @torch.inference_mode()
    def refresh(self, num_rows: int) -> None:
        """Fetch the chunks that the last verification attended to most; the tokens of its first `num_rows` rows stayed.

        The full cache has been truncated to the verified tokens; this cache then has exactly these.
        """
        self._open()
        length, chunks, wanted = self.full.length, self.chunks, None
        outgrown = length + self._drafted - self._tail_start > self._room
        if self.selector.selects_anew or self.chunks is None or outgrown:
            self._tail_start = length // self.chunk * self.chunk
            self._exact = self._tail_start
            slots = self._choose(num_rows)
            chunks, wanted = (None, None) if slots is None else (slots.held, slots.wanted)
        self._fill(length, chunks, wanted)

    def _attend_spans(self, spans: DecodeAttention, layer: int, rows: Rows) -> Tensor:
        stop = rows.index + rows.q.shape[0]
        if rows.places is not None:
            stop = self._held.shape[3]  # a graph is used when there are more
        run = spans.run(self._held[layer], first=0, tokens=stop, slot=0)
        spans.begin(rows, -(-stop // spans.span))
        spans.take_in(run)
        spans.attend(run)
        return spans.merge()[0]

    def _scores(self, num_rows: int) -> Tensor:
        """Scores of the whole chunks, [L, H_kv, C] fp32."""
        return self.selector.scores(self.full, num_rows, self.chunk, self.num_chunks)

    def _drop(self) -> None:
        self.chunks = None
        self._tail_start = 0

    def _choose(self, num_rows: int) -> Assignment | None:
        """Slots for the chosen chunks; None: there is no whole chunk."""
        if not self._tail_start:
            return None
        return assign(choose(self._scores(num_rows), self._num_slots), self.chunks)

    def _fill(self, length: int, chunks: Tensor | None, wanted: Tensor | None) -> None:
        """Hold `chunks` in the slots, of which those `wanted` are fetched, and exact rows for the tail up to `length`
        tokens: what the drafts left there was computed from a part of the cache."""
        self._reserve(length - self._tail_start)
        self.chunks = None  # known again when they are there: this may be broken off
        at = 0 if chunks is None else chunks.shape[-1] * self.chunk
        self._fetch.fetch(self._held, Tail(self._tail_start, self._exact, length, at), wanted)
        self.chunks = chunks
        if wanted is not None:
            self._num_fetched = self._num_fetched + (wanted >= 0).sum()
        self.length = self._exact = length

    @property
    def _num_filled(self) -> int:
        """Slots filled, the same in every layer and head."""
        return 0 if self.chunks is None else self.chunks.shape[-1]

    @property
    def _held(self) -> Tensor:
        """[L, 2, H_kv, chosen | tail, D]."""
        assert self._buffer is not None
        return self._buffer

    def _open(self) -> None:
        """Have the buffer. Where a prefill took its place, fetch what was in it to the same slots: the full cache has
        the same rows still."""
        if self._buffer is not None:
            return
        full = self.full
        full.arena.begin(self._give_up)
        self._buffer = full.arena.take(self._size, full.shape.dtype)
        known, self._exact = self._exact, self._tail_start
        if self.chunks is not None or known > self._tail_start:
            self._fill(known, self.chunks, self.chunks)

    def _give_up(self) -> None:
        """The bytes are somebody else's now. Rows that were drafted into the tail are in no other place: they are
        pending again."""
        self.length, self._buffer = self._exact, None

    def _reserve(self, tail: int) -> None:
        if tail <= self._room:
            return
        old = self._held
        self._room = -(-tail // self._room_step) * self._room_step
        self._buffer = self.full.arena.take(self._size, old.dtype)
        self._buffer[:, :, :, : old.shape[3]] = old
        self.full.arena.put_back(old)

    def _resize(self, budget: int, chunk: int) -> None:
        self.budget, self.chunk = budget, chunk
        self._num_slots = budget // chunk
        self._room_step = max(TAIL_TOKENS, chunk)  # whole chunks: then all of the buffer is
        self._room = -(-self._tail // self._room_step) * self._room_step
        self._fetch = make_fetch(self.full, chunk, self._kernels, self.nbytes())

    @property
    def _size(self) -> tuple[int, ...]:
        shape = self.full.shape
        length = self._num_slots * self.chunk + self._room
        return (self.full.num_layers, 2, shape.num_kv_heads, length, shape.head_dim)
