"""The state cache: recurrent states of layers that have one, at a place of the sequence, and the inputs of the tokens
after it.

A pass moves states to the place where it begins, by replaying the tokens that count, and holds its own rows as inputs.
So each of its tokens can be forgotten, and no pass copies a state. What lies further back comes from checkpoints.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from offload.config.block import DeltaRule
from offload.kernels.delta import DeltaWeights
from offload.kv import Phase
from offload.kv.checkpoints import Checkpoint, Checkpoints, places_of_prefill
from offload.kv.layer_states import LayerStates
from offload.plan.sizing import PREFILL_BLOCK


class StateCache:
    """The exact states of one sequence, and checkpoints of them on the host. Sessions read and fill it as
    `StateRows`."""

    def __init__(self, layers: LayerStates, checkpoints: Checkpoints, *, block: int = PREFILL_BLOCK) -> None:
        """block: rows of a prefill's blocks."""
        self.layers, self.checkpoints, self._block = layers, checkpoints, block
        self.length = 0
        self._start = 0  # of the forward under way
        self._phase: Phase | None = None
        self._taken = [0] * len(layers.bases)

    def reachable(self, length: int) -> int:
        """The most tokens, up to `length`, that the cache can be truncated to."""
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

    def recur(self, layer: int, rows: Tensor, weights: DeltaWeights) -> Tensor:
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

    def copy_from(self, other: StateCache, num_tokens: int) -> None:
        """Hold the first `num_tokens` tokens that `other` holds, which can be truncated to them."""
        self.truncate(0)
        self.checkpoints.copy_from(other.checkpoints, num_tokens)
        if other.layers.place <= num_tokens:
            self.layers.follow(other.layers, num_tokens)
        else:
            self._restore(num_tokens)
        self.length = num_tokens

    def note_length(self, weights: Iterable[DeltaWeights]) -> None:
        """Have a checkpoint at the length. weights: of the layers, in order; not read where there is one already."""
        if not self.length or self.length in self.places:
            return
        self.checkpoints.begin([self.length])
        for layer, own in enumerate(weights):
            held = self.layers.settled(layer, self.length, own)
            self.checkpoints.note(self.length, layer, held.state, held.inputs[: self.layers.delta.width - 1])
        self.checkpoints.commit()

    @property
    def delta(self) -> DeltaRule:
        return self.layers.delta

    @property
    def num_layers(self) -> int:
        return len(self.layers.bases)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers.inputs.dtype

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

    def fill(self, place: int, checkpoint: Checkpoint) -> None:
        own = self.checkpoints.take(place)
        own.states.copy_(checkpoint.states)
        own.tails.copy_(checkpoint.tails)

    def restored(self, length: int) -> None:
        self.checkpoints.forget_after(length)
        self._restore(length)
        self.length, self._phase = length, None

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

    def _settle(self, layer: int, rows: Tensor, weights: DeltaWeights) -> None:
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

    def recur(self, layer: int, rows: Tensor, weights: DeltaWeights) -> Tensor:
        """The delta rule's output for drafted rows, which no state passes: each of them can be forgotten. See
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
