"""A model's weights in 4 bits, made from the exact ones: the target proposes to itself with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch

from offload.errors import UsageError
from offload.kernels.card import Card
from offload.kernels.native import Kernels
from offload.plan.config import ModelConfig
from offload.transfer.coded import LOW_BIT_WEIGHTS, fill_coded, fill_codes
from offload.transfer.layout import LayerLayout, LayerWeights, Linear, in_codes, matrix_of
from offload.transfer.memory import Memory
from offload.transfer.weights import ResidentLayers, Weights


def low_bit_weights(weights: Weights, config: ModelConfig, memory: Memory, kernels: Kernels | Card) -> Weights:
    """The matrices of the layers and of the head in 4 bits, resident; norms and biases as they are. config: of the
    shard that `weights` are of. Weights that stream cross the link for it once, unless their codes are there
    already. kernels: the processor's or the card's.

    Raises UsageError where the kernels, which passes over them need, do not run; DoesNotFit.
    """
    if not kernels.usable:
        whose = "card" if isinstance(kernels, Card) else "processor"
        raise UsageError(f"weights in 4 bits need the {whose}'s kernels, which do not run: {kernels.reason}")
    layout = LayerLayout.of(config, weights.final_norm.dtype, coded=True)
    layers = list[LayerWeights]()
    made = weights.layers.coded
    for exact in islice(weights.layers, config.num_layers - len(made)) if made else weights.layers:
        buffer = memory.allocate((layout.num_bytes,), torch.uint8, tier="device", purpose=LOW_BIT_WEIGHTS)
        layers.append(layout.bind(buffer))
        fill_coded(layers[-1], exact, kernels)
    layers += made
    head = None if weights.head is None else _head(weights.head, memory, kernels)
    return replace(weights, layers=ResidentLayers(layers, len(layers) * layout.num_bytes), head=head)


def _head(exact: Linear, memory: Memory, kernels: Kernels | Card) -> Linear:
    layout = LayerLayout.pack(in_codes("head", tuple(exact.weight.shape)))
    buffer = memory.allocate((layout.num_bytes,), torch.uint8, tier="device", purpose=LOW_BIT_WEIGHTS)
    head = Linear(matrix_of(layout.tensors(buffer), "head"), exact.bias)
    fill_codes(head, exact, kernels)
    return head
