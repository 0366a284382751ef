"""A model's quantised weights, made from the exact ones: the target proposes to itself with them."""

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
from offload.weights.layers import ResidentLayers, Weights
from offload.weights.layout import LayerLayout, LayerWeights, in_codes
from offload.weights.linear import Linear
from offload.weights.quantised import LOW_BIT_WEIGHTS, fill_coded, fill_codes


@dataclass(frozen=True)
class QuantisedWeights:
    """weights: the matrices of the layers and of the head quantised, resident; norms and biases as they are, and so is
    a head that the checkpoint stores in blocks. blocks: the memory that was allocated for them."""

    weights: Weights
    blocks: Sequence[Tensor]

    def release(self, memory: Memory) -> None:
        """They are not used again."""
        for block in self.blocks:
            memory.released(block, tier="device", purpose=LOW_BIT_WEIGHTS)


def quantised_weights(
    weights: Weights, config: ModelConfig, bits: int, memory: Memory, kernels: DeviceKernels
) -> QuantisedWeights:
    """In `bits` bits, 4 or 6. config: of the shard that `weights` are of. Weights that stream cross the link for it
    once, unless their codes are there already. kernels: the CPU's or the GPU's.

    Raises UsageError where the kernels, which passes over them need, do not run; DoesNotFit.
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
    if head is not None and isinstance(head.weight, Tensor):  # one that is stored in few bits stays as it is
        packed = LayerLayout.pack(in_codes("head", tuple(head.weight.shape), bits))
        coded = Linear(Codes(packed.tensors(allocate(packed))["head.blocks"]), head.bias)
        fill_codes(coded, head, kernels)
        head = coded
    return QuantisedWeights(
        replace(weights, layers=ResidentLayers(layers, sum(layout.num_bytes for layout in layouts)), head=head), blocks
    )
