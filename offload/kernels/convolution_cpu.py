"""Short convolutions, gated or dilated, by the CPU's kernels (native/convolution.h), see `kernels.convolution`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from offload.config.mixers import DilatedConvolution, ShortConvolution
from offload.kernels.products import address
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed, assert_layout
from offload.native.interface import DTYPES, Convolution, Library

_ALONE = 1 << 15  # numbers of an output up to which one thread is as quick as several


def convolution(
    own: ShortConvolution | DilatedConvolution,
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
    count = replayed.count
    assert_layout(own, weights, held, rows, count, settles=settles)
    out = rows.new_empty(len(rows), own.out_size)
    structure = Convolution(
        held.inputs.data_ptr(), rows.data_ptr(), out.data_ptr(), weights.taps.data_ptr(),
        address(weights.taps_bias), held.inputs.stride(0), rows.stride(0), count, len(rows), settles,
        own.channels, own.width, own.dilation if isinstance(own, DilatedConvolution) else 0,
    )  # fmt: skip
    threads = 1 if out.numel() <= _ALONE else torch.get_num_threads()
    kernels.library.run_convolution(DTYPES[rows.dtype], ctypes.byref(structure), threads)
    return out
