"""The gated short convolution by torch's operators, see `kernels.recurrence`."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.mixers import ShortConvolution
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed


def short_convolution(
    own: ShortConvolution, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """`RunRecurrence` by torch's operators. Products of B and x, sums over taps, which are fp32, and outputs are
    rounded to the dtype of rows, as by transformers."""
    before, count = own.width - 1, replayed.count
    b, c, x = rows.split(own.parts, 1)
    inputs = torch.cat([held.inputs[count : before + count], b * x])
    sums = torch.zeros_like(x, dtype=torch.float32)
    for tap, weight in enumerate(weights.taps):
        sums += inputs[tap : tap + len(rows)].float() * weight
    if weights.taps_bias is not None:
        sums += weights.taps_bias
    kept = inputs[-before:] if settles else inputs
    held.inputs[: len(kept)] = kept
    out: Tensor = c * sums.to(rows.dtype)
    return out
