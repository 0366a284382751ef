"""Matrices as quantised checkpoints store them, of any content. No tests in here."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.formats.layout import GGUF_BLOCKS, GROUP_KINDS, GROUPS, encoding
from offload.formats.stored import StoredMatrix

NAMES = (*GGUF_BLOCKS, *(f"{kind}/{group}" for kind in GROUP_KINDS for group in GROUPS))
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where blocks have scales


def made_up(name: str, outputs: int, inputs: int, seed: int) -> StoredMatrix:
    """Any bytes, but scales of either sign that leave numbers near one, zeros of few bits, and floats that are
    numbers."""
    own, generator = encoding(name), torch.Generator().manual_seed(seed)
    shape = outputs, inputs // own.numbers, own.nbytes
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    kind, _, scale = own.kind.partition("_")
    if name == "MXFP4":
        _put(blocks, 0, torch.randint(118, 124, shape[:2], generator=generator, dtype=torch.uint8))
        return StoredMatrix(blocks.flatten(1), own)
    if own.kind not in GROUP_KINDS:
        for at in _HALVES.get(name, (0,)):
            _put(blocks, at, _scales(blocks, generator).half())
        return StoredMatrix(blocks.flatten(1), own)
    if kind == "FP8":
        blocks[blocks & 127 == 127] = 0x7E
    else:
        zeros = torch.randint(-40, 300, shape[:2], generator=generator, dtype=torch.int16)
        _put(blocks, 2, zeros)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[scale]
    _put(blocks, 0, _scales(blocks, generator).to(dtype))
    return StoredMatrix(blocks.flatten(1), own)


def _scales(blocks: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.rand(blocks.shape[:2], generator=generator) - 0.5) / 64


def _put(blocks: Tensor, at: int, numbers: Tensor) -> None:
    """At byte `at` of each block."""
    size = numbers.element_size()
    blocks[..., at : at + size] = numbers.contiguous()[..., None].view(torch.uint8)
