"""Quantised copies of a layer's weights, made from the exact ones."""

from __future__ import annotations

from torch import Tensor

from offload.formats.quantised import Codes
from offload.kernels.device import DeviceKernels
from offload.weights.layout import LayerWeights
from offload.weights.linear import Linear

LOW_BIT_WEIGHTS = "quantised weights"  # in the ledger


def fill_coded(layer: LayerWeights, exact: LayerWeights, kernels: DeviceKernels) -> None:
    """Fill `layer`, whose matrices are codes, from `exact`, by the kernels of their common device; other tensors are
    copied."""
    for coded, operator in zip(layer.operators, exact.operators, strict=True):
        fill_codes(coded, operator, kernels)
    for own, theirs in zip(layer.vectors(), exact.vectors(), strict=True):
        own.copy_(theirs)


def fill_codes(coded: Linear, exact: Linear, kernels: DeviceKernels) -> None:
    """Fill the codes of one matrix."""
    assert isinstance(exact.weight, Tensor)
    assert isinstance(coded.weight, Codes)
    kernels.quantise(exact.weight, coded.weight)
