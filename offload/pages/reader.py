"""Reads of the full cache's rows to the device, from homes on the device or on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload.pages.codec import PageCodec
from offload.pages.packed import PackedPages
from offload.pages.tiles import Place, TileStore
from offload.transfer.link import Link
from offload.transfer.memory import Memory, sent


@dataclass(frozen=True)
class _Piece:
    """Rows of one tile. rows: their destination on the device. place: of the tile. write: writes them to a tensor."""

    rows: Tensor
    place: Place
    write: Callable[[Tensor], None]


class RowReader:
    """Reads chunks and ranges of tokens. The homes must be up to date: `FullCache.wait_home`.

    Rows of tiles on the host are gathered there first and cross the link in one copy.
    """

    def __init__(self, store: TileStore, memory: Memory, link: Link | None, packed: PackedPages | None = None) -> None:
        self._store, self._memory, self._link, self._packed = store, memory, link, packed
        self._gathered: Tensor | None = None

    def reserve(self, num_bytes: int) -> None:
        """Allocate host memory for reads of `num_bytes` bytes, so that no refresh has to wait for pinning."""
        if self._link is not None:
            self._staging(num_bytes // self._store.shape.dtype.itemsize)

    def release(self) -> None:
        """Release the host memory; the next read allocates it again."""
        if self._gathered is not None:
            self._memory.released(self._gathered, tier="host", purpose="gathered chunks")
            self._gathered = None

    def chunks(self, layers: Tensor, heads: Tensor, chunks: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """Chunk `chunks[i]` (of `chunk` tokens) of KV head `heads[i]` in layer `layers[i]`, as (order, rows).

        rows [2, n, chunk * D] on the device, keys and values, tile by tile: row j is the chunk asked for at order[j].
        The other tensors are on the host.
        """
        shape, device = self._store.shape, self._memory.device
        per_tile, per_page = shape.tokens // chunk, shape.page_tokens // chunk
        num_tiles = self._store.num_tiles
        key, order = (layers * num_tiles + chunks // per_tile).sort()
        within, head = (chunks % per_tile)[order], heads[order]
        # A chunk's keys are one run of the tile's bytes; its values are another run, half a tile further.
        run = ((within // per_page) * shape.num_kv_heads + head) * per_page + within % per_page
        run_there = sent(run, device) if self._store.num_resident(0) else run
        half = per_tile * shape.num_kv_heads
        rows = torch.empty((2, len(run), chunk * shape.head_dim), dtype=shape.dtype, device=device)
        pieces, at = [], 0
        groups, sizes = key.unique_consecutive(return_counts=True)
        for group, number in zip(groups.tolist(), sizes.tolist(), strict=True):
            layer, index = divmod(group, num_tiles)
            for kind in range(2):
                place, own = self._store.place(layer, index), run[at : at + number]
                if self._packed is not None and place == "stream":
                    write = partial(self._packed.codec.chunks, layer, index, kind, own)
                else:
                    tile = self._store.home(layer, index).view(2 * half, -1)
                    own = own if tile.device.type == "cpu" else run_there[at : at + number]
                    write = partial(_select, tile, own + kind * half)
                pieces.append(_Piece(rows[kind, at : at + number], place, write))
            at += number
        self._collect(pieces)
        return order, rows

    def tokens(self, start: int, stop: int) -> Tensor:
        """Keys and values of tokens start to stop in all layers -> [L, 2, H_kv, stop - start, D] on the device."""
        store, shape = self._store, self._store.shape
        size = (store.num_layers, 2, shape.num_kv_heads, stop - start, shape.head_dim)
        rows = torch.empty(size, dtype=shape.dtype, device=self._memory.device)
        pieces, position = [], start
        while position < stop:
            index, within = divmod(position, shape.tokens)
            number, offset = divmod(within, shape.page_tokens)
            count = min(shape.page_tokens - offset, stop - position)
            for layer in range(store.num_layers):
                own = rows[layer, :, :, position - start : position - start + count]
                place = store.place(layer, index)
                if self._packed is not None and place == "stream":
                    page = index * shape.num_pages + number
                    write = partial(_read_page, self._packed.codec, layer, page, slice(offset, offset + count))
                else:
                    write = partial(_copy, store.home(layer, index)[:, number, :, offset : offset + count])
                pieces.append(_Piece(own, place, write))
            position += count
        self._collect(pieces)
        return rows

    def _collect(self, pieces: Sequence[_Piece]) -> None:
        """Fill every piece's rows. All rows of tiles on the host cross the link in one copy."""
        for piece in pieces:
            if piece.place == "device":
                piece.write(piece.rows)
        away = [piece for piece in pieces if piece.place != "device"]
        if self._link is None or not away:
            return
        sizes = [piece.rows.numel() for piece in away]
        staged = self._staging(sum(sizes))
        for part, piece in zip(staged.split(sizes), away, strict=True):
            piece.write(part.view(piece.rows.shape))
        arrived = torch.empty_like(staged, device=self._memory.device)
        self._link.to_device(arrived, staged, (self._link.record(),)).synchronize()  # the next call reuses `staged`
        for part, piece in zip(arrived.split(sizes), away, strict=True):
            piece.rows.copy_(part.view(piece.rows.shape))

    def _staging(self, num_elements: int) -> Tensor:
        """Host memory in which rows are gathered before they cross the link."""
        if self._gathered is None or self._gathered.numel() < num_elements:
            self.release()
            size = (num_elements,)
            self._gathered = self._memory.allocate(
                size, self._store.shape.dtype, tier="host", purpose="gathered chunks"
            )
        return self._gathered[:num_elements]


def _select(tile: Tensor, runs: Tensor, out: Tensor) -> None:
    torch.index_select(tile, 0, runs, out=out)


def _read_page(codec: PageCodec, layer: int, number: int, tokens: slice, out: Tensor) -> None:
    out.copy_(codec.tokens(layer, number, tokens.start, tokens.stop))


def _copy(rows: Tensor, out: Tensor) -> None:
    out.copy_(rows)
