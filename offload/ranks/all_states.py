"""The recurrent states of all ranks joined into those of all heads, as sessions save and restore them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.config.block import DeltaRule
from offload.config.model import ModelConfig
from offload.kv.checkpoints import Checkpoint
from offload.plan.shards import Shard
from offload.ranks.sums import Sums
from offload.session.states import StateRows
from offload.weights.tensors import delta_rows

_GATE = 3  # of `DeltaRule.parts`: later states do not depend on it


class AllStates:
    """`StateRows` on rank 0 over the states of every rank, which are at the same places. A checkpoint is gathered when
    it is read, and scattered when it is filled. Peak host memory: two checkpoints.

    whole: the config of a layer with a state, of all heads. shards: of the ranks; several may have the same key heads.
    tell: sends a command to the other ranks.
    """

    def __init__(
        self, own: StateRows, whole: ModelConfig, shards: Sequence[Shard], sums: Sums, tell: Callable[..., int]
    ) -> None:
        self._own, self._whole, self._sums, self._tell = own, whole, sums, tell
        self._heads = [shard.value_heads(whole) for shard in shards]
        self._kept = [kept_numbers(whole, shard) for shard in shards]

    @property
    def delta(self) -> DeltaRule:
        return self._whole.block.delta

    @property
    def num_layers(self) -> int:
        return self._own.num_layers

    @property
    def dtype(self) -> torch.dtype:
        return self._own.dtype

    @property
    def places(self) -> Sequence[int]:
        return self._own.places

    @property
    def most(self) -> int:
        return self._own.most

    def checkpoint(self, place: int) -> Checkpoint:
        self._tell("gather_state", place=place)
        own, found = self._own.checkpoint(place), empty_checkpoint(self)
        for heads, part in zip(self._heads, self._sums.gather(own.states), strict=True):
            found.states[:, heads.start : heads.stop] = part
        for numbers, part in zip(self._kept, self._sums.gather(own.tails), strict=True):
            found.tails[:, :, numbers] = part
        return found

    def fill(self, place: int, checkpoint: Checkpoint) -> None:
        self._tell("fill_state", place=place)
        own = empty_checkpoint(self._own)
        states = [checkpoint.states[:, heads.start : heads.stop].contiguous() for heads in self._heads]
        self._sums.scatter(states, own.states)
        self._sums.scatter([checkpoint.tails[:, :, numbers] for numbers in self._kept], own.tails)
        self._own.fill(place, own)

    def restored(self, length: int) -> None:
        self._tell("restored", length=length)
        self._own.restored(length)


def kept_numbers(whole: ModelConfig, shard: Shard) -> Tensor:
    """The places, among the numbers that are kept of a projected row of all heads, of those that a shard keeps: int64
    [kept of the shard]."""
    found, first = [], 0
    for part, (size, rows) in enumerate(zip(whole.block.delta.parts, delta_rows(whole, shard), strict=True)):
        if part != _GATE:
            found.append(first + torch.arange(rows.start, rows.stop))
            first += size
    return torch.cat(found)


def empty_checkpoint(states: StateRows) -> Checkpoint:
    """An uninitialised checkpoint of such states on the host."""
    delta, num_layers = states.delta, states.num_layers
    tails = torch.empty((num_layers, delta.width - 1, delta.kept), dtype=states.dtype)
    return Checkpoint(torch.empty((num_layers, *delta.state_shape)), tails)
