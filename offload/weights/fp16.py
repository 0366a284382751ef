"""The check that weights fit fp16's range."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from offload.errors import ModelError
from offload.formats.stored import StoredMatrix
from offload.weights.linear import numbers

_CHECKED_NUMBERS = 1 << 22  # of a stored matrix that are checked at once


def check_range(weights: Tensor | StoredMatrix, owner: str, dtype: torch.dtype) -> None:
    """Raise ModelError for weights of `owner` beyond fp16's range, if they run in it: a bf16 weight, or a scale times
    its code, may exceed it."""
    if dtype == torch.float16 and not all(map(all_finite, _in_fp16(weights))):
        raise ModelError(f"{owner} has weights beyond fp16's range of 65504; try --dtype bf16 or fp32")


def all_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite. It makes no temporaries; those of `isfinite` take three times a tensor's
    bytes."""
    return all(bool(end.isfinite()) for end in tensor.aminmax())


def _in_fp16(weights: Tensor | StoredMatrix) -> Iterator[Tensor]:
    """The numbers of `weights` that are in fp16, and of a stored matrix the decoded numbers, some rows at a time."""
    if isinstance(weights, StoredMatrix):
        outputs, inputs = weights.shape
        step = max(1, _CHECKED_NUMBERS // inputs)
        for first in range(0, outputs, step):
            yield numbers(weights[first : first + step], torch.float16)
    elif weights.dtype == torch.float16 and weights.numel():
        yield weights
