"""Chunks and the tail of the retrieval cache, brought from the full cache: by the host, or by a card's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.cache.full import FullCache
from offload.kernels.card import Card
from offload.kernels.native import Kernels
from offload.plan.sizing import FETCH_BYTES
from offload.transfer.memory import kernels_read_host, sent


@dataclass(frozen=True)
class Tail:
    """Tokens `start` to `stop` of the sequence, `first` is the first of the tail, at the beginning of a chunk. at: row
    of the first in the buffer of each KV head, likewise."""

    first: int
    start: int
    stop: int
    at: int


class Fetch(Protocol):
    """Fills a buffer [L, 2, H_kv, rows, D] of the device from the full cache's homes."""

    def fetch(self, held: Tensor, tail: Tail, wanted: Tensor | None = None) -> None:
        """Bring the tail's tokens from `start` to `stop` to `held` and, with `wanted`, int64 [L, H_kv, n], chunk
        wanted[l, h, s] to slot s of KV head h in layer l. A negative one brings nothing.

        The homes may still be written to by copies that are under way: this is ordered after them.
        """
        ...

    def tokens(self, start: int, stop: int) -> Tensor:
        """Tokens `start` to `stop`, whole chunks, in memory of their own: [L, 2, H_kv, stop - start, D]. Ordered as
        `fetch`."""
        ...


class HostFetch:
    """The host looks which chunks are wanted, gathers them in pinned memory and copies that over the link."""

    def __init__(self, full: FullCache, chunk: int, num_bytes: int) -> None:
        """num_bytes: of the buffer."""
        self._full, self._chunk = full, chunk
        full.reader.reserve(min(FETCH_BYTES, num_bytes))

    def fetch(self, held: Tensor, tail: Tail, wanted: Tensor | None = None) -> None:
        """See `Fetch`."""
        if wanted is None:
            self._full.wait_home()
        else:
            self._full.follow_home()
            self._fetch_chunks(held, wanted.cpu())  # on a card the host waits here, for the homes too
        self._fetch_tail(held, tail)

    def tokens(self, start: int, stop: int) -> Tensor:
        """See `Fetch`."""
        self._full.wait_home()
        return self._full.reader.tokens(start, stop)

    def _fetch_chunks(self, held: Tensor, wanted: Tensor) -> None:
        """A part at a time, so that what is on its way never takes much room."""
        layers, heads, slots = torch.where(wanted >= 0)
        chunks = wanted[layers, heads, slots]
        most = max(FETCH_BYTES // (2 * self._chunk * held.shape[4] * held.itemsize), 1)
        for part in zip(*(index.split(most) for index in (layers, heads, slots, chunks)), strict=True):
            if part[0].numel():
                self._fetch_part(held, *part)

    def _fetch_part(self, held: Tensor, layers: Tensor, heads: Tensor, slots: Tensor, chunks: Tensor) -> None:
        order, rows = self._full.reader.chunks(layers, heads, chunks, self._chunk)
        _, _, num_heads, num_rows, head_dim = held.shape
        per_head = num_rows // self._chunk
        at = sent((((layers * 2 * num_heads + heads) * per_head) + slots)[order], held.device)
        runs = held.view(-1, self._chunk * head_dim)
        for kind in range(2):  # keys, then values: all heads further
            runs.index_copy_(0, at + kind * num_heads * per_head, rows[kind])

    def _fetch_tail(self, held: Tensor, tail: Tail) -> None:
        """A part at a time, too."""
        token_bytes = held[:, :, :, 0].numel() * held.itemsize
        step = max(FETCH_BYTES // token_bytes, 1)
        for start in range(tail.start, tail.stop, step):
            stop, at = min(start + step, tail.stop), tail.at + start - tail.first
            held[:, :, :, at : at + stop - start] = self._full.reader.tokens(start, stop)


class CardFetch:
    """A kernel reads the homes itself, those in pinned memory of the host too, and skips the slots whose chunk stays:
    a launch for chunks and one for the tail, of all layers. The host looks at nothing and waits for nothing.

    They run on the stream that computes: a retrieval pass, which is next but for a short draft, needs them all.
    """

    def __init__(self, full: FullCache, chunk: int) -> None:
        from offload.kernels.card.fetch import ChunkCopy  # it imports Triton, which not every machine has
        from offload.kernels.card.packed import PackedChunkCopy

        self._full, self._chunk = full, chunk
        page, packed = full.shape.page_tokens, full.packed
        if packed is None:
            copy = ChunkCopy(chunk=chunk, page=page, tile=full.shape.tokens)
            self._run: Callable[..., None] = lambda *args, **more: copy.run(full.store.addresses(), *args, **more)
        else:
            there, of_packed = packed.table.there, PackedChunkCopy(packed.codec.packing, chunk=chunk, page=page)
            self._run = lambda *args, **more: of_packed.run(there().blocks, there().flags, *args, **more)

    def fetch(self, held: Tensor, tail: Tail, wanted: Tensor | None = None) -> None:
        """See `Fetch`."""
        self._full.follow_home()
        if wanted is not None:
            self._run(wanted, held)
        if tail.start < tail.stop:
            numbers = torch.arange(tail.start // self._chunk, -(-tail.stop // self._chunk), device=held.device)
            slot = (tail.at + tail.start - tail.first) // self._chunk
            self._run(numbers, held, slot=slot, tokens=range(tail.start, tail.stop))
        self._full.read_home()

    def tokens(self, start: int, stop: int) -> Tensor:
        """See `Fetch`."""
        shape = self._full.shape
        size = (self._full.num_layers, 2, shape.num_kv_heads, stop - start, shape.head_dim)
        rows = torch.empty(size, dtype=shape.dtype, device=self._full.device)
        self.fetch(rows, Tail(start, start, stop, 0))
        return rows


def make_fetch(full: FullCache, chunk: int, kernels: Kernels | Card, num_bytes: int) -> Fetch:
    """By the card's kernel where it has one and reaches all homes. num_bytes: of the buffer."""
    if isinstance(kernels, Card) and kernels.usable and (full.all_on_device or kernels_read_host(full.device)):
        return CardFetch(full, chunk)
    return HostFetch(full, chunk, num_bytes)
