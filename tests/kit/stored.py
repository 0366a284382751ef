"""Matrices as quantised checkpoints store them, of any content. No tests in here."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.formats.encodings import ENCODINGS, Encoding
from offload.formats.stored import StoredMatrix

NAMES = (*ENCODINGS,)
GGUF = [name for name in NAMES if "/" not in name and not ENCODINGS[name].tail]  # GGUF's own blocks
YOUNG = ("Q2_0", "Q1_0")  # that the package gguf does not decode


def is_quicker_in_fixed_point(name: str, dtype: torch.dtype, instructions: str) -> bool:
    """Whether a CPU alone multiplies rows with a kind in fixed point: unless it multiplies bf16 in pairs."""
    in_pairs = dtype == torch.bfloat16 and instructions in ("avx512_bf16", "amx")
    if dtype == torch.float32 or in_pairs or not ENCODINGS[name].has_integers:
        return False
    on_avx2 = ("Q4_0", "Q4_1", "Q4_K", "MXFP4", "Q2_K", "Q2_0", "TQ2_0")
    return name in on_avx2 if instructions == "avx2" else instructions != "neon" and not name.startswith("IQ1")


def places(own: Encoding) -> tuple[int, ...]:
    """The bytes where a block has its scale and least value."""
    return (own.scale_at, own.scale_at + 2) if own.steps == "least" or own.least else (own.scale_at,)


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
    if own.scale == "E4M3":  # numbers, and not the same one in each row
        blocks[..., :4] &= 63
    elif own.scale == "F16/4":
        scales = ((torch.rand(shape[:2], generator=generator) - 0.5) / 64).half().view(torch.int16)
        for part in range(4):
            at = own.scale_at + 2 * part + 1
            blocks[..., at] = blocks[..., at] & 15 | (scales >> 4 * part & 15).to(torch.uint8) << 4
    elif own.scale == "E8M0":
        _put(blocks, 0, torch.randint(118, 124, shape[:2], generator=generator, dtype=torch.uint8))
    else:
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[own.scale]
        for at in places(own):
            _put(blocks, at, ((torch.rand(shape[:2], generator=generator) - 0.5) / 64).to(dtype))
    rows = blocks.flatten(1)
    if own.tail:
        tails = torch.rand(outputs, 1, generator=generator) / 64 + 0.01
        rows = torch.cat([rows, tails.view(torch.uint8)], 1)
    return StoredMatrix(rows, own)


def _put(blocks: Tensor, at: int, numbers: Tensor) -> None:
    """At byte `at` of each block."""
    size = numbers.element_size()
    blocks[..., at : at + size] = numbers.contiguous()[..., None].view(torch.uint8)
