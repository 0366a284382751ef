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
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed, assert_layout
from offload.native.interface import DTYPES, Delta, Library

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
    norm = weights.norm
    vectors = (weights.taps, weights.taps_bias, weights.decay, weights.time_bias, weights.skip)
    assert_layout(states, weights, held, rows, count, settles=settles)
    assert norm is None or not norm.norm.centred
    assert norm is None or norm.bias is None
    assert norm is None or (norm.weight.dtype in (rows.dtype, torch.float32) and norm.weight.is_contiguous())
    return Delta(
        held.state.data_ptr(), held.inputs.data_ptr(), rows.data_ptr(), out.data_ptr(), *map(address, vectors),
        None if norm is None else norm.weight.data_ptr(), None, None,
        held.inputs.stride(0), rows.stride(0), count, len(rows), settles,
        states.num_key_heads, states.num_heads, states.key_dim, states.value_dim, states.width,
        norm is not None and norm.weight.dtype == torch.float32, *_constants(states),
        0.0 if norm is None else norm.norm.eps,
    )  # fmt: skip


def _constants(states: DeltaRule | Mamba2) -> tuple[float, ...]:
    """The fields `tiled` to `epsilon` of the structure."""
    if isinstance(states, Mamba2):
        return -1, True, False, False, False, 1.0, 0.0, 0.0
    assert not states.by_channel or states.num_key_heads == states.num_heads
    tiled, least = -1 if states.tiled is None else states.tiled, 0.0 if states.least is None else states.least
    bounded, by_sigmoid = states.least is not None, states.gate == "sigmoid"
    return tiled, False, states.by_channel, bounded, by_sigmoid, states.steps, least, states.eps
