"""Files of recurrent states at places of a sequence: what a cache has of them is written, and read back into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from offload.config.block import DeltaRule
from offload.kv.checkpoints import Checkpoint, thinned
from offload.progress import OnBytes
from offload.session.folder import Folder
from offload.session.layout import StateFormat
from offload.session.manifest import NO_CHECKSUM, State, state_file
from offload.session.page import DTYPE_NAMES
from offload.session.tensors import read_tensors, write_tensors

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class StateRows(Protocol):
    """The cache interface of layers with a state, from which a session saves and which it fills: states by place, the
    number of tokens before them. `StateCache` implements it."""

    @property
    def delta(self) -> DeltaRule:
        """The delta rule of the layers."""
        ...

    @property
    def num_layers(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of tails."""
        ...

    @property
    def places(self) -> Sequence[int]:
        """The places of all checkpoints, ascending."""
        ...

    @property
    def most(self) -> int:
        """The number of checkpoints that there is room for."""
        ...

    def checkpoint(self, place: int) -> Checkpoint:
        """The checkpoint at one of `places`. Read-only, and valid until the next call."""
        ...

    def fill(self, place: int, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, which is copied. It counts once `restored` is called."""
        ...

    def restored(self, length: int) -> None:
        """Set the length to `length` tokens, with the state of the checkpoint there; later ones are dropped."""
        ...


def state_format_of(states: StateRows) -> StateFormat:
    delta = states.delta
    sizes = *delta.state_shape, delta.width - 1, delta.kept
    return StateFormat(states.num_layers, *sizes, DTYPE_NAMES[states.dtype])


def planned(states: StateRows, saved: Sequence[State], num_tokens: int, unchanged: int, tag: str) -> tuple[State, ...]:
    """The states of a save of the first `num_tokens` tokens, those of `saved` among them that lie in the first
    `unchanged` ones. The others have no checksum yet; `tag` is in their files' names."""
    known = {state.place: state for state in saved if state.place <= unchanged}
    places = [place for place in states.places if place <= num_tokens]
    return tuple(known.get(place) or State(place, state_file(place, tag), NO_CHECKSUM) for place in places)


def write_state(
    folder: Folder, name: str, form: StateFormat, checkpoint: Checkpoint, on_bytes: OnBytes, *, lasting: bool = True
) -> str:
    """Write a new file and return its checksum. OSError. lasting: see `write_page`."""
    return write_tensors(folder, name, form, [checkpoint.states, checkpoint.tails], on_bytes, lasting=lasting)


def read_state(folder: Folder, name: str, checksum: str, form: StateFormat, on_bytes: OnBytes) -> Checkpoint:
    """Read a file into new memory. Raises SessionError if it is damaged."""
    found = Checkpoint(torch.empty(form.states_shape), torch.empty(form.tails_shape, dtype=_DTYPES[form.dtype]))
    tensors = [found.states, found.tails]
    read_tensors(folder, name, checksum, form, tensors, on_bytes, what="file of states")
    return found


def read_states(
    folder: Folder, saved: Sequence[State], form: StateFormat, states: StateRows, length: int, on_bytes: OnBytes
) -> None:
    """Fill `states`, which are empty, from the files of places up to `length`, one of them, as many as there is room
    for. Raises SessionError if one is damaged; then they are empty. Peak host memory: one checkpoint more."""
    by_place: Mapping[int, State] = {state.place: state for state in saved if state.place <= length}
    try:
        for place in thinned(sorted(by_place), states.most):
            state = by_place[place]
            states.fill(place, read_state(folder, state.file, state.checksum, form, on_bytes))
    except BaseException:
        states.restored(0)
        raise
    states.restored(length)
