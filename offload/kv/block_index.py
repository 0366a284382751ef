"""The index of one sequence: a key for each whole block of its tokens, by which rows choose what they attend to."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from offload.config.mixers import Indexer
from offload.config.model import ModelConfig
from offload.kernels.places import RowPlaces
from offload.kernels.pooled import IndexRows, PooledPlaces, pooled_keys
from offload.kernels.rope import Scoring
from offload.kv.parts import PageUnits, Shapes, Split, Unit
from offload.plan.shards import Shard
from offload.plan.sizing import block_keys, raw_keys
from offload.transfer.memory import Memory

PURPOSE = "block index"


class BlockIndex(PageUnits):
    """Keys of whole blocks [L, N, D_i], and raw keys of the last tokens [L, R, D_i], token t at place t % R, all on the
    device. A block's key does not change once all of its tokens count, so of raw keys those of the incomplete last
    block are needed alone, wherever that is after drafts were rejected.

    Keys of blocks beyond the tokens may be left of rejected ones: no row sees them before they are written again.
    """

    name = "index"
    what = "page of index keys"

    def __init__(
        self, memory: Memory, indexer: Indexer, *, scorings: Sequence[Scoring], dtype: torch.dtype, page_tokens: int
    ) -> None:
        """scorings: of each layer, in the dtype of keys. page_tokens: of a unit."""
        tables = {id(each.rope): each.rope for each in scorings}
        narrow = {key: rope.narrowed(indexer.head_dim) for key, rope in tables.items()}
        self._ropes = [narrow[id(each.rope)] for each in scorings]
        self.indexer, self._memory, self._page = indexer, memory, page_tokens
        self.num_layers, self._dtype = len(scorings), dtype
        self.keys = self._allocate(0)
        self.raw = self._allocate(raw_keys(indexer))
        self._oldest = 0  # token from which on raw keys are known
        self._begun: tuple[int, Tensor | None] = 0, None  # where the pass under way began; `tail` there if it is lost
        self._tails = dict[int, Tensor]()  # of units that were filled, by the tokens up to their ends

    @property
    def page_tokens(self) -> int:
        return self._page

    def reserve(self, num_tokens: int) -> None:
        """Have room for the keys of `num_tokens` tokens. Raises DoesNotFit."""
        if (wanted := block_keys(self.indexer, num_tokens)) > self.keys.shape[1]:
            old = self.keys
            self.keys = self._allocate(wanted)
            self.keys[:, : old.shape[1]] = old
            self._memory.released(old, tier="device", purpose=PURPOSE)

    def reachable(self, length: int, stop: int | None = None) -> int:
        """The most tokens, up to `length`, after which blocks can go on: the raw keys of an incomplete last block are
        known."""
        first = length - length % self.indexer.ratio
        return length if first >= self._oldest or length == self._begun[0] else first

    def begin(self, start: int, num_rows: int) -> None:
        """A pass of `num_rows` rows begins after `start` tokens."""
        self._oldest = max(self._oldest, start + num_rows - self.raw.shape[1])
        first = start - start % self.indexer.ratio
        self._begun = start, self.tail(start) if first < self._oldest else None

    def add(
        self, layer: int, start: int, places: RowPlaces, index: IndexRows, *, moving: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Add the keys of new tokens at `start` and on. places: of them. moving: see `Rows`. Returns the rotated
        queries [T, H_i, D_i], and the keys of all blocks that are whole then, [N, D_i], and if `moving` of others
        behind them."""
        ratio, rope, num_raw = self.indexer.ratio, self._ropes[layer], self.raw.shape[1]
        count = (len(index.k) + (ratio - 1 if moving else start % ratio)) // ratio  # blocks that are whole now, at most
        make = partial(PooledPlaces.of, places.positions, ratio, count, num_raw)
        own = places.once(("pooled", ratio), make)
        if count:
            raw = torch.cat([self.raw[layer].index_select(0, own.before), index.k]).index_select(0, own.members)
            keys = pooled_keys(raw.unflatten(0, (count, ratio)), index.norm, rope, own.blocks)
            self.keys[layer].index_copy_(0, own.blocks.slots, keys)
        self.raw[layer].index_copy_(0, own.last, index.k[-num_raw:])
        found = self.keys[layer] if moving else self.keys[layer, : (start + len(index.k)) // ratio]
        return places.rotated_by(rope, index.q), found

    @property
    def graph_key(self) -> Hashable:
        """A part of `Cache.graph_key`: where the keys are."""
        return self.keys.data_ptr(), self.keys.shape

    def tail(self, length: int) -> Tensor:
        """The raw keys of the tokens of an incomplete last block, [L, ratio - 1, D_i], 0 after them."""
        ratio = self.indexer.ratio
        first = length - length % ratio
        found = self.raw.new_zeros(len(self.raw), ratio - 1, self.raw.shape[2])
        found[:, : length - first] = self.raw[:, self._places(first, length)]
        return found

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, which are `reachable`."""
        start, tail = self._begun
        if length == start and length - length % self.indexer.ratio < self._oldest:
            self._go_on(length, tail)  # a prefill was broken off, which wrote over raw keys

    def restored(self, length: int) -> None:
        self._go_on(length, self._tails.get(length))
        self._tails.clear()

    def _go_on(self, length: int, tail: Tensor | None) -> None:
        """Go on after `length` tokens. tail: as returned by `tail`; None where the last block is whole."""
        first = length - length % self.indexer.ratio
        if tail is not None:
            self.raw[:, self._places(first, length)] = tail[:, : length - first].to(self.raw.device)
        self._oldest, self._begun = first, (length, self.tail(length))

    def reach(self, units: Sequence[Unit], length: int) -> int:
        rest = 0 if (length,) in units else length % self.indexer.ratio
        return max(super().reach(units, length) - rest, 0)

    def shapes(self, unit: Unit) -> Shapes:
        ratio, dim = self.indexer.ratio, self.indexer.head_dim
        return {
            "keys": ((self.num_layers, self._page // ratio, dim), self._dtype),
            "tail": ((self.num_layers, ratio - 1, dim), self._dtype),
        }

    def tensors(self, unit: Unit) -> list[Tensor]:
        blocks, whole = self._blocks(unit), self.keys.new_zeros(self.shapes(unit)["keys"][0])
        whole[:, : len(blocks)] = self.keys[:, blocks.start : blocks.stop]
        return [whole, self.tail(unit[0])]

    def filled(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        blocks, (keys, tail) = self._blocks(unit), tensors
        self.reserve(unit[0])
        self.keys[:, blocks.start : blocks.stop] = keys[:, : len(blocks)].to(self.keys.device)
        self._tails[unit[0]] = tail

    def splits(self, whole: ModelConfig, shards: Sequence[Shard]) -> Sequence[Split]:
        return [Split(0, self.num_layers, [slice(None)] * len(shards))] * 2  # each rank has all of it

    def _blocks(self, unit: Unit) -> range:
        """The blocks of a unit."""
        ratio = self.indexer.ratio
        return range(self.page_of(unit) * self._page // ratio, unit[0] // ratio)

    def nbytes(self) -> int:
        return self.keys.nbytes + self.raw.nbytes

    def release(self) -> None:
        """Release the memory; the index is not used again."""
        for held in (self.keys, self.raw):
            self._memory.released(held, tier="device", purpose=PURPOSE)

    def _places(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.raw.device) % self.raw.shape[1]

    def _allocate(self, count: int) -> Tensor:
        shape = self.num_layers, count, self.indexer.head_dim
        return self._memory.allocate(shape, self._dtype, tier="device", purpose=PURPOSE)
