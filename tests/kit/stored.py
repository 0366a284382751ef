"""Matrices as quantised checkpoints store them, of any content. No tests in here."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.formats.encodings import ENCODINGS, Encoding
from offload.formats.stored import StoredMatrix

NAMES = (*ENCODINGS,)
GGUF = [name for name in NAMES if "/" not in name]


def places(own: Encoding) -> tuple[int, ...]:
    """The bytes where a block has its scale and least value."""
    return (own.scale_at, own.scale_at + 2) if own.steps in ("least", "k") else (own.scale_at,)


def made_up(name: str, outputs: int, inputs: int, seed: int) -> StoredMatrix:
    """Any bytes, but scales of either sign that leave numbers near one, zeros of few bits, and floats that are
    numbers."""
    own, generator = ENCODINGS[name], torch.Generator().manual_seed(seed)
    shape = outputs, inputs // own.numbers, own.nbytes
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    if own.code == "e4m3":
        blocks[blocks & 127 == 127] = 0x7E
    if own.steps == "zero":
        _put(blocks, 2, torch.randint(-40, 300, shape[:2], generator=generator, dtype=torch.int16))
    if own.scale == "E8M0":
        _put(blocks, 0, torch.randint(118, 124, shape[:2], generator=generator, dtype=torch.uint8))
    else:
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[own.scale]
        for at in places(own):
            _put(blocks, at, ((torch.rand(shape[:2], generator=generator) - 0.5) / 64).to(dtype))
    return StoredMatrix(blocks.flatten(1), own)


def _put(blocks: Tensor, at: int, numbers: Tensor) -> None:
    """At byte `at` of each block."""
    size = numbers.element_size()
    blocks[..., at : at + size] = numbers.contiguous()[..., None].view(torch.uint8)
