"""The gated delta rule by the CPU's kernels (native/delta.h), see `kernels.delta`.

A row's bits depend on the tokens up to it: not on the rows beside it, on how many of the tokens before it were held, or
on threads.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from offload.config.block import DeltaRule
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.interface import DTYPES, Delta, Library

_MOST_WIDTH = 8  # of the convolution, as in native/delta_rows.h
_spare: dict[int, Tensor] = {}  # scratch for so many threads, kept for the next call, which takes it out meanwhile


def delta_rule(
    delta: DeltaRule,
    weights: RecurrenceWeights,
    held: Held,
    rows: Tensor,
    replayed: Replayed,
    *,
    settles: bool,
    kernels: Library,
) -> Tensor:
    """See `kernels.recurrence.RunRecurrence`. The state is contiguous; rows and inputs may have rows of any stride."""
    out = rows.new_empty(len(rows), delta.out_size)
    structure = _structure(delta, weights, held, rows, out, replayed.count, settles=settles)
    threads = torch.get_num_threads()
    room = threads * kernels.library.delta_room(ctypes.byref(structure))
    scratch = _spare.pop(threads, None)
    if scratch is None or len(scratch) < room:
        scratch = torch.empty(room)
    structure.scratch = scratch.data_ptr()
    kernels.library.run_delta(DTYPES[rows.dtype], ctypes.byref(structure), threads)
    _spare[threads] = scratch
    return out


def _structure(
    delta: DeltaRule, weights: RecurrenceWeights, held: Held, rows: Tensor, out: Tensor, count: int, *, settles: bool
) -> Delta:
    norm, before = weights.norm, delta.width - 1
    assert norm is not None
    assert weights.decay is not None
    assert weights.time_bias is not None
    vectors = (weights.taps, weights.decay, weights.time_bias)
    assert held.state.shape == delta.state_shape
    assert rows.shape[1] == sum(delta.parts)
    assert held.inputs.shape[1] == delta.kept
    assert before + max(count, 0 if settles else len(rows)) <= len(held.inputs)
    assert weights.taps.shape == (delta.width, delta.channels)
    assert not norm.norm.centred
    assert norm.bias is None
    assert delta.width <= _MOST_WIDTH
    assert all(each.dtype == torch.float32 for each in (held.state, *vectors))
    assert held.inputs.dtype == rows.dtype
    assert norm.weight.dtype in (rows.dtype, torch.float32)
    assert all(each.is_contiguous() for each in (held.state, norm.weight, *vectors))
    assert held.inputs.stride(1) == rows.stride(1) == 1
    return Delta(
        held.state.data_ptr(), held.inputs.data_ptr(), rows.data_ptr(), out.data_ptr(),
        *(each.data_ptr() for each in vectors), norm.weight.data_ptr(), None,
        held.inputs.stride(0), rows.stride(0), count, len(rows), settles,
        delta.num_key_heads, delta.num_heads, delta.key_dim, delta.value_dim, delta.width,
        norm.weight.dtype == torch.float32, -1 if delta.tiled is None else delta.tiled,
        delta.steps, delta.eps, norm.norm.eps,
    )  # fmt: skip
