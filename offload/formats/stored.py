"""Stored matrices of quantised checkpoints, and their decoding to numbers.

GGUF's blocks have the layout of its files (ggml's block_q4_K and so on), also those of MXFP4, to which safetensors
checkpoints in MXFP4 are converted. This program's own blocks, to which other safetensors checkpoints are converted,
begin with GROUP_HEAD bytes. INT4 and INT8: a 16-bit scale and a zero, int16; then the numbers q, unsigned; with 4 bits,
the low halves of the bytes hold the first half of the block. A number is (q - zero) * scale, rounded to the scale's
dtype. FP8: a scale of 16 bits and 2 bytes of padding, or of 32 bits; then numbers in e4m3, each multiplied by the scale
in the scale's dtype.

A number is computed in fp32, step by step as the format's own library does (gguf 0.19: gguf.quants). Where a matrix is
decoded, it is rounded to the compute dtype; the CPU's kernels multiply few rows without (native/stored_products.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.layout import GROUP_HEAD, GROUP_KINDS, KINDS, Encoding
from offload.native.interface import DTYPES, Library, Matrix

_TWICE_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)  # by code
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class StoredMatrix:
    """A stored matrix [outputs, inputs]. rows: uint8 [outputs, bytes], contiguous, each of whole blocks of
    `encoding`."""

    rows: Tensor
    encoding: Encoding

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (outputs, inputs)."""
        return len(self.rows), self.rows.shape[1] // self.encoding.nbytes * self.encoding.numbers

    def __getitem__(self, rows: slice) -> StoredMatrix:
        return StoredMatrix(self.rows[rows], self.encoding)

    def aligned(self) -> StoredMatrix:
        """The matrix, or a copy if it is a part of another one that begins inside a word of 4 bytes, which a GPU's
        kernels read."""
        assert self.rows.is_contiguous()
        return self if self.rows.data_ptr() % 4 == 0 else StoredMatrix(self.rows.clone(), self.encoding)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The decoded numbers, [outputs, inputs] of `dtype`, by torch's operators on any device. Temporary memory:
        about 16 bytes a number."""
        blocks = self.rows.view(-1, self.encoding.nbytes)
        return _decoder(self.encoding)(blocks).to(dtype).view(self.shape)


def decode(stored: StoredMatrix, out: Tensor, kernels: Library) -> None:
    """Decode to out, [outputs, inputs] contiguous on the CPU, by the CPU's kernels, on all threads."""
    assert out.is_contiguous()
    assert tuple(out.shape) == stored.shape
    matrix = described(stored)
    kernels.library.decode_rows(DTYPES[out.dtype], matrix, *stored.shape, out.data_ptr(), torch.get_num_threads())


def described(stored: StoredMatrix) -> Matrix:
    """The description of a matrix for the CPU's kernels, valid as long as the matrix exists."""
    assert stored.rows.is_contiguous()
    own = stored.encoding
    return Matrix(stored.rows.data_ptr(), KINDS.index(own.kind) + 1, own.numbers, own.nbytes)


def _decoder(encoding: Encoding) -> Callable[[Tensor], Tensor]:
    """The function that decodes blocks, uint8 [n, nbytes] -> fp32 [n, numbers]."""
    if encoding.kind in GROUP_KINDS:
        scales = _SCALES[encoding.kind.partition("_")[2]]
        return lambda blocks: _grouped(blocks, GROUP_KINDS[encoding.kind], scales, encoding.kind.startswith("FP8"))
    return _GGUF[encoding.kind]


def _grouped(blocks: Tensor, bits: int, scales: torch.dtype, is_float: bool) -> Tensor:
    head, numbers = blocks[:, :GROUP_HEAD].contiguous(), blocks[:, GROUP_HEAD:]
    scale = head[:, : scales.itemsize].contiguous().view(scales).float()
    if is_float:
        return (numbers.contiguous().view(torch.float8_e4m3fn).float() * scale).to(scales).float()
    zero = head[:, 2:].contiguous().view(torch.int16).float()
    codes = torch.cat([numbers & 15, numbers >> 4], 1) if bits == 4 else numbers
    return ((codes.float() - zero) * scale).to(scales).float()


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block, fp32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _low_high(nibbles: Tensor) -> Tensor:
    """Split bytes: [n, bytes] -> [n, 2 * bytes], the low halves, then the high ones."""
    return torch.cat([nibbles & 15, nibbles >> 4], 1)


def _fifth(blocks: Tensor, at: int) -> Tensor:
    """The fifth bits of 32 numbers, 16 or 0 each, from the 4 bytes at byte `at`."""
    bits = blocks[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (bits & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_low_high(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _low_high(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * ((_low_high(blocks[:, 6:]) | _fifth(blocks, 2)).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_low_high(blocks[:, 8:]) | _fifth(blocks, 4)).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _mxfp4(blocks: Tensor) -> Tensor:
    """Floats of 4 bits, e2m1, times a power of two, e8m0 (OCP Microscaling Formats 1.0). As in ggml, the floats are
    doubled and the scales halved, so that the ones are integers and the others finite; -0 is 0."""
    exponent = blocks[:, :1].int()
    half_scale = torch.where(exponent > 1, (exponent - 1) << 23, (exponent + 1) << 21).view(torch.float32)
    return half_scale * torch.tensor(_TWICE_E2M1, device=blocks.device)[_low_high(blocks[:, 1:]).int()]


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The steps and offsets (to subtract) of a block's 8 groups of 32 numbers, fp32 [n, 8, 1] both: 6 bits each, times
    the block's own."""
    low, middle, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    steps = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], 1)
    least = torch.cat([middle & 63, high >> 4 | (middle >> 6) << 4], 1)
    return (_half(blocks, 0) * steps.float())[..., None], (_half(blocks, 2) * least.float())[..., None]


def _by_64(nibbles: Tensor) -> Tensor:
    """Split bytes by 32: [n, 128] -> [n, 8, 32], for each 32 bytes the low halves, then the high ones."""
    parts = nibbles.view(-1, 4, 1, 32)
    return torch.cat([parts & 15, parts >> 4], 2).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    step, least = _k_scales(blocks)
    return (step * _by_64(blocks[:, 16:]).float() - least).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    step, least = _k_scales(blocks)
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups & 1) << 4
    return (step * (_by_64(blocks[:, 48:]) | fifth).float() - least).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    lower, upper = blocks[:, :128].view(-1, 2, 2, 32), blocks[:, 128:192].view(-1, 2, 1, 32)
    lower = torch.stack([lower & 15, lower >> 4], 2).flatten(2, 3)  # [n, 2, 4, 32]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    numbers = (lower | (upper >> shifts & 3) << 4).float() - 32
    scales = blocks[:, 192:208].view(torch.int8).float()
    return ((_half(blocks, 208) * scales)[..., None] * numbers.view(-1, 16, 16)).flatten(1)


_GGUF = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "MXFP4": _mxfp4, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
