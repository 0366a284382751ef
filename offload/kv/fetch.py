"""Chunks and the tail of the retrieval cache, brought from the full cache: by the host, or by a GPU's own kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.formats.layout import RESIDUAL
from offload.formats.quantised_kv import KVCodes
from offload.kernels.device import Copies, DeviceKernels
from offload.kv.full import FullCache
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
    """Fills a buffer [L, 2, H_kv, rows, D] of the device from the full cache's homes. Its layers need not be those that
    have a home: `reads` of the classes below says for each the one with its keys and values."""

    def fetch(self, held: Tensor, tail: Tail, wanted: Tensor | None = None) -> None:
        """Bring the tail's tokens from `start` to `stop` to `held` and, with `wanted`, int64 [L, H_kv, n], chunk
        wanted[l, h, s] to slot s of KV head h in layer l. A negative one brings nothing.

        The homes may still be written to by copies that are under way: this is ordered after them.
        """
        ...

    def encode(self, codes: KVCodes, wanted: Tensor) -> None:
        """Bring the codes in 4 bits of chunk wanted[l, h, s] to group s of KV head h in layer l. Ordered as `fetch`;
        chunks are groups of tokens that share a step."""
        ...

    def tokens(self, start: int, stop: int) -> Tensor:
        """Tokens `start` to `stop`, whole chunks, in memory of their own: [L, 2, H_kv, stop - start, D]. Ordered as
        `fetch`."""
        ...


class HostFetch:
    """`Fetch` by the host, which reads which chunks are wanted, gathers them in pinned memory and copies that memory
    over the link."""

    def __init__(
        self, full: FullCache, chunk: int, kernels: DeviceKernels, num_bytes: int, reads: Sequence[int]
    ) -> None:
        """num_bytes: of the buffer. kernels: that encode."""
        self._full, self._chunk, self._kernels = full, chunk, kernels
        self._reads = torch.tensor(reads, dtype=torch.long)
        full.pages.reader.reserve(min(FETCH_BYTES, num_bytes))

    def fetch(self, held: Tensor, tail: Tail, wanted: Tensor | None = None) -> None:
        if wanted is None:
            self._full.pages.wait_home()
        else:
            self._full.pages.follow_home()
            self._fetch_chunks(held, wanted.cpu())  # on a GPU the host waits here, for the homes too
        _read_tail(self._full, held, tail, self._reads)

    def tokens(self, start: int, stop: int) -> Tensor:
        self._full.pages.wait_home()
        return _of_layers(self._full.pages.reader.tokens(start, stop), self._reads)

    def encode(self, codes: KVCodes, wanted: Tensor) -> None:
        self._full.pages.follow_home()
        _, num_heads, num_groups, num_bytes = codes.blocks.shape
        blocks = codes.blocks.view(-1, num_bytes)
        for layers, heads, slots, rows in self._chunks(wanted.cpu()):
            own = torch.empty_like(blocks[: len(slots)]).view(1, -1, 1, num_bytes)  # each chunk as a head of its own
            self._kernels.quantise_kv(rows.unflatten(2, (self._chunk, -1))[None], replace(codes, blocks=own))
            at = sent((layers * num_heads + heads) * num_groups + slots, blocks.device)
            blocks.index_copy_(0, at, own.view(-1, num_bytes))

    def _fetch_chunks(self, held: Tensor, wanted: Tensor) -> None:
        _, _, num_heads, num_rows, head_dim = held.shape
        per_head, runs = num_rows // self._chunk, held.view(-1, self._chunk * head_dim)
        for layers, heads, slots, rows in self._chunks(wanted):
            at = sent((layers * 2 * num_heads + heads) * per_head + slots, held.device)
            for kind in range(2):  # keys, then values: all heads further
                runs.index_copy_(0, at + kind * num_heads * per_head, rows[kind])

    def _chunks(self, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Layers, heads and slots of wanted chunks, and their rows [2, n, chunk * D] on the device: a part at a time,
        so that what is on its way never takes much room."""
        shape = self._full.shape
        layers, heads, slots = torch.where(wanted >= 0)
        chunks = wanted[layers, heads, slots]
        most = max(FETCH_BYTES // (2 * self._chunk * shape.head_dim * shape.dtype.itemsize), 1)
        for part in zip(*(index.split(most) for index in (layers, heads, slots, chunks)), strict=True):
            if part[0].numel():
                order, rows = self._full.pages.reader.chunks(self._reads[part[0]], part[1], part[3], self._chunk)
                yield part[0][order], part[1][order], part[2][order], rows


class GpuFetch:
    """`Fetch` by a GPU's kernel, which reads the homes itself, pinned memory of the host included, and skips the slots
    whose chunk stays. One launch copies the chunks of all layers, and one their tail. The host reads no tensor of the
    GPU and waits for none, unless pages of the tail are residuals.

    Both launches run on the stream that computes: the next pass but for a short draft is a retrieval pass, which needs
    all copied rows.
    """

    def __init__(self, full: FullCache, chunk: int, copies: Copies, reads: Sequence[int]) -> None:
        self._full, self._chunk, self._copies = full, chunk, copies
        self._reads = torch.tensor(reads, dtype=torch.long, device=full.device)

    def fetch(self, held: Tensor, tail: Tail, wanted: Tensor | None = None) -> None:
        self._full.pages.follow_home()
        if wanted is not None:
            self._copy(wanted, held)
        if tail.start < tail.stop:
            self._fetch_tail(held, tail)
        self._full.pages.read_home()

    def encode(self, codes: KVCodes, wanted: Tensor) -> None:
        """See `Fetch`. Slots are encoded in parts, FETCH_BYTES of keys and values or one slot each at most, by two
        launches a part: one copies the wanted chunks, one encodes them. The host does not read which chunks are
        wanted."""
        self._full.pages.follow_home()
        shape, num_layers = self._full.shape, len(self._reads)
        slot_bytes = num_layers * 2 * shape.num_kv_heads * self._chunk * shape.head_dim * shape.dtype.itemsize
        most = min(max(FETCH_BYTES // slot_bytes, 1), wanted.shape[-1])
        rows = self._rows(most * self._chunk)
        for first in range(0, wanted.shape[-1], most):
            part = wanted[..., first : first + most].contiguous()
            own = codes.groups(first, first + part.shape[-1])
            self._copy(part, rows)
            self._copies.quantise_kv(rows[:, :, :, : part.shape[-1] * self._chunk], own, part)
        self._full.pages.read_home()

    def tokens(self, start: int, stop: int) -> Tensor:
        rows = self._rows(stop - start)
        self.fetch(rows, Tail(start, start, stop, 0))
        return rows

    def _fetch_tail(self, held: Tensor, tail: Tail) -> None:
        if self._lie_beside_codes(tail):
            self._full.pages.wait_home()
            _read_tail(self._full, held, tail, self._reads)
            return
        numbers = torch.arange(tail.start // self._chunk, -(-tail.stop // self._chunk), device=held.device)
        slot = (tail.at + tail.start - tail.first) // self._chunk
        self._copy(numbers, held, slot=slot, tokens=range(tail.start, tail.stop))

    def _lie_beside_codes(self, tail: Tail) -> bool:
        """Whether pages of the tail are residuals, which the kernel does not restore: where a text was cut, some of the
        last tokens were codes before."""
        packed, page = self._full.pages.packed, self._full.shape.page_tokens
        if packed is None:
            return False
        return bool((packed.table.flags[:, tail.start // page : -(-tail.stop // page)] == RESIDUAL).any())

    def _copy(self, wanted: Tensor, held: Tensor, **more: Any) -> None:
        """Copy chunks from their homes, raw or packed, to `held`. more: `slot` and `tokens` of
        `kernels.gpu.copies.chunks`."""
        full, packed, reads = self._full, self._full.pages.packed, self._reads
        more |= {"chunk": self._chunk, "page": full.shape.page_tokens}
        if packed is None:
            addresses = _of_layers(full.pages.store.addresses(), reads)
            self._copies.chunks(addresses, wanted, held, tile=full.shape.tokens, **more)
        else:
            table, packing = packed.table.on_device(), packed.codec.packing
            blocks, flags = _of_layers(table.blocks, reads), _of_layers(table.flags, reads)
            self._copies.packed_chunks(blocks, flags, wanted, held, packing, **more)

    def _rows(self, num_tokens: int) -> Tensor:
        """[L, 2, H_kv, num_tokens, D], not filled."""
        full, shape = self._full, self._full.shape
        size = (len(self._reads), 2, shape.num_kv_heads, num_tokens, shape.head_dim)
        return torch.empty(size, dtype=shape.dtype, device=full.device)


def _of_layers(of_homes: Tensor, reads: Tensor) -> Tensor:
    """Values of the layers with a home, [L, ...], for each layer that reads one; themselves where each has its own."""
    return of_homes if len(of_homes) == len(reads) else of_homes[reads.to(of_homes.device)]


def _read_tail(full: FullCache, held: Tensor, tail: Tail, reads: Tensor) -> None:
    """Copy the tail's tokens from `start` to `stop` to `held` by the host, at most FETCH_BYTES or one token at a
    time."""
    step = max(FETCH_BYTES // (held[:, :, :, 0].numel() * held.itemsize), 1)
    for start in range(tail.start, tail.stop, step):
        stop, at = min(start + step, tail.stop), tail.at + start - tail.first
        held[:, :, :, at : at + stop - start] = _of_layers(full.pages.reader.tokens(start, stop), reads)


def copies_of(full: FullCache, kernels: DeviceKernels) -> Copies | None:
    """The copies by the device's kernels; None where there are none, or where they do not reach all homes."""
    reaches = kernels.copies is not None and (full.pages.all_on_device or kernels_read_host(full.device))
    return kernels.copies if reaches else None


def make_fetch(full: FullCache, chunk: int, kernels: DeviceKernels, num_bytes: int, reads: Sequence[int] = ()) -> Fetch:
    """A `Fetch` by the GPU's kernel, if the device has one and the kernel reaches all homes; otherwise by the host.
    num_bytes: of the buffer. reads: of its layers, see `Fetch`; (): it has those with a home."""
    reads = reads or range(full.num_layers)
    if (copies := copies_of(full, kernels)) is not None:
        return GpuFetch(full, chunk, copies, reads)
    return HostFetch(full, chunk, kernels, num_bytes, reads)
