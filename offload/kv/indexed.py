"""The indexed cache: a full cache whose rows attend to the blocks of tokens that an index chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload.kernels.device import NONE
from offload.kernels.pooled import IndexRows
from offload.kernels.runs import Chosen, Rows, Run
from offload.kv import Phase
from offload.kv.block_index import BlockIndex
from offload.kv.full import FullCache
from offload.pages.tiles import TileShape
from offload.plan.fixed_bytes import FEW_ROWS
from offload.transfer.memory import Memory


class IndexedCache(FullCache):
    """Keys and values of all tokens as in a full cache, and the index of their blocks. A row attends to the same tokens
    in phases "prefill" and "decode", by the same kernels: its bits are the same in both. Up to `Indexer.most_tokens`
    tokens it attends to all of them, with the bits of a full cache."""

    def __init__(self, memory: Memory, shape: TileShape, *, index: BlockIndex, **others: Any) -> None:
        """index: of its sequence. others: of `FullCache`."""
        super().__init__(memory, shape, **others)
        self.index, self._choose = index, others.get("kernels", NONE).choose

    def reserve(self, num_tokens: int) -> None:
        super().reserve(num_tokens)
        self.index.reserve(num_tokens)

    def begin(self, phase: Phase, num_rows: int, *, ahead: bool = False) -> None:
        super().begin(phase, num_rows, ahead=ahead)
        self.index.reserve(self.length + num_rows)
        self.index.begin(self.length, num_rows)

    def attend_chosen(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexRows) -> Tensor:
        """As `attend`, over what the index chooses for each row."""
        if self._phase is None:
            raise RuntimeError("attend outside a forward: call begin first")
        start = self._start + self._taken[layer]
        self._taken[layer] += len(q)
        queries, keys = self.index.add(layer, start, index)
        found = []
        for first in range(0, len(q), FEW_ROWS):
            own = slice(first, min(first + FEW_ROWS, len(q)))
            rows = Rows(q[own], k[own], v[own], self.scorings[layer], start + first, start + first)
            found.append(self._chosen(layer, rows, queries[own], keys))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _chosen(self, layer: int, rows: Rows, queries: Tensor, keys: Tensor) -> Tensor:
        """The attention of a few rows over the blocks that their index queries choose among `keys`."""
        attention, access, tokens = self._attention, self.pages.access[self._current], self.shape.tokens
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
        attention.attend_chosen(runs, self._choice(queries, keys, start))
        return attention.merge()[0]

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
        return Chosen(blocks, (count * indexer.ratio + rest).to(torch.int32), indexer.ratio)

    @property
    def _current(self) -> Phase:
        assert self._phase is not None
        return self._phase

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.index.truncate(self.length)

    def release(self) -> None:
        super().release()
        self.index.release()

    def nbytes(self) -> int:
        return super().nbytes() + self.index.nbytes()
