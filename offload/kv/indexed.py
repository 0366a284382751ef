"""The indexed cache: a full cache whose rows attend to the blocks of tokens that an index chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.pooled import IndexRows
from offload.kernels.runs import Chosen, Rows, Run
from offload.kv import Phase
from offload.kv.block_cache import PURPOSE, BlockCache
from offload.kv.block_index import BlockIndex
from offload.kv.full import FullCache
from offload.pages.tiles import TileShape
from offload.plan.sizing import CHOOSING_ROWS
from offload.transfer.memory import Memory


class IndexedCache(FullCache):
    """Keys and values of all tokens as in a full cache, and the index of their blocks. A row attends to the same tokens
    in phases "prefill" and "decode", by the same kernels: its bits are the same in both. Up to `Indexer.most_tokens`
    tokens it attends to all of them, with the bits of a full cache.

    Where keys and values are on the host, in phase "decode" the blocks that rows choose cross the link to a block
    cache, and new rows go home from there; in phase "prefill" all tiles of a layer do."""

    def __init__(
        self, memory: Memory, shape: TileShape, *, index: BlockIndex, block_slots: int = 0, **others: Any
    ) -> None:
        """index: of its sequence. block_slots: of each layer, where keys and values are on the host. others: of
        `FullCache`."""
        super().__init__(memory, shape, **others)
        kernels: DeviceKernels = others.get("kernels", NONE)
        self.index, self._choose = index, kernels.choose
        self.blocks: BlockCache | None = None
        if block_slots:
            self.blocks = BlockCache(memory, self, index.indexer.ratio, block_slots, kernels)
            size = 2, 1, shape.num_kv_heads, CHOOSING_ROWS, shape.head_dim
            self._new = memory.allocate(size, shape.dtype, tier="device", purpose=PURPOSE)

    def reserve(self, num_tokens: int) -> None:
        super().reserve(num_tokens)
        self.index.reserve(num_tokens)

    def begin(self, phase: Phase, num_rows: int, *, ahead: bool = False) -> None:
        super().begin(phase, num_rows, ahead=ahead)
        self.index.reserve(self.length + num_rows)
        self.index.begin(self.length, num_rows)
        if self.blocks is not None:
            self.blocks.reserve(self.length + num_rows)
            if phase == "prefill":
                self.blocks.forget(self.length // self.blocks.size)

    def attend_chosen(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexRows) -> Tensor:
        """As `attend`, over what the index chooses for each row."""
        if self._phase is None:
            raise RuntimeError("attend outside a forward: call begin first")
        start = self._start + self._taken[layer]
        self._taken[layer] += len(q)
        queries, keys = self.index.add(layer, start, index)
        every, found = Rows(q, k, v, self.scorings[layer], start, start), []
        for first in range(0, len(q), CHOOSING_ROWS):
            own = slice(first, first + CHOOSING_ROWS)
            rows = _some(every, own)
            chosen = self._choice(queries[own], keys, rows.index)
            if self.blocks is not None and self._phase == "decode":
                found += self._by_blocks(self.blocks, layer, rows, chosen)
            else:
                found.append(self._over_tiles(self._phase, layer, rows, chosen))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _over_tiles(self, phase: Phase, layer: int, rows: Rows, chosen: Chosen) -> Tensor:
        """The attention of a few rows over what they choose of all tiles, which are on the device."""
        attention, access, tokens = self._attention, self.pages.access[phase], self.shape.tokens
        start, stop = rows.index, rows.index + len(rows.q)
        attention.begin(rows, [self.index.indexer.most_tokens])
        runs = list[Run]()
        for number in range(self.shape.count(stop)):
            base = number * tokens
            run = Run(access.open(layer, number), min(stop - base, tokens), base)
            if base + tokens > start:
                attention.append_rows(run)
                access.wrote(layer, number, max(start - base, 0), min(stop - base, tokens))
            runs.append(run)
            access.close(layer, number)
        attention.attend_chosen(runs, chosen)
        return attention.merge()[0]

    def _by_blocks(self, blocks: BlockCache, layer: int, rows: Rows, chosen: Chosen) -> list[Tensor]:
        """The attention of a few rows over what they choose, in the slots of `blocks`: of so many rows at a time that
        all have room."""
        start, stop = rows.index, rows.index + len(rows.q)
        new = torch.arange(start // blocks.size, -(-stop // blocks.size), device=chosen.blocks.device)
        wanted = torch.cat([chosen.blocks.flatten().long(), new]).unique()
        wanted = wanted[wanted >= 0]
        if len(wanted) > blocks.num_slots:
            assert len(rows.q) > 1, f"a row wants {len(wanted)} blocks, and there are {blocks.num_slots} slots"
            middle = len(rows.q) // 2
            halves = [slice(0, middle), slice(middle, None)]
            parts = ((_some(rows, half), chosen.of_rows(half)) for half in halves)
            return [out for part in parts for out in self._by_blocks(blocks, layer, *part)]
        blocks.slots(layer, wanted, start)
        self._attention.begin(rows, [self.index.indexer.most_tokens])
        self._attention.append_rows(Run(self._new, len(rows.q), start))
        own = self._new[:, 0, :, : len(rows.q)]
        blocks.write(layer, start, own)
        self.pages.write_rows(layer, start, own)
        places = replace(chosen, blocks=blocks.places(layer, chosen.blocks.long()).to(chosen.blocks.dtype))
        self._attention.attend_chosen([blocks.run(layer)], places)
        return [self._attention.merge()[0]]

    def _choice(self, queries: Tensor, keys: Tensor, start: int) -> Chosen:
        """The blocks of rows at `start` and on: those that are chosen among the whole ones, and the incomplete one."""
        indexer = self.index.indexer
        seen = torch.arange(start + 1, start + 1 + len(queries), device=queries.device)
        visible, rest = seen // indexer.ratio, seen % indexer.ratio
        blocks = self._choose(queries, keys, visible, indexer.most_blocks)
        blocks = torch.cat([blocks, blocks.new_full((len(blocks), 1), -1)], 1)
        count = visible.clamp(max=indexer.most_blocks)
        last = torch.where(rest > 0, visible, -1).to(blocks.dtype)
        blocks.scatter_(1, count[:, None], last[:, None])
        form = self.shape.num_pages, self.shape.page_tokens
        return Chosen(blocks, (count * indexer.ratio + rest).to(torch.int32), indexer.ratio, form)

    def restored(self, length: int) -> None:
        super().restored(length)
        if self.blocks is not None:
            self.blocks.forget(0)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.index.truncate(self.length)

    def release(self) -> None:
        super().release()
        self.index.release()
        if self.blocks is not None:
            self.blocks.release()

    def nbytes(self) -> int:
        return super().nbytes() + self.index.nbytes() + (0 if self.blocks is None else self.blocks.nbytes())


def _some(rows: Rows, own: slice) -> Rows:
    """Some of the rows, none between them left out."""
    position, index = rows.position + own.start, rows.index + own.start
    return Rows(rows.q[own], rows.k[own], rows.v[own], rows.scoring, position, index)
