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
    for name, own in exact.operators.items():
        fill_codes(layer.operators[name], own, kernels)
    for vector, theirs in zip(layer.vectors(), exact.vectors(), strict=True):
        vector.copy_(theirs)


def fill_codes(coded: Linear, exact: Linear, kernels: DeviceKernels) -> None:
    """Fill the codes of one matrix."""
    assert isinstance(exact.weight, Tensor)
    assert isinstance(coded.weight, Codes)
    kernels.quantise(exact.weight, coded.weight)
