"""Homes of streamed layers: the encodings of a layer's weights on the host and over the link, and their decoding on the
device.

Weights are raw; packed, in about 12 of 16 bits; or lossless residuals of about 9 or 8 bits, if their codes in 4 or 6
bits are on the device. No bit of a weight is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.errors import UsageError
from offload.formats.layout import BESIDE_CODES, Packing, home_bytes
from offload.formats.packed import pack_numbers
from offload.formats.residuals import Residual, split_off
from offload.kernels import choice, cpu
from offload.kernels.cpu import CpuKernels
from offload.kernels.device import DeviceKernels
from offload.transfer.memory import Memory, sent
from offload.weights.layout import LayerLayout, LayerWeights
from offload.weights.quantised import LOW_BIT_WEIGHTS, fill_coded

PACKING = Packing.roomiest(1 << 14, 1 << 10)
_HOME = "target layers"


class Home(Protocol):
    """The home of one layer. content: uint8 on the host, the bytes that cross the link."""

    @property
    def content(self) -> Tensor: ...

    def open(self, arrived: Tensor, layer: Tensor) -> None:
        """Decode `arrived`, the content on the device, uint8, into `layer`, a flat buffer there."""
        ...


@dataclass(frozen=True)
class AsTheyAre:
    """A raw home: the layer's flat buffer itself."""

    content: Tensor

    def open(self, arrived: Tensor, layer: Tensor) -> None:
        layer.copy_(arrived)


@dataclass(frozen=True)
class Packed:
    """A packed home: whole packed blocks of the buffer's numbers, and then the raw rest. starts: of the blocks, on the
    device."""

    content: Tensor
    starts: Tensor
    kernels: DeviceKernels

    def open(self, arrived: Tensor, layer: Tensor) -> None:
        whole = 2 * PACKING.numbers * (len(self.starts) - 1)
        self.kernels.unpack_numbers(arrived, self.starts, layer[:whole].view(torch.bfloat16), PACKING)
        layer[whole:].copy_(arrived[len(arrived) - (len(layer) - whole) :])


@dataclass(frozen=True)
class BesideCodes:
    """A home of residuals of the layer's matrices, one after the other, followed by the raw rest of the buffer.

    residuals: for each of the layer's operators the position of its residual, and the offset of the escapes in it.
    coded: the layer's codes on the device.
    """

    content: Tensor
    residuals: tuple[tuple[slice, int], ...]
    coded: LayerWeights
    layout: LayerLayout
    kernels: DeviceKernels

    def open(self, arrived: Tensor, layer: Tensor) -> None:
        exact = self.layout.bind(layer)
        for own, operator, (place, escapes) in zip(self.coded.operators, exact.operators, self.residuals, strict=True):
            self.kernels.restore(arrived[place], escapes, own.weight, operator.weight)  # type: ignore[arg-type]
        first = self.layout.end_of_matrices
        layer[first:].copy_(arrived[len(arrived) - (len(layer) - first) :])


class HomeMaker:
    """The maker of homes with fewer than 16 bits a weight.

    coded: the layers quantised so far, on the device, if homes are residuals.
    """

    def __init__(self, memory: Memory, bits: int) -> None:
        """bits: 12, or 9 or 8 beside codes in 4 or 6 bits. Raises UsageError if kernels cannot run."""
        self._memory, self._bits = memory, bits
        self._code_bits = {beside: code for code, beside in BESIDE_CODES.items()}.get(bits)
        host = cpu.kernels()
        self._device = choice.gpu_kernels(memory.device) if memory.device.type == "cuda" else host
        self.coded: list[LayerWeights] = []
        for kernels in (host, self._device):
            if not kernels.usable:
                raise UsageError(
                    f"weights that cross the link in {bits} bits need kernels, which do not run: {kernels.reason}; "
                    "add --link-bits 16"
                )
        assert isinstance(host, CpuKernels)
        self._host = host

    def make(self, layer: Tensor, layout: LayerLayout, config: ModelConfig) -> Home:
        """The home of a layer, from its flat buffer on the host in `layout`, whose matrices are overwritten. config: of
        that layer alone, or of a shard of it. Raises DoesNotFit."""
        planned, coded = self._planned(layout, config), self._coded_layout(config)
        home = None if coded is None else self._beside_codes(layer, layout, coded, planned)
        return home or self._packed(layer, layout, planned)

    def _planned(self, layout: LayerLayout, config: ModelConfig) -> int:
        """The planned bytes of a home."""
        return home_bytes(layout.num_bytes, config.layer_matrix_elements(), self._bits)

    def _coded_layout(self, config: ModelConfig) -> LayerLayout | None:
        return None if self._code_bits is None else LayerLayout.of(config, torch.bfloat16, self._code_bits)

    def _beside_codes(self, layer: Tensor, layout: LayerLayout, coded_layout: LayerLayout, planned: int) -> Home | None:
        """A home of residuals; None if a weight could not be restored exactly. Then the codes serve only for
        proposing."""
        exact, buffer = layout.bind(layer), torch.zeros(coded_layout.num_bytes, dtype=torch.uint8)
        coded = coded_layout.bind(buffer)
        fill_coded(coded, exact, self._host)
        self.coded.append(coded_layout.bind(self._on_device(buffer)))
        parts = list[Residual]()
        for own, operator in zip(coded.operators, exact.operators, strict=True):
            if (part := split_off(operator.weight, own.weight, self._host)) is None:  # type: ignore[arg-type]
                return None
            parts.append(part)
        ends = list(accumulate(len(part.content) for part in parts))
        places = [slice(end - len(part.content), end) for end, part in zip(ends, parts, strict=True)]
        residuals = tuple((place, part.escapes) for place, part in zip(places, parts, strict=True))
        content = self._home([part.content for part in parts], layer[layout.end_of_matrices :], planned)
        return BesideCodes(content, residuals, self.coded[-1], layout, self._device)

    def _packed(self, layer: Tensor, layout: LayerLayout, planned: int) -> Home:
        numbers = layout.end_of_matrices // 2 // PACKING.numbers * PACKING.numbers
        if not numbers:  # a layer smaller than a block
            return AsTheyAre(self._home([], layer, planned))
        content, starts = pack_numbers(layer[: 2 * numbers].view(torch.bfloat16), PACKING, self._host)
        content = self._home([content], layer[2 * numbers :], planned)
        return Packed(content, sent(starts, self._memory.device), self._device)

    def _on_device(self, coded: Tensor) -> Tensor:
        shape = tuple(coded.shape)
        return self._memory.allocate(shape, torch.uint8, tier="device", purpose=LOW_BIT_WEIGHTS).copy_(coded)

    def _home(self, parts: Sequence[Tensor], rest: Tensor, planned: int) -> Tensor:
        """A host block with `parts`, one after the other, and the rest. It has the planned bytes even if fewer would
        suffice, since such blocks were pinned while the checkpoint was read."""
        needed = sum(len(part) for part in (*parts, rest))
        block = self._block(planned)
        if needed > planned:
            self._memory.released(block, tier="host", purpose=_HOME)
            del block
            block = self._block(needed)
        torch.cat([*parts, rest], out=block[:needed])
        return block[:needed]

    def _block(self, num_bytes: int) -> Tensor:
        return self._memory.allocate((num_bytes,), torch.uint8, tier="host", purpose=_HOME)
