"""Attention beside a GPU: the CPU attends to tiles on the host while the GPU attends to the others.

In a layer the rows leave for the host first, then the GPU's work is launched; the host waits for the rows, attends,
and sends what it has to the GPU, where both are joined: the GPU's tiles first, whenever either was ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.attention import Part, join
from offload.kernels.device import MASS_DTYPE
from offload.kernels.rope import RopeTable, Scoring
from offload.kernels.spans import Rows
from offload.kv.tile_attention import TileAttention
from offload.pages.access import TileAccess
from offload.pages.tiles import TileStore
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory


class HostAttention:
    """Attends for `GPU` to tiles whose place is "host", by `host`, with the CPU's copy of a layer's rotary table."""

    def __init__(
        self,
        memory: Memory,
        store: TileStore,
        link: Link,
        *,
        gpu: TileAttention,
        host: TileAttention,
        chunk: int | None,
    ) -> None:
        self._store, self._link, self._gpu, self._host, self._chunk = store, link, gpu, host, chunk
        self._here, self._result = _Pinned(memory), _Pinned(memory)
        self._sent: _Sent | None = None
        self._scorings: dict[int, tuple[Scoring, Scoring]] = {}  # by the device's
        self._tables: dict[int, RopeTable] = {}  # likewise; scorings keep the device's

    def attend(
        self, access: TileAccess, layer: int, rows: Rows, tiles: Sequence[int], *, masses: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `TileAttention.merge`; masses are of whole tiles."""
        held = [index for index in tiles if self._store.place(layer, index) == "host"]
        others = [index for index in tiles if self._store.place(layer, index) != "host"]
        if held:
            self._send(rows)
        if others:
            self._gpu.attend(access, layer, rows, others, masses=masses)
        out, mass = self._joined(access, layer, rows, held, others, masses) if held else self._gpu.merge()
        access.end_layer()
        if mass is None or self._chunk is None:
            return out, None
        return out, pad(mass, (0, len(tiles) * self._store.shape.tokens // self._chunk - mass.shape[-1]))

    def release(self) -> None:
        """Give its memory back; it is not used again."""
        self._settle()
        for pinned in (self._here, self._result):
            pinned.release()

    def _joined(
        self, access: TileAccess, layer: int, rows: Rows, held: Sequence[int], others: Sequence[int], masses: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out [T, H * D], mass [T, H_kv, C] or None) of both."""
        self._host.attend(access, layer, self._received(rows), held, masses=masses)
        part = self._returned(self._host.part(), rows.q.device)
        if others:
            before = sum(index < held[0] for index in others) * self._store.shape.tokens
            part = join(self._gpu.part(), part, before // self._chunk if self._chunk else 0)
        out = part.out.flatten(1).to(rows.q.dtype)
        if part.mass is None:
            return out, None
        return out, part.mass.unflatten(1, (self._store.shape.num_kv_heads, -1)).sum(2).to(MASS_DTYPE)

    def _send(self, rows: Rows) -> None:
        """The rows' queries, keys and values are on their way to the host."""
        self._settle()
        packed = torch.cat([rows.q, rows.k, rows.v], 1)
        there = self._here.tensor(tuple(packed.shape), packed.dtype)
        self._sent = _Sent(packed, there, self._link.to_host(there, packed, (self._link.record(),)))

    def _received(self, rows: Rows) -> Rows:
        """`rows` in the host's memory, when they are there."""
        assert self._sent is not None
        self._sent.arrived.synchronize()
        q, k, v = self._sent.there.split([rows.q.shape[1], rows.k.shape[1], rows.v.shape[1]], 1)
        self._sent = None
        return Rows(q, k, v, self._on_host(rows.scoring), rows.position, rows.index, rows.window)

    def _on_host(self, scoring: Scoring) -> Scoring:
        """The same in the host's memory. Layers that share a table share its copy."""
        if id(scoring) not in self._scorings:
            kept = id(scoring.rope)
            if kept not in self._tables:
                self._tables[kept] = scoring.rope.to("cpu")
            self._scorings[id(scoring)] = scoring, scoring.to("cpu", self._tables[kept])
        return self._scorings[id(scoring)][1]

    def _settle(self) -> None:
        """A forward that was broken off may have left rows on their way."""
        if self._sent is not None:
            self._sent.arrived.synchronize()
            self._sent = None

    def _returned(self, part: Part, device: torch.device) -> Part:
        """`part` on the GPU. By the stream that computes and not by the link, where tiles of later layers wait for
        their turn. The GPU has read what was sent for the layer before: this layer's rows came after it."""
        tensors = [tensor for tensor in (part.out, part.lse, part.mass) if tensor is not None]
        packed = self._result.tensor((sum(tensor.numel() for tensor in tensors),), torch.float32)
        torch.cat([tensor.flatten() for tensor in tensors], out=packed)
        there = torch.empty_like(packed, device=device).copy_(packed, non_blocking=True)
        pieces = there.split([tensor.numel() for tensor in tensors])
        return Part(*[piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)])


@dataclass(frozen=True)
class _Sent:
    """Rows on their way: `packed` on the GPU stays until they have `arrived` at `there`."""

    packed: Tensor
    there: Tensor
    arrived: Event


class _Pinned:
    """A block of host memory that is as large as was ever asked for."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._block = self._allocated(0)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The block's first bytes, which nothing uses any more."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > self._block.nbytes:
            self.release()
            self._block = self._allocated(num_bytes)
        return self._block[:num_bytes].view(dtype).view(shape)

    def release(self) -> None:
        self._memory.released(self._block, tier="host", purpose="host attention")
        self._block = torch.empty(0, dtype=torch.uint8)

    def _allocated(self, num_bytes: int) -> Tensor:
        return self._memory.allocate((num_bytes,), torch.uint8, tier="host", purpose="host attention")
