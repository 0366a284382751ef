"""Short convolutions, gated or dilated, by torch's operators, see `kernels.recurrence`."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.mixers import DilatedConvolution, ShortConvolution
from offload.kernels.exponentials import silu
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed


def short_convolution(
    own: ShortConvolution, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """`RunRecurrence` by torch's operators. Products of B and x, sums over taps, which are fp32, and outputs are
    rounded to the dtype of rows, as by transformers."""
    before, count = own.width - 1, replayed.count
    b, c, x = rows.split(own.parts, 1)
    inputs = torch.cat([held.inputs[count : before + count], b * x])
    sums = _summed(inputs, weights.taps, len(rows))
    if weights.taps_bias is not None:
        sums += weights.taps_bias
    _hold(held, inputs, before, settles=settles)
    out: Tensor = c * sums.to(rows.dtype)
    return out


def dilated_convolution(
    own: DilatedConvolution, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """`RunRecurrence` by torch's operators. Sums over taps, which are fp32, and outputs are rounded to the dtype of
    rows, as by transformers."""
    before, count = own.width - 1, replayed.count
    inputs = torch.cat([held.inputs[count : before + count], rows])
    sums = _summed(inputs, weights.taps, len(rows), own.dilation)
    _hold(held, inputs, before, settles=settles)
    return silu(sums.to(rows.dtype).float()).to(rows.dtype)


def _summed(inputs: Tensor, taps: Tensor, num_rows: int, dilation: int = 1) -> Tensor:
    """The sums over taps for the last `num_rows` of the inputs, in fp32."""
    sums = torch.zeros(num_rows, inputs.shape[1], dtype=torch.float32, device=inputs.device)
    for tap, weight in enumerate(taps):
        sums += inputs[tap * dilation :][:num_rows].float() * weight
    return sums


def _hold(held: Held, inputs: Tensor, before: int, *, settles: bool) -> None:
    kept = inputs[-before:] if settles else inputs
    held.inputs[: len(kept)] = kept
