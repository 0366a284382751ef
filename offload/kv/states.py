"""The state cache: recurrent states of layers that have one, at a place of the sequence, and the inputs of the tokens
after it.

A pass moves states to the place where it begins, by replaying the tokens that count, and holds its own rows as inputs.
So each of its tokens can be forgotten, and no pass copies a state. What lies further back comes from checkpoints.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import count

import torch
from torch import Tensor

from offload.config.block import DeltaRule
from offload.kernels.delta import DeltaWeights, Held, Replayed
from offload.kernels.device import DeviceKernels
from offload.kv import Phase
from offload.kv.checkpoints import Checkpoint, Checkpoints, places_of_prefill
from offload.plan.sizing import PREFILL_BLOCK
from offload.transfer.memory import Memory, sent_to

PURPOSE = "states"
_numbers = count()


class LayerStates:
    """States [L, heads, key_dim, value_dim] fp32 and inputs [L, width - 1 + M, kept] on the device, see `Held`.

    bases: the place of each layer's state: layers differ where a forward was broken off. A graph moves all states at
    once, and whether it did is not known where the pass was broken off: they count as lost then.
    """

    def __init__(
        self,
        memory: Memory,
        delta: DeltaRule,
        *,
        num_layers: int,
        rows: int,
        dtype: torch.dtype,
        kernels: DeviceKernels,
    ) -> None:
        """rows: M, of the usual pass; a longer one gets more room."""
        self.delta, self.bases = delta, [0] * num_layers
        self._memory, self._run = memory, kernels.delta_rule
        self.states = self._allocate((num_layers, *delta.state_shape), torch.float32)
        self.inputs = self._allocate((num_layers, delta.width - 1 + rows, delta.kept), dtype)
        self._number, self._alike = next(_numbers), True
        self._begun: int | None = None  # where the pass under way began, while it may be a graph's
        self._there: Tensor | None = None
        if memory.device.type == "cuda":
            self._there = torch.zeros(1, dtype=torch.long, device=memory.device)

    @property
    def place(self) -> int:
        """The place that all states have passed at most; of lost ones one that is beyond all tokens."""
        return max(self.bases) if self._begun is None else self._begun + 1

    def begin(self, start: int, num_rows: int) -> None:
        """A pass of `num_rows` rows begins at place `start`."""
        self._reserve(num_rows)
        self._alike, self._begun = len({*self.bases}) == 1, None
        if self._there is not None and self._alike:
            sent_to(self._there, torch.tensor([start - self.place]))
            self._begun = start

    def run(self, layer: int, start: int, rows: Tensor, weights: DeltaWeights, *, settles: bool) -> Tensor:
        """The output of rows at place `start` and on. settles: states pass them."""
        held = Held(self.states[layer], self.inputs[layer])
        there = self._there if self._alike and not settles else None
        replayed = Replayed(start - self.bases[layer], there)
        out = self._run(self.delta, weights, held, rows, replayed, settles=settles)
        if self._there is not None and torch.cuda.is_current_stream_capturing():
            return out  # nothing ran yet
        self._begun = None
        self.bases[layer] = start + len(rows) * settles
        return out

    def ran(self, start: int) -> None:
        """A pass that began at place `start` is over: also where a graph ran it, for which no layer was called."""
        self.known([start] * len(self.bases))

    def known(self, bases: list[int]) -> None:
        """These are the states' places."""
        self.bases, self._begun = bases, None

    def settled(self, layer: int, place: int, weights: DeltaWeights) -> Held:
        """What would be held if a layer's state were at `place`, the end of the tokens whose inputs are held. A
        copy."""
        held = Held(self.states[layer].clone(), self.inputs[layer].clone())
        nothing = self.inputs.new_empty(0, sum(self.delta.parts))
        self._run(self.delta, weights, held, nothing, Replayed(place - self.bases[layer]), settles=True)
        return held

    def tails(self) -> Tensor:
        """The inputs of the last tokens before the states' places, [L, width - 1, kept]."""
        return self.inputs[:, : self.delta.width - 1]

    def set(self, place: int, states: Tensor, tails: Tensor) -> None:
        """Take over states at `place`."""
        self.states.copy_(states)
        self.tails().copy_(tails)
        self.known([place] * len(self.bases))

    def follow(self, other: LayerStates, length: int, *, moved: int = 0) -> None:
        """Take over the states of `other` and the inputs of its first `length` tokens, as if they were `moved` tokens
        further on."""
        held = length - min(other.bases)
        self._reserve(held)
        self.states.copy_(other.states)
        used = self.delta.width - 1 + held
        self.inputs[:, :used] = other.inputs[:, :used]
        self.known([base + moved for base in other.bases])

    @property
    def graph_key(self) -> Hashable:
        """See `Cache`."""
        if self._there is None or not self._alike:
            return None
        return self._number, self.states.data_ptr(), self.inputs.data_ptr()

    def nbytes(self) -> int:
        return self.states.nbytes + self.inputs.nbytes

    def release(self) -> None:
        """They are not used again."""
        for held in (self.states, self.inputs):
            self._memory.released(held, tier="device", purpose=PURPOSE)

    def _reserve(self, num_rows: int) -> None:
        """Have room for the inputs of so many rows."""
        missing, old = self.delta.width - 1 + num_rows - self.inputs.shape[1], self.inputs
        if missing > 0:
            self.inputs = self._allocate((len(old), old.shape[1] + missing, old.shape[2]), old.dtype)
            self.inputs[:, : old.shape[1]] = old
            self._memory.released(old, tier="device", purpose=PURPOSE)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(shape, dtype, tier="device", purpose=PURPOSE)


class StateCache:
    """The exact states of one sequence, and checkpoints of them on the host."""

    def __init__(self, layers: LayerStates, checkpoints: Checkpoints) -> None:
        self.layers, self.checkpoints = layers, checkpoints
        self.length = 0
        self._start = 0  # of the forward under way
        self._phase: Phase | None = None
        self._taken = [0] * len(layers.bases)

    def reachable(self, length: int) -> int:
        """The most tokens, up to `length`, that the cache can be truncated to."""
        wanted = min(length, self.length)
        return wanted if self.layers.place <= wanted else self.checkpoints.last(wanted)

    def begin(self, phase: Phase, num_rows: int, start: int | None = None) -> None:
        """A forward of `num_rows` rows starts after the tokens."""
        self._phase, self._start, self._taken = phase, self.length, [0] * len(self._taken)
        if phase == "prefill":
            self.checkpoints.begin(places_of_prefill(self.length, num_rows, PREFILL_BLOCK))
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
        kept, self._phase = self.reachable(length), None
        if self.layers.place > kept:
            self._restore(kept)
        self.length = kept
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
        """See `StateRows`."""
        return self.layers.delta

    @property
    def num_layers(self) -> int:
        """See `StateRows`."""
        return len(self.layers.bases)

    @property
    def dtype(self) -> torch.dtype:
        """See `StateRows`."""
        return self.layers.inputs.dtype

    @property
    def places(self) -> Sequence[int]:
        """See `StateRows`."""
        return self.checkpoints.places

    @property
    def most(self) -> int:
        """See `StateRows`."""
        return self.checkpoints.most

    def checkpoint(self, place: int) -> Checkpoint:
        """See `StateRows`."""
        found = self.checkpoints.at(place)
        assert found is not None, f"there is no checkpoint at {place}"
        return found

    def fill(self, place: int, checkpoint: Checkpoint) -> None:
        """See `StateRows`."""
        own = self.checkpoints.take(place)
        own.states.copy_(checkpoint.states)
        own.tails.copy_(checkpoint.tails)

    def restored(self, length: int) -> None:
        """See `StateRows`."""
        self.checkpoints.forget_after(length)
        self._restore(length)
        self.length, self._phase = length, None

    def release(self) -> None:
        """The cache is not used again."""
        self.layers.release()
        self.checkpoints.release()

    @property
    def graph_key(self) -> Hashable:
        """See `Cache`."""
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
        """See `MixRows`."""
        return self.layers.run(layer, self._length, rows, weights, settles=False)

    def advance(self, num_tokens: int) -> None:
        self.layers.ran(self._length)
        self._length += num_tokens

    def release(self) -> None:
        """They are not used again."""
        self.layers.release()

    @property
    def graph_key(self) -> Hashable:
        """See `Cache`."""
        return self.layers.graph_key

    def nbytes(self) -> int:
        return self.layers.nbytes()
