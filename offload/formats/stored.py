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
from functools import cache

import torch
from torch import Tensor

from offload.formats.encodings import BOOKS, Encoding, Field, Grid, Plane, Small
from offload.formats.grids import grid, values, words
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
        return len(self.rows), self.encoding.inputs(self.rows.shape[1])

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
        own = self.encoding
        blocks = self.rows[:, : self.rows.shape[1] - own.tail].reshape(-1, own.nbytes)
        return _numbers(blocks, own, self._scales(len(blocks))).to(dtype).view(self.shape)

    def _scales(self, num_blocks: int) -> Tensor | None:
        """The rows' own scales, repeated for each of their blocks, fp32 [blocks, 1, 1]; None without."""
        if not self.encoding.tail:
            return None
        scales = self.rows[:, -self.encoding.tail :].contiguous().view(torch.float32)
        return scales.repeat_interleave(num_blocks // max(len(scales), 1), 0)[..., None]


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
    book = _with_words(own.grid).data_ptr() if own.grid else None
    return Matrix(stored.rows.data_ptr(), book, own.number, own.numbers, own.nbytes, own.tail)


@cache
def entries(of: Grid, device: torch.device) -> Tensor:
    """The table of a grid, int8 [entries, numbers of an entry], in memory that is never freed: kernels and graphs hold
    its address."""
    return torch.tensor(grid(of.name), dtype=torch.int8).to(device)


@cache
def _with_words(of: Grid) -> Tensor:
    """The table of a grid for the CPU's kernels, as bytes: its `entries`; the same in words of 16 bits, whose fields
    are places of numbers; and 32 numbers by the lowest bits of such a place, in bf16, and as int16 plus 64. Those of
    IQ1 are greater by 1, from place 4 on less."""
    numbers = torch.tensor([*values(of.name), *[0] * (len(values(of.name)) % 2)])
    numbers = torch.cat([numbers + 1, numbers - 1]) if of.signs.bits == 1 else numbers
    numbers = numbers.repeat(32 // len(numbers))
    tables = (
        torch.tensor(words(of.name), dtype=torch.uint16),
        numbers.to(torch.bfloat16),
        (numbers + 64).to(torch.int16),
    )
    return torch.cat([part.view(torch.uint8).flatten() for part in (entries(of, torch.device("cpu")), *tables)])


def _numbers(blocks: Tensor, own: Encoding, scales: Tensor | None) -> Tensor:
    """The numbers of blocks, uint8 [n, nbytes] -> fp32 [n, groups, numbers of a group]. scales: of their rows."""
    step, least = _steps(blocks, own, scales)
    numbers = step * _codes(blocks, own).view(len(blocks), step.shape[1], -1)
    if own.is_rounded:
        return numbers.to(_SCALES[own.scale]).float()
    return numbers if least is None else numbers + least


def _codes(blocks: Tensor, own: Encoding) -> Tensor:
    """The numbers by which steps are multiplied, fp32 [n, numbers]."""
    if own.grid:
        return _in_grid(blocks, own, own.grid).float()
    bits = _bits(blocks, own.codes, own.numbers)
    if own.high.bits:
        bits |= _bits(blocks, own.high, own.numbers) << own.codes.bits
    if own.code in BOOKS:
        return torch.tensor(BOOKS[own.code], dtype=torch.float32, device=blocks.device)[bits.int()]
    if own.code != "integer":
        return bits.view({"signed": torch.int8, "e4m3": torch.float8_e4m3fn}[own.code]).float()
    centre = _at(blocks, own.scale_at + 2, torch.int16)[..., 0] if own.steps == "zero" else own.centre
    return bits.float() - centre


def _in_grid(blocks: Tensor, own: Encoding, grid: Grid) -> Tensor:
    """The codes of blocks by their indices and signs, int8 [n, numbers]."""
    index = _integers(blocks, Small(grid.low, grid.high), own.numbers // grid.each)
    codes = entries(grid, blocks.device)[index].view(len(blocks), -1, 8)
    signs = _items(blocks, grid.signs, own.numbers // 8)[..., None]
    if grid.signs.bits == 1:
        return (codes + torch.where(signs > 0, -1, 1)).flatten(1)
    set_bits = signs >> torch.arange(8, device=blocks.device) & 1
    if grid.signs.bits == 7:
        set_bits[..., 7] = set_bits.sum(-1) & 1
    return torch.where(set_bits > 0, -codes, codes).flatten(1)


def _items(blocks: Tensor, field: Field, count: int) -> Tensor:
    """The first `count` items of a field, int32 [n, count]."""
    number = torch.arange(count, device=blocks.device)
    at = field.at + number // field.many * field.outer + number % field.many * field.inner
    low, high = (blocks[:, (at // 8 + byte).clamp(max=blocks.shape[1] - 1)].int() for byte in (0, 1))
    return (low | high << 8) >> at % 8 & (1 << field.bits) - 1


def _integers(blocks: Tensor, small: Small, count: int) -> Tensor:
    """The first `count` integers, of a lower and an upper field, int32 [n, count]."""
    low = _items(blocks, small.low, count)
    return low | _items(blocks, small.high, count) << small.low.bits if small.high.bits else low


def _bits(blocks: Tensor, plane: Plane, numbers: int) -> Tensor:
    """The bits of a plane, in the lowest places, uint8 [n, numbers]."""
    runs = blocks[:, plane.at : plane.at + numbers * plane.bits // 8].unflatten(1, (-1, 1, plane.run))
    shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=blocks.device)[:, None]
    parts: Tensor = runs >> shifts & (1 << plane.bits) - 1
    return parts.flatten(1)


def _steps(blocks: Tensor, own: Encoding, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The steps of groups, and the least values that are added, fp32 [n, groups, 1] both. scales: of the rows."""
    at, count = own.scale_at, own.numbers // own.group
    if own.scale == "E8M0":  # as in ggml, half the scale, which is finite, as numbers in BOOKS are doubled
        exponent = blocks[:, at : at + 1, None].int()
        return torch.where(exponent > 1, (exponent - 1) << 23, (exponent + 1) << 21).view(torch.float32), None
    if own.scale == "E4M3":
        steps = blocks[:, at : at + count].contiguous().view(torch.float8_e4m3fn).float()[..., None]
        assert scales is not None
        return (steps * scales if own.steps == "times" else steps / scales) / 2, None  # numbers in BOOKS are doubled
    scale = _quartered(blocks, at) if own.scale == "F16/4" else _at(blocks, at, _SCALES[own.scale])
    if own.steps == "least":
        return scale, _at(blocks, at + 2, torch.float16)
    if own.steps == "bytes":
        return scale * blocks[:, at - count : at].view(torch.int8).float()[..., None], None
    least = None
    if own.least:
        least = -_at(blocks, at + 2, torch.float16) * _integers(blocks, own.least, count).float()[..., None]
    if own.small:
        small = _integers(blocks, own.small, count).float() * own.small.times + own.small.plus
        return scale * small[..., None], least
    return scale, None


def _quartered(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number of which four 16-bit words from byte `at` on have four bits each, the highest, fp32 [n, 1, 1]."""
    four = blocks[:, at + 1 : at + 8 : 2].int() >> 4
    bits = (four << torch.arange(0, 16, 4, device=blocks.device)).sum(1, keepdim=True)
    return bits.to(torch.int16).view(torch.float16).float()[..., None]


def _at(blocks: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    """The number of `dtype` at byte `at` of each block, fp32 [n, 1, 1]."""
    return blocks[:, at : at + dtype.itemsize].contiguous().view(dtype).float()[..., None]
