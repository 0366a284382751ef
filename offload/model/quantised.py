"""Quantised copies of a model's weights, with which the target is its own draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.errors import UsageError
from offload.formats.quantised import Codes
from offload.interrupts import poll
from offload.kernels.device import DeviceKernels
from offload.transfer.memory import Memory
from offload.weights.layers import ResidentLayers
from offload.weights.layout import LayerLayout, LayerWeights, in_codes
from offload.weights.linear import Linear
from offload.weights.loader import Weights
from offload.weights.quantised import LOW_BIT_WEIGHTS, fill_coded, fill_codes


@dataclass(frozen=True)
class QuantisedWeights:
    """A quantised copy of a model's weights. weights: resident; the matrices of the layers and of the head are
    quantised. Norms and biases are the exact ones, and so is a head that the checkpoint stores in blocks. blocks: the
    memory that was allocated for the copy."""

    weights: Weights
    blocks: Sequence[Tensor]

    def release(self, memory: Memory) -> None:
        """Release the copy's memory."""
        for block in self.blocks:
            memory.released(block, tier="device", purpose=LOW_BIT_WEIGHTS)


def quantised_weights(
    weights: Weights, config: ModelConfig, bits: int, memory: Memory, kernels: DeviceKernels
) -> QuantisedWeights:
    """A copy of `weights` in `bits` bits, 4 or 6. config: of the shard that `weights` belong to. Streamed weights cross
    the link once for it, unless their codes are on the device already. kernels: the CPU's or the GPU's.

    Raises UsageError where the kernels, which passes over the copy need, do not run; DoesNotFit.
    """
    if not kernels.usable:
        raise UsageError(
            f"weights in {bits} bits need the {kernels.whose}'s kernels, which do not run: {kernels.reason}"
        )
    blocks = list[Tensor]()

    def allocate(layout: LayerLayout) -> Tensor:
        blocks.append(memory.allocate((layout.num_bytes,), torch.uint8, tier="device", purpose=LOW_BIT_WEIGHTS))
        return blocks[-1]

    layouts = LayerLayout.of_layers(config, weights.embedding.dtype, bits)
    layers = list[LayerWeights]()
    made = weights.layers.coded
    for exact in islice(weights.layers, config.num_layers - len(made)) if made else weights.layers:
        poll()
        layout = layouts[len(layers)]
        layers.append(layout.bind(allocate(layout)))
        fill_coded(layers[-1], exact, kernels)
    layers += made
    head = weights.head
    if head is not None and isinstance(head.weight, Tensor):  # a head that is stored in blocks is used as it is
        packed = LayerLayout.pack(in_codes("head", tuple(head.weight.shape), bits))
        coded = Linear(Codes(packed.tensors(allocate(packed))["head.blocks"]), head.bias)
        fill_codes(coded, head, kernels)
        head = coded
    return QuantisedWeights(
        replace(weights, layers=ResidentLayers(layers, sum(layout.num_bytes for layout in layouts)), head=head), blocks
    )
