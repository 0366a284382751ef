"""The state cache: recurrent states of layers that have one, at a place of the sequence, and the inputs of the tokens
after it.

A pass moves states to the place where it begins, by replaying the tokens that count, and holds its own rows as inputs.
So each of its tokens can be forgotten, and no pass copies a state. What lies further back comes from checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from offload.config.mixers import DilatedConvolution
from offload.config.model import ModelConfig
from offload.kernels.recurrence import RecurrenceWeights
from offload.kv import Phase
from offload.kv.checkpoints import Checkpoint, Checkpoints, places_of_prefill
from offload.kv.layer_states import LayerStates
from offload.kv.parts import PlacedPart, Shapes, Split, Unit
from offload.plan.shards import Shard
from offload.plan.sizing import PREFILL_BLOCK
from offload.weights.tensors import recurrence_rows


class StateCache(PlacedPart):
    """The exact states of one sequence, and checkpoints of them on the host, which sessions read and fill. name: of the
    part; a sequence may have several such caches."""

    def __init__(
        self,
        layers: LayerStates,
        checkpoints: Checkpoints,
        *,
        weights: Callable[[], Iterable[RecurrenceWeights]],
        block: int = PREFILL_BLOCK,
        name: str = "states",
    ) -> None:
        """weights: gives those of the layers, in order; where they stream they cross the link then. block: rows of a
        prefill's blocks."""
        self.layers, self.checkpoints, self.weights, self._block = layers, checkpoints, weights, block
        self.name = name
        self.length = 0
        self._start = 0  # of the forward under way
        self._phase: Phase | None = None
        self._taken = [0] * len(layers.bases)

    def reachable(self, length: int, stop: int | None = None) -> int:
        wanted = min(length, self.length)
        if self._phase == "prefill":  # broken off: how far it came is another matter on each rank
            return wanted if wanted == self.length and self._begins_at_known else self.checkpoints.last(wanted)
        return wanted if self.layers.place <= wanted else self.checkpoints.last(wanted)

    def begin(self, phase: Phase, num_rows: int, start: int | None = None) -> None:
        """A forward of `num_rows` rows starts after the tokens. start: ignored; `DraftStates` needs it."""
        self._phase, self._start, self._taken = phase, self.length, [0] * len(self._taken)
        if phase == "prefill":
            self.checkpoints.begin(places_of_prefill(self.length, num_rows, self._block))
        else:
            self.layers.begin(self.length, num_rows)

    def recur(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        """See `MixRows`; layers are those with a state. In phase "decode" all of the forward's rows come in one
        call."""
        start = self._start + self._taken[layer]
        if self._phase == "decode":
            return self.layers.run(layer, start, rows, weights, settles=False)
        if start == self._start and start:
            self._settle(layer, rows, weights)
        self._taken[layer] += len(rows)
        out = self.layers.run(layer, start, rows, weights, settles=True)
        self._note(layer)
        return out

    def advance(self, num_tokens: int) -> None:
        """The forward is over and its first `num_tokens` rows count."""
        self.length += num_tokens
        if self._phase == "prefill":
            self.checkpoints.commit()
        else:
            self.layers.ran(self._start)
        self._phase = None

    def truncate(self, length: int) -> None:
        """Keep the first `reachable(length)` tokens."""
        kept = self.reachable(length)
        if self._phase == "prefill" and kept == self._start:
            self._take_back()
        elif self.layers.place > kept:
            self._restore(kept)
        self.length, self._phase = kept, None
        self.checkpoints.forget_after(kept)

    def copy_from(self, other: StateCache, length: int | None = None) -> None:
        count = other.length if length is None else length
        self.truncate(0)
        self.checkpoints.copy_from(other.checkpoints, count)
        if other.layers.place <= count:
            self.layers.follow(other.layers, count)
        else:
            self._restore(count)
        self.length = count

    def note_length(self) -> None:
        """Have a checkpoint at the length. Weights are not read where there is one already."""
        if not self.length or self.length in self.places:
            return
        self.checkpoints.begin([self.length])
        for layer, own in enumerate(self.weights()):
            held = self.layers.settled(layer, self.length, own)
            self.checkpoints.note(self.length, layer, held.state, held.inputs[: self.layers.recurrence.width - 1])
        self.checkpoints.commit()

    def shapes(self, unit: Unit) -> Shapes:
        recurrence, num_layers = self.layers.recurrence, len(self.layers.bases)
        tails = (num_layers, recurrence.width - 1, recurrence.kept)
        return {
            "states": ((num_layers, *recurrence.state_shape), torch.float32),
            "tails": (tails, self.layers.inputs.dtype),
        }

    @property
    def places(self) -> Sequence[int]:
        return self.checkpoints.places

    @property
    def most(self) -> int:
        return self.checkpoints.most

    def checkpoint(self, place: int) -> Checkpoint:
        found = self.checkpoints.at(place)
        assert found is not None, f"there is no checkpoint at {place}"
        return found

    def tensors(self, unit: Unit) -> list[Tensor]:
        found = self.checkpoint(*unit)
        return [found.states, found.tails]

    def filled(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        own = self.checkpoints.take(*unit)
        for held, tensor in zip((own.states, own.tails), tensors, strict=True):
            held.copy_(tensor)

    def restored(self, length: int) -> None:
        self.checkpoints.forget_after(length)
        self._restore(length)
        self.length, self._phase = length, None

    def splits(self, whole: ModelConfig, shards: Sequence[Shard]) -> Sequence[Split]:
        if isinstance(own := self.layers.recurrence, DilatedConvolution):
            return [Split.of_all(axis, own.size, len(shards)) for axis in (1, 2)]
        alike = whole.layer(whole.stateful[0])
        heads = [shard.value_heads(alike) for shard in shards]
        recurrence, kept = alike.block.recurrence, [kept_numbers(alike, shard) for shard in shards]
        return [
            Split(1, recurrence.num_heads, [slice(own.start, own.stop) for own in heads]),
            Split(2, recurrence.kept, kept),
        ]

    def release(self) -> None:
        """The cache is not used again."""
        self.layers.release()
        self.checkpoints.release()

    @property
    def graph_key(self) -> Hashable:
        """The key of the layers' states."""
        return self.layers.graph_key

    def nbytes(self) -> int:
        return self.layers.nbytes() + self.checkpoints.nbytes()

    def _settle(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> None:
        """Bring a layer's state to the prefill's first row: its place is a checkpoint."""
        self.layers.run(layer, self._start, rows[:0], weights, settles=True)
        self._note(layer)

    def _note(self, layer: int) -> None:
        """Add a layer's state to the checkpoint of its place, if that is wanted."""
        self.checkpoints.note(self.layers.bases[layer], layer, self.layers.states[layer], self.layers.tails()[layer])

    @property
    def _begins_at_known(self) -> bool:
        """Whether the prefill under way began where each layer has, or is to note, its state."""
        return not self._start or self.checkpoints.expects(self._start)

    def _take_back(self) -> None:
        """Bring the layers that a broken prefill has passed back to its start, where each noted its state first."""
        if not self._start:
            self._restore(0)
            return
        for layer, base in enumerate(self.layers.bases):
            if base > self._start:
                found = self.checkpoints.of_layer(self._start, layer)
                assert found is not None
                self.layers.set_layer(layer, self._start, *found)

    def _restore(self, place: int) -> None:
        found = self.checkpoints.at(place)
        if found is None:
            assert not place, "only the beginning is no checkpoint"
            self.layers.states.zero_()
            self.layers.tails().zero_()
            self.layers.known([0] * len(self.layers.bases))
        else:
            self.layers.set(place, found.states, found.tails)


class DraftStates:
    """The states of a level at which the target drafts for itself: they run ahead from a copy of the exact ones."""

    def __init__(self, layers: LayerStates, exact: StateCache) -> None:
        self.layers, self._exact = layers, exact
        self._length = 0

    def begin(self, phase: Phase, num_rows: int, start: int | None = None) -> None:
        """A pass of `num_rows` rows at place `start` begins. From the place of the exact states on, and where their own
        do not reach, drafts begin with the exact ones; a level that lags behind goes on from its own."""
        assert start is not None, "drafts follow the level's tokens"
        exact, layers = self._exact, self.layers
        if start == exact.length or not layers.place <= start <= self._length:
            layers.follow(exact.layers, exact.length, moved=start - exact.length)
        self._length = start
        layers.begin(start, num_rows)

    def recur(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        """The recurrence rule's output for drafted rows, which no state passes: each of them can be forgotten. See
        `MixRows`."""
        return self.layers.run(layer, self._length, rows, weights, settles=False)

    def advance(self, num_tokens: int) -> None:
        self.layers.ran(self._length)
        self._length += num_tokens

    def release(self) -> None:
        """Release the memory; the states are not used again."""
        self.layers.release()

    @property
    def graph_key(self) -> Hashable:
        """The key of the layers' states."""
        return self.layers.graph_key

    def nbytes(self) -> int:
        return self.layers.nbytes()


def kept_numbers(whole: ModelConfig, shard: Shard) -> Tensor:
    """The indices, among the numbers that are kept of a projected row of all heads, of those that a shard keeps: int64
    [kept of the shard]. whole: the config of a layer with a state."""
    found, first, recurrence = [], 0, whole.block.recurrence
    for part, (size, rows) in enumerate(zip(recurrence.row_parts, recurrence_rows(whole, shard), strict=True)):
        if part in recurrence.kept_parts:
            found.append(first + torch.arange(rows.start, rows.stop))
            first += size
    return torch.cat(found)
