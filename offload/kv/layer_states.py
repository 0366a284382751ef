"""States of layers on the device, and the inputs of the tokens after them: what passes move on."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

import torch
from torch import Tensor

from offload.config.mixers import Recurring
from offload.kernels.device import DeviceKernels
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
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
        recurrence: Recurring,
        *,
        num_layers: int,
        rows: int,
        dtype: torch.dtype,
        kernels: DeviceKernels,
    ) -> None:
        """rows: M, of the usual pass; a longer one gets more room."""
        self.recurrence, self.bases = recurrence, [0] * num_layers
        self._memory, self._run = memory, kernels.recurrences[type(recurrence)]
        self.states = self._allocate((num_layers, *recurrence.state_shape), torch.float32)
        self.inputs = self._allocate((num_layers, recurrence.width - 1 + rows, recurrence.kept), dtype)
        self._number, self._alike = next(_numbers), True
        self._begun: int | None = None  # where the pass under way began, while it may be a graph's
        self._there: Tensor | None = None
        if memory.device.type == "cuda" and kernels.usable:  # which read it
            self._there = torch.zeros(1, dtype=torch.long, device=memory.device)

    @property
    def place(self) -> int:
        """The furthest place of a layer's state. Of lost states: a place beyond all tokens."""
        return max(self.bases) if self._begun is None else self._begun + 1

    def begin(self, start: int, num_rows: int) -> None:
        """A pass of `num_rows` rows begins at place `start`."""
        self._reserve(num_rows)
        self._alike, self._begun = len({*self.bases}) == 1, None
        if self._there is not None and self._alike:
            sent_to(self._there, torch.tensor([start - self.place]))
            self._begun = start

    def run(self, layer: int, start: int, rows: Tensor, weights: RecurrenceWeights, *, settles: bool) -> Tensor:
        """The output of rows at place `start` and on. settles: states pass them."""
        held = Held(self.states[layer], self.inputs[layer])
        there = self._there if self._alike and not settles else None
        replayed = Replayed(start - self.bases[layer], there)
        out = self._run(self.recurrence, weights, held, rows, replayed, settles=settles)
        if self._there is not None and torch.cuda.is_current_stream_capturing():
            return out  # nothing ran yet
        self._begun = None
        self.bases[layer] = start + len(rows) * settles
        return out

    def ran(self, start: int) -> None:
        """A pass that began at place `start` is over: also where a graph ran it, for which no layer was called."""
        self.known([start] * len(self.bases))

    def known(self, bases: list[int]) -> None:
        """Set the place of each layer's state, by layer."""
        self.bases, self._begun = bases, None

    def settled(self, layer: int, place: int, weights: RecurrenceWeights) -> Held:
        """A copy of a layer's state and inputs, with the state moved to `place`, the end of the tokens whose inputs are
        held."""
        held = Held(self.states[layer].clone(), self.inputs[layer].clone())
        nothing = self.inputs.new_empty(0, sum(self.recurrence.row_parts))
        self._run(self.recurrence, weights, held, nothing, Replayed(place - self.bases[layer]), settles=True)
        return held

    def set_layer(self, layer: int, place: int, state: Tensor, tail: Tensor) -> None:
        """Take over a layer's state at `place`."""
        self.states[layer].copy_(state)
        self.tails()[layer].copy_(tail)
        self.bases[layer] = place

    def tails(self) -> Tensor:
        """The inputs of the last tokens before the states' places, [L, width - 1, kept]."""
        return self.inputs[:, : self.recurrence.width - 1]

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
        used = self.recurrence.width - 1 + held
        self.inputs[:, :used] = other.inputs[:, :used]
        self.known([base + moved for base in other.bases])

    @property
    def graph_key(self) -> Hashable:
        """The key of the pass, see `Cache`. None unless all states are at one place and a GPU's kernels read the number
        of replayed tokens from memory."""
        if self._there is None or not self._alike:
            return None
        return self._number, self.states.data_ptr(), self.inputs.data_ptr()

    def nbytes(self) -> int:
        return self.states.nbytes + self.inputs.nbytes

    def release(self) -> None:
        """Release the memory; the states are not used again."""
        for held in (self.states, self.inputs):
            self._memory.released(held, tier="device", purpose=PURPOSE)

    def _reserve(self, num_rows: int) -> None:
        """Have room for the inputs of so many rows."""
        missing, old = self.recurrence.width - 1 + num_rows - self.inputs.shape[1], self.inputs
        if missing > 0:
            self.inputs = self._allocate((len(old), old.shape[1] + missing, old.shape[2]), old.dtype)
            self.inputs[:, : old.shape[1]] = old
            self._memory.released(old, tier="device", purpose=PURPOSE)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(shape, dtype, tier="device", purpose=PURPOSE)
