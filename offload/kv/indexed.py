"""The indexed cache: a full cache whose rows attend to the blocks of tokens that an index chooses."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.places import RowPlaces
from offload.kernels.pooled import IndexRows
from offload.kernels.runs import Chosen, Rows, Run
from offload.kv import Phase
from offload.kv.block_cache import BlockCache
from offload.kv.block_index import BlockIndex
from offload.kv.full import FullCache
from offload.pages.tiles import TileShape
from offload.plan.sizing import CHOOSING_ROWS, rows_in
from offload.transfer.memory import Memory


@dataclass(frozen=True)
class _Seen:
    """The blocks and tokens that rows see. visible: whole blocks, int64 [T]. count: those that a row attends to, int64
    [T, 1]. last: the incomplete one, int32 [T, 1], -1 for none. tokens: that a row attends to, int32 [T]."""

    visible: Tensor
    count: Tensor
    last: Tensor
    tokens: Tensor


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
        self._stop = 0  # of the rows of the forward under way
        self.blocks: BlockCache | None = None
        if block_slots:
            ratio, most = index.indexer.ratio, len(self.scorings[0].rope.cos)
            self.blocks = BlockCache(memory, self, ratio, block_slots, -(-most // ratio), kernels)

    def reserve(self, num_tokens: int) -> None:
        super().reserve(num_tokens)
        self.index.reserve(num_tokens)

    def begin(self, phase: Phase, num_rows: int, *, ahead: bool = False) -> None:
        super().begin(phase, num_rows, ahead=ahead)
        self._stop = self._start + num_rows
        self.index.reserve(self._stop)
        self.index.begin(self._start, num_rows)
        if self.blocks is not None:
            self.blocks.begin()
            if phase == "prefill":  # whose end waits until its rows are home
                self.blocks.forget(self._start // self.blocks.size)

    def attend_chosen(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexRows) -> Tensor:
        """As `attend`, over what the index chooses for each row."""
        if self._phase is None:
            raise RuntimeError("attend outside a forward: call begin first")
        every = self._rows(layer, q, k, v)
        self._taken[layer] += len(q)
        places, most, found = every.in_memory(), self._rows_at_once, list[Tensor]()
        queries, keys = self.index.add(layer, every.index, places, index, moving=every.moving)
        for first in range(0, len(q), CHOOSING_ROWS):
            own = slice(first, first + CHOOSING_ROWS)
            seen = places.once(("seen", first), partial(self._seen, places.positions[own], index.real, own))
            chosen = self._choice(queries[own], keys, seen)
            rows = _some(every, own)
            for part in (slice(at, at + most) for at in range(0, len(rows.q), most)):
                found.append(self._attended(layer, _some(rows, part), chosen.of_rows(part)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        """The next rows of the forward in a layer."""
        start, scoring = self._start + self._taken[layer], self.scorings[layer]
        if self._phase == "prefill":
            return Rows(q, k, v, scoring, start, start)
        return replace(self._places.rows(0, (q, k, v), scoring), moving=self._is_whole)

    @property
    def _rows_at_once(self) -> int:
        """The rows that attend to what they chose at a time."""
        if self.blocks is None or self._phase == "prefill" or self.blocks.has_all:
            return CHOOSING_ROWS
        return rows_in(self.index.indexer, self.blocks.num_slots)

    def _attended(self, layer: int, rows: Rows, chosen: Chosen) -> Tensor:
        """The attention of a few rows over what they choose."""
        assert self._phase is not None
        if self.blocks is None or self._phase == "prefill":
            self._over_tiles(self._phase, layer, rows, chosen)
        else:
            self._over_blocks(self.blocks, layer, rows, chosen)
        return self._attention.merge()[0]

    def _over_tiles(self, phase: Phase, layer: int, rows: Rows, chosen: Chosen) -> None:
        """Attend over all tiles, which are on the device."""
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

    def _over_blocks(self, blocks: BlockCache, layer: int, rows: Rows, chosen: Chosen) -> None:
        """Attend over the slots of `blocks`, in which all that the rows choose has room."""
        positions, count = rows.in_memory().positions, len(rows.q)
        places = RowPlaces(positions, torch.arange(count, device=positions.device))
        at = torch.where(chosen.tokens > 0, positions, -blocks.size)
        slots = blocks.bring(layer, chosen.blocks, at)
        self._attention.begin(replace(rows, index=0, places=places), [self.index.indexer.most_tokens])
        self._attention.append_rows(Run(blocks.new, count))
        blocks.write(layer, rows.index, at)
        self._attention.attend_chosen([blocks.run(layer)], replace(chosen, blocks=slots))

    def _seen(self, positions: Tensor, real: Tensor | None, own: slice) -> _Seen:
        """The blocks and tokens that rows see. real: of all rows, see `IndexRows`. own: the rows among these."""
        indexer, tokens = self.index.indexer, positions + 1
        if real is not None:  # padding attends to nothing, so that no block is brought for it
            tokens = tokens * real[own]
        visible, rest = tokens // indexer.ratio, tokens % indexer.ratio
        count = visible.clamp(max=indexer.most_blocks)
        last = torch.where(rest > 0, visible, -1).int()
        return _Seen(visible, count[:, None], last[:, None], (count * indexer.ratio + rest).int())

    def _choice(self, queries: Tensor, keys: Tensor, seen: _Seen) -> Chosen:
        """The blocks of rows: those that are chosen among the whole ones, and the incomplete one."""
        indexer, form = self.index.indexer, (self.shape.num_pages, self.shape.page_tokens)
        blocks = pad(self._choose(queries, keys, seen.visible, indexer.most_blocks), (0, 1), value=-1)
        return Chosen(blocks.scatter_(1, seen.count, seen.last), seen.tokens, indexer.ratio, form)

    @property
    def graph_key(self) -> Hashable:
        """The key of the forward, see `Cache`. None unless all that its rows may choose is on the GPU, or brought there
        by its kernels."""
        if not self._is_whole:
            return None
        return self._places.number, self.index.graph_key, self.blocks and self.blocks.graph_key

    @property
    def _is_whole(self) -> bool:
        """Also whether a GPU's kernels bring what rows choose."""
        if self.blocks is None:
            return super()._is_whole
        return self._places.in_memory and self.blocks.copies is not None

    def wait_home(self) -> None:
        self._note_writes()  # of a forward that was broken off, too
        self.pages.wait_home()

    def _end(self) -> None:
        self._note_writes()
        super()._end()

    def _note_writes(self) -> None:
        """Note what a GPU's kernels write home in the forward under way."""
        if self._phase == "decode" and self.blocks is not None and self.blocks.copies is not None:
            self.pages.wrote_home(self._start, self._stop)

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
    if own.start == 0 and own.stop >= len(rows.q):
        return rows
    places = None if rows.places is None else rows.places.of_rows(own)
    position, index = rows.position + own.start, rows.index + own.start
    return replace(rows, q=rows.q[own], k=rows.k[own], v=rows.v[own], position=position, index=index, places=places)
