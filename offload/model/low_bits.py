"""A model's weights in 4 bits, made from the exact ones: the target proposes to itself with them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from offload.errors import UsageError
from offload.kernels.card import Card
from offload.kernels.codes import Codes, encode, encode_in_parts
from offload.kernels.native import Kernels
from offload.plan.config import ModelConfig
from offload.transfer.memory import Memory
from offload.transfer.weights import (
    OPERATORS,
    LayerLayout,
    LayerWeights,
    Linear,
    ResidentLayers,
    Weights,
    in_codes,
    matrix_of,
)

_PURPOSE = "low-bit weights"


def low_bit_weights(weights: Weights, config: ModelConfig, memory: Memory, kernels: Kernels | Card) -> Weights:
    """The matrices of the layers and of the head in 4 bits, resident; norms and biases as they are. config: of the
    shard that `weights` are of. Weights that stream cross the link for it once. kernels: the processor's or the card's.

    Raises UsageError where the kernels, which passes over them need, do not run; DoesNotFit.
    """
    if not kernels.usable:
        whose = "card" if isinstance(kernels, Card) else "processor"
        raise UsageError(f"weights in 4 bits need the {whose}'s kernels, which do not run: {kernels.reason}")
    layout = LayerLayout.of(config, weights.final_norm.dtype, coded=True)
    buffers, layers = list[Tensor](), list[LayerWeights]()
    for exact in weights.layers:
        buffers.append(memory.allocate((layout.num_bytes,), torch.uint8, tier="device", purpose=_PURPOSE))
        layers.append(layout.bind(buffers[-1]))
        _fill(layers[-1], exact, kernels)
    head = None if weights.head is None else _head(weights.head, memory, kernels)
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    return replace(weights, layers=ResidentLayers(layers, num_bytes), head=head)


def _fill(layer: LayerWeights, exact: LayerWeights, kernels: Kernels | Card) -> None:
    for name in OPERATORS:
        ours, theirs = getattr(layer, name), getattr(exact, name)
        _encode(theirs, ours, kernels)
        if ours.bias is not None:
            ours.bias.copy_(theirs.bias)
    for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
        if (norm := getattr(layer, name)) is not None:
            norm.copy_(getattr(exact, name))


def _head(exact: Linear, memory: Memory, kernels: Kernels | Card) -> Linear:
    layout = LayerLayout.pack(in_codes("head", tuple(exact.weight.shape)))
    buffer = memory.allocate((layout.num_bytes,), torch.uint8, tier="device", purpose=_PURPOSE)
    head = Linear(matrix_of(layout.tensors(buffer), "head"), exact.bias)
    _encode(exact, head, kernels)
    return head


def _encode(exact: Linear, coded: Linear, kernels: Kernels | Card) -> None:
    assert isinstance(exact.weight, Tensor)
    assert isinstance(coded.weight, Codes)
    if isinstance(kernels, Card):
        encode_in_parts(exact.weight, coded.weight)
    else:
        encode(exact.weight, coded.weight, kernels)
