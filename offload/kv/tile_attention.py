"""Attention of a decode forward's rows to tiles of a layer, on the device that has them at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.kernels.device import MASS_DTYPE, DecodeAttention, DeviceKernels
from offload.kernels.rows import Blocks
from offload.kernels.spans import Rows
from offload.kv.block import Block, blocks_of
from offload.pages.access import TileAccess
from offload.pages.tiles import TileShape, write_rows


class TileAttention:
    """By the device's own kernels, else by torch's operators, in `blocks` of rows over whole tiles.

    One layer at a time: `attend`, then `merge`. New rows are written to the tiles that they fall into.
    chunk: tokens that a mass is of.
    """

    def __init__(self, shape: TileShape, blocks: Blocks, kernels: DeviceKernels, chunk: int | None) -> None:
        self._shape, self._block_sizes, self._chunk = shape, blocks, chunk
        self._spans = kernels.attention(dtype=shape.dtype, page=shape.page_tokens, chunk=chunk)
        self._rows: Rows | None = None  # of the layer under way
        self._blocks: list[Block] = []
        self._num_chunks = 0

    @property
    def by_kernels(self) -> bool:
        return self._spans is not None

    def attend(self, access: TileAccess, layer: int, rows: Rows, num_tiles: int, *, masses: bool) -> None:
        """Attend to the layer's first `num_tiles` tiles, one at least."""
        self._rows = rows
        if self._spans is not None:
            self._by_kernels(self._spans, access, layer, rows, num_tiles, masses)
        else:
            self._by_operators(access, layer, rows, num_tiles, self._chunk if masses else None)

    def merge(self) -> tuple[Tensor, Tensor | None]:
        """(out [T, H * D], mass [T, H_kv, C] as the device keeps it, or None): each row's softmax mass per chunk of the
        tiles, in their order, summed over its query group."""
        if self._spans is not None:
            return self._spans.merge()
        assert self._rows is not None
        out = joined([block.attended() for block in self._blocks]).to(self._rows.q.dtype)
        if not self._num_chunks:
            return out, None
        mass = joined([block.total_mass(self._num_chunks) for block in self._blocks])
        return out, mass.to(MASS_DTYPE) if mass.is_cuda else mass

    def _by_kernels(
        self, spans: DecodeAttention, access: TileAccess, layer: int, rows: Rows, num_tiles: int, masses: bool
    ) -> None:
        start, stop, tokens = rows.index, rows.index + len(rows.q), self._shape.tokens
        spans.begin(rows, -(-stop // spans.span), masses=masses)
        for index in range(num_tiles):
            base, used = index * tokens, min(stop - index * tokens, tokens)
            run = spans.exact_run(access.open(layer, index), first=base, tokens=used, slot=base // spans.span)
            if base + tokens > start:
                spans.append_rows(run)
                access.wrote(layer, index, max(start - base, 0), used)
            spans.attend(run)
            access.close(layer, index)

    def _by_operators(self, access: TileAccess, layer: int, rows: Rows, num_tiles: int, chunk: int | None) -> None:
        start = rows.index
        q, k = rows.scoring.rotated(rows.q, rows.k, start)
        sizes = self._block_sizes.cut(len(q))
        self._blocks = blocks_of(q, start, self._shape.num_kv_heads, rows.scoring, sizes)
        self._num_chunks = num_tiles * self._shape.tokens // chunk if chunk else 0
        for index in range(num_tiles):
            base, tile = index * self._shape.tokens, access.open(layer, index)
            first, stop = write_rows(tile, base, start, k, rows.v)
            if first < stop:
                access.wrote(layer, index, first, stop)
            for block in self._blocks:
                block.attend_fixed(tile, base, chunk=chunk)
            access.close(layer, index)


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Rows of blocks, one block after the other."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
