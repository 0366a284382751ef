"""Stored matrices of quantised checkpoints, and their decoding to numbers, by the table of formats/encodings.py.

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

from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.encodings import BOOKS, Encoding, Plane
from offload.native.interface import DTYPES, Library, Matrix

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
        return _numbers(self.rows.view(-1, self.encoding.nbytes), self.encoding).to(dtype).view(self.shape)


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
    return Matrix(stored.rows.data_ptr(), own.number, own.numbers, own.nbytes)


def _numbers(blocks: Tensor, own: Encoding) -> Tensor:
    """The numbers of blocks, uint8 [n, nbytes] -> fp32 [n, groups, numbers of a group]."""
    step, least = _steps(blocks, own)
    numbers = step * _codes(blocks, own).view(len(blocks), step.shape[1], -1)
    if own.is_rounded:
        return numbers.to(_SCALES[own.scale]).float()
    return numbers if least is None else numbers + least


def _codes(blocks: Tensor, own: Encoding) -> Tensor:
    """The numbers by which steps are multiplied, fp32 [n, numbers]."""
    bits = _bits(blocks, own.codes, own.numbers)
    if own.high.bits:
        bits |= _bits(blocks, own.high, own.numbers) << own.codes.bits
    if own.code in BOOKS:
        return torch.tensor(BOOKS[own.code], dtype=torch.float32, device=blocks.device)[bits.int()]
    if own.code != "integer":
        return bits.view({"signed": torch.int8, "e4m3": torch.float8_e4m3fn}[own.code]).float()
    centre = _at(blocks, own.scale_at + 2, torch.int16)[..., 0] if own.steps == "zero" else own.centre
    return bits.float() - centre


def _bits(blocks: Tensor, plane: Plane, numbers: int) -> Tensor:
    """The bits of a plane, in the lowest places, uint8 [n, numbers]."""
    runs = blocks[:, plane.at : plane.at + numbers * plane.bits // 8].unflatten(1, (-1, 1, plane.run))
    shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=blocks.device)[:, None]
    parts: Tensor = runs >> shifts & (1 << plane.bits) - 1
    return parts.flatten(1)


def _steps(blocks: Tensor, own: Encoding) -> tuple[Tensor, Tensor | None]:
    """The steps of groups, and the least values that are added, fp32 [n, groups, 1] both."""
    at = own.scale_at
    if own.scale == "E8M0":  # as in ggml, half the scale, which is finite, as numbers in BOOKS are doubled
        exponent = blocks[:, at : at + 1, None].int()
        return torch.where(exponent > 1, (exponent - 1) << 23, (exponent + 1) << 21).view(torch.float32), None
    scale = _at(blocks, at, _SCALES[own.scale])
    if own.steps == "least":
        return scale, _at(blocks, at + 2, torch.float16)
    if own.steps == "bytes":
        return scale * blocks[:, at - own.numbers // own.group : at].view(torch.int8).float()[..., None], None
    if own.steps == "k":  # 6 bits of each of 8 groups
        low, middle, high = blocks[:, 4:16, None].view(-1, 3, 4, 1).unbind(1)
        steps = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], 1)
        least = torch.cat([middle & 63, high >> 4 | (middle >> 6) << 4], 1)
        return scale * steps.float(), -_at(blocks, at + 2, torch.float16) * least.float()
    return scale, None


def _at(blocks: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    """The number of `dtype` at byte `at` of each block, fp32 [n, 1, 1]."""
    return blocks[:, at : at + dtype.itemsize].contiguous().view(dtype).float()[..., None]
