"""Checkpoints of a sequence's states on the host: as many as fit a number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from offload.config.mixers import Recurring
from offload.transfer.memory import Memory

PURPOSE = "state checkpoints"


@dataclass(frozen=True)
class Checkpoint:
    """The states of all layers at a place, [L, heads, key_dim, value_dim] fp32, and the inputs of the last tokens
    before it, [L, width - 1, kept]. On the host."""

    states: Tensor
    tails: Tensor


class Checkpoints:
    """Checkpoints by place, the number of tokens of the sequence before it. Without room for another, the checkpoint is
    dropped whose neighbours are nearest to each other, measured by the distance from the end, see `least_missed`. So
    any place can be reached by running again no more than about twice as many tokens as follow it."""

    def __init__(
        self, memory: Memory, recurrence: Recurring, *, num_layers: int, dtype: torch.dtype, most: int
    ) -> None:
        """most: checkpoints, 2 or more."""
        self._memory, self._held = memory, dict[int, int]()  # slot by place
        self._states = self._allocate((most, num_layers, *recurrence.state_shape), torch.float32)
        self._tails = self._allocate((most, num_layers, recurrence.width - 1, recurrence.kept), dtype)
        self._new: dict[int, int] = {}  # slots of the prefill under way, by place
        self._noted = set[tuple[int, int]]()  # places and layers of it
        self._num_layers = num_layers

    @property
    def places(self) -> list[int]:
        return sorted(self._held)

    @property
    def most(self) -> int:
        """The number of checkpoints that there is room for."""
        return len(self._states)

    def at(self, place: int) -> Checkpoint | None:
        """The checkpoint at `place`; None if there is none."""
        slot = self._held.get(place)
        return None if slot is None else Checkpoint(self._states[slot], self._tails[slot])

    def last(self, length: int) -> int:
        """The last place up to `length`; 0 if there is none."""
        return max((place for place in self._held if place <= length), default=0)

    def begin(self, places: Sequence[int]) -> None:
        """A prefill begins, which notes the states at `places`, in order. Of them and of those that are held the ones
        are left for which there is room, the first and the last among them."""
        kept = thinned(sorted({*self._held, *places}), self.most, stays=places[0]) if self.most else []
        self._held = {place: slot for place, slot in self._held.items() if place in kept}
        used = {*self._held.values()}
        free = iter([slot for slot in range(self.most) if slot not in used])
        self._new, self._noted = {place: next(free) for place in kept if place not in self._held}, set()

    def note(self, place: int, layer: int, state: Tensor, tail: Tensor) -> None:
        """Copy a layer's state at `place`, if it is wanted."""
        if (slot := self._new.get(place)) is not None:
            self._states[slot, layer].copy_(state)
            self._tails[slot, layer].copy_(tail)
            self._noted.add((place, layer))

    def expects(self, place: int) -> bool:
        """Whether `place` is held, or is to be noted by the prefill under way."""
        return place in self._held or place in self._new

    def of_layer(self, place: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """A layer's state and tail at `place`, also where it was noted by a prefill that is broken off; None if there
        are none."""
        slot = self._held.get(place)
        if slot is None and (place, layer) in self._noted:
            slot = self._new[place]
        return None if slot is None else (self._states[slot, layer], self._tails[slot, layer])

    def commit(self) -> None:
        """The prefill is over. Places that all layers have noted are held."""
        layers = range(self._num_layers)
        self._held |= {p: slot for p, slot in self._new.items() if all((p, layer) in self._noted for layer in layers)}
        self._new, self._noted = {}, set()

    def forget_after(self, length: int) -> None:
        """Only places up to `length` still belong to the sequence."""
        self._held = {place: slot for place, slot in self._held.items() if place <= length}
        self._new, self._noted = {}, set()

    def take(self, place: int) -> Checkpoint:
        """A checkpoint at `place` for the caller to fill."""
        if place not in self._held:
            self.begin([place])
            self._held |= self._new
            self._new = {}
        found = self.at(place)
        assert found is not None
        return found

    def copy_from(self, other: Checkpoints, length: int) -> None:
        """Hold the checkpoints of `other` at places up to `length`, as many as there is room for; this sequence has no
        token."""
        for place in thinned([place for place in other.places if place <= length], self.most):
            own, theirs = self.take(place), other.at(place)
            assert theirs is not None
            own.states.copy_(theirs.states)
            own.tails.copy_(theirs.tails)

    def nbytes(self) -> int:
        return self._states.nbytes + self._tails.nbytes

    def release(self) -> None:
        """Release the memory; the checkpoints are not used again."""
        for held in (self._states, self._tails):
            self._memory.released(held, tier="host", purpose=PURPOSE)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(shape, dtype, tier="host", purpose=PURPOSE)


def least_missed(places: Sequence[int], stays: int | None = None) -> int:
    """The place among ascending `places` whose absence costs the least: the distance between its neighbours, divided by
    the distance of the earlier one from the last place. The last place stays, and so does `stays`."""
    before, end = [0, *places], places[-1]
    costs = [
        ((after - before[index]) / (end - before[index]), place)
        for index, (place, after) in enumerate(pairwise(places))
        if place != stays
    ]
    return min(costs)[1] if costs else places[0]


def thinned(places: Sequence[int], most: int, *, stays: int | None = None) -> list[int]:
    """The `most` of ascending `places` that are kept where one after the other is dropped by `least_missed`."""
    kept = list(places)
    while len(kept) > most:
        kept.remove(least_missed(kept, stays))
    return kept


def places_of_prefill(start: int, num_tokens: int, block: int) -> list[int]:
    """The places that a prefill from `start` on notes: where it begins and ends, and between them ends of its blocks:
    the last one, and those at distances from the end that double."""
    found, distance = {start, start + num_tokens}, 1
    while distance < num_tokens:
        found.add(start + (num_tokens - distance) // block * block)
        distance = max(2 * distance, block)
    return sorted(found - {0})
