"""The gated short convolution by the CPU's kernels (native/convolution.h), see `kernels.convolution`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from offload.config.mixers import ShortConvolution
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.interface import DTYPES, Convolution, Library

_MOST_WIDTH = 8  # as in native/convolution.h
_ALONE = 1 << 15  # numbers of an output up to which one thread is as quick as several


def short_convolution(
    own: ShortConvolution,
    weights: RecurrenceWeights,
    held: Held,
    rows: Tensor,
    replayed: Replayed,
    *,
    settles: bool,
    kernels: Library,
) -> Tensor:
    """See `kernels.recurrence.RunRecurrence`. Rows and inputs may have rows of any stride. A row's bits depend on the
    tokens up to it alone."""
    before, count, bias = own.width - 1, replayed.count, weights.taps_bias
    vectors = [weights.taps] + ([] if bias is None else [bias])
    assert rows.shape[1] == sum(own.parts)
    assert held.inputs.shape[1] == own.kept
    assert before + max(count, 0 if settles else len(rows)) <= len(held.inputs)
    assert weights.taps.shape == (own.width, own.channels)
    assert bias is None or bias.shape == (own.channels,)
    assert own.width <= _MOST_WIDTH
    assert held.inputs.dtype == rows.dtype
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in vectors)
    assert held.inputs.stride(1) == rows.stride(1) == 1
    out = rows.new_empty(len(rows), own.out_size)
    structure = Convolution(
        held.inputs.data_ptr(), rows.data_ptr(), out.data_ptr(), weights.taps.data_ptr(),
        None if bias is None else bias.data_ptr(), held.inputs.stride(0), rows.stride(0), count, len(rows), settles,
        own.channels, own.width,
    )  # fmt: skip
    threads = 1 if out.numel() <= _ALONE else torch.get_num_threads()
    kernels.library.run_convolution(DTYPES[rows.dtype], ctypes.byref(structure), threads)
    return out
