"""Recurrences of layers with a state: their weights, what is held of a layer's tokens, and the interface of their
kernels (docs/design.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from offload.config.mixers import MOST_TAPS, Recurring
from offload.kernels.norms import NormWeights

Kind = TypeVar("Kind", bound=Recurring, contravariant=True)


@dataclass(frozen=True)
class RecurrenceWeights:
    """The vectors of a layer with a state, fp32; None where its kind has none. taps, taps_bias: of the convolution
    [taps, channels], oldest first. decay: by head, -exp(A_log). time_bias: added to the decays' inputs, by head or
    by channel of each head's key. norm: of each head's output, or of all. skip: of Mamba-2, by head (D)."""

    taps: Tensor
    decay: Tensor | None = None
    time_bias: Tensor | None = None
    norm: NormWeights | None = None
    taps_bias: Tensor | None = None
    skip: Tensor | None = None

    @property
    def vectors(self) -> dict[str, Tensor]:
        """The vectors that there are besides norms, by name, as `HeadStates.vectors` has their shapes."""
        return {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}


@dataclass(frozen=True)
class Held:
    """The state and the inputs that are held of one layer's tokens. state: [*state_shape] fp32, after the tokens up to
    some place; a kind may have no numbers of it. inputs: [width - 1 + M, kept] in the dtype of projected rows: of the
    last width - 1 tokens before that place, then of the tokens after it, the numbers on which later states depend."""

    state: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class Replayed:
    """The tokens between the state's place and the first new row. count: their number. there: the same, int64 [1] on
    the GPU, from where a graph reads it; None elsewhere."""

    count: int
    there: Tensor | None = None


class RunRecurrence(Protocol[Kind]):
    """A recurrence of one kind over new rows. rows: projected, [T, sum(parts)]. Returns the output [T, out_size] in
    their dtype.

    The replayed tokens, whose rows are in `held`, bring the state to the first new row's place. settles: the state is
    then brought past the new rows, too, and their last width - 1 are what is held of them; else `held` has all of
    them, T <= M.
    """

    def __call__(
        self,
        recurrence: Kind,
        weights: RecurrenceWeights,
        held: Held,
        rows: Tensor,
        replayed: Replayed,
        /,
        *,
        settles: bool,
    ) -> Tensor: ...


def assert_layout(
    recurrence: Recurring, weights: RecurrenceWeights, held: Held, rows: Tensor, count: int, *, settles: bool
) -> None:
    """Assert what the CPU's kernels rely on: shapes, dtypes and strides, and room for all rows that will be held."""
    before, vectors = recurrence.width - 1, weights.vectors
    assert len(weights.taps) <= MOST_TAPS
    assert rows.shape[1] == sum(recurrence.row_parts)
    assert held.inputs.shape[1] == recurrence.kept
    assert held.inputs.dtype == rows.dtype
    assert held.inputs.stride(1) == rows.stride(1) == 1
    assert before + max(count, 0 if settles else len(rows)) <= len(held.inputs)
    assert held.state.shape == recurrence.state_shape
    assert {name: each.shape for name, each in vectors.items()} == recurrence.vectors
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in (held.state, *vectors.values()))
