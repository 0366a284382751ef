"""The gated delta rule and Mamba-2 by the CPU's kernels (native/delta.h), see `kernels.delta`, `kernels.mamba`.

A row's bits depend on the tokens up to it: not on the rows beside it, on how many of the tokens before it were held, or
on threads.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from offload.config.mixers import DeltaRule, Mamba2
from offload.kernels.products import address
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.interface import DTYPES, Delta, Library

_MOST_WIDTH = 8  # of the convolution, as in native/delta_rows.h
_spare: dict[int, Tensor] = {}  # scratch for so many threads, kept for the next call, which takes it out meanwhile


def run_states(
    states: DeltaRule | Mamba2,
    weights: RecurrenceWeights,
    held: Held,
    rows: Tensor,
    replayed: Replayed,
    *,
    settles: bool,
    kernels: Library,
) -> Tensor:
    """See `kernels.recurrence.RunRecurrence`. The state is contiguous; rows and inputs may have rows of any stride."""
    out = rows.new_empty(len(rows), states.out_size)
    structure = _structure(states, weights, held, rows, out, replayed.count, settles=settles)
    threads = torch.get_num_threads()
    room = threads * kernels.library.delta_room(ctypes.byref(structure))
    gated = out.numel() if isinstance(states, Mamba2) and states.norm is not None else 0
    scratch = _spare.pop(threads, None)
    if scratch is None or len(scratch) < room + gated:
        scratch = torch.empty(room + gated)
    structure.scratch = scratch.data_ptr()
    structure.gated = address(scratch[room:]) if gated else None
    kernels.library.run_delta(DTYPES[rows.dtype], ctypes.byref(structure), threads)
    _spare[threads] = scratch
    return out


def _structure(
    states: DeltaRule | Mamba2,
    weights: RecurrenceWeights,
    held: Held,
    rows: Tensor,
    out: Tensor,
    count: int,
    *,
    settles: bool,
) -> Delta:
    norm, before = weights.norm, states.width - 1
    vectors = (weights.taps, weights.taps_bias, weights.decay, weights.time_bias, weights.skip)
    assert held.state.shape == states.state_shape
    assert rows.shape[1] == sum(states.row_parts)
    assert held.inputs.shape[1] == states.kept
    assert before + max(count, 0 if settles else len(rows)) <= len(held.inputs)
    assert weights.taps.shape == (states.width, states.channels)
    assert norm is None or not norm.norm.centred
    assert norm is None or norm.bias is None
    assert states.width <= _MOST_WIDTH
    given = [each for each in (held.state, *vectors) if each is not None]
    assert all(each.dtype == torch.float32 for each in given)
    assert held.inputs.dtype == rows.dtype
    assert norm is None or norm.weight.dtype in (rows.dtype, torch.float32)
    assert all(each.is_contiguous() for each in (*given, *([] if norm is None else [norm.weight])))
    assert held.inputs.stride(1) == rows.stride(1) == 1
    rule = states if isinstance(states, DeltaRule) else None
    return Delta(
        held.state.data_ptr(), held.inputs.data_ptr(), rows.data_ptr(), out.data_ptr(), *map(address, vectors),
        None if norm is None else norm.weight.data_ptr(), None, None,
        held.inputs.stride(0), rows.stride(0), count, len(rows), settles,
        states.num_key_heads, states.num_heads, states.key_dim, states.value_dim, states.width,
        norm is not None and norm.weight.dtype == torch.float32,
        -1 if rule is None or rule.tiled is None else rule.tiled,
        rule is None,
        1.0 if rule is None else rule.steps, 0.0 if rule is None else rule.eps, 0.0 if norm is None else norm.norm.eps,
    )  # fmt: skip
