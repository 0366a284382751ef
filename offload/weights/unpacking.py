"""Unpacking of matrices in AWQ, GPTQ, compressed-tensors and FP8 checkpoints, to this program's blocks or to plain
numbers.

In every packing, a matrix has codes, scales and zeros: a number is (code - zero) * scale in the scale's dtype, or an
e4m3 code times the scale. Of e2m1 codes it is code * step in fp32, a step being the scale, in NVFP4 times ModelOpt's
scale of the tensor, or divided by that of compressed-tensors.

Sources of the packings: AutoAWQ 0.2.9 (awq/utils/packing_utils.py), GPTQModel (nn_modules/qlinear/torch.py, and
utils/model.py for the zeros of its first format), compressed-tensors 0.20 (compressors/pack_quantized/helpers.py,
nvfp4/base.py), ModelOpt 0.47 (quantization/qtensor/nvfp4_tensor.py), transformers 5.23
(integrations/finegrained_fp8.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.config.modelopt import TENSOR_SCALE
from offload.config.schemes import Scheme
from offload.formats.encodings import BOOKS, ENCODINGS, GROUP_HEAD
from offload.weights.e2m1 import rows_in_blocks

_PIECE = 1 << 21  # numbers of a matrix that are unpacked at once, in whole outputs
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # 4-bit position, from the lowest, of each of a word's 8 outputs
_AWQ_PAIRS = (0, 2, 4, 6, 1, 3, 5, 7)  # the same, with even outputs before odd ones
_EVEN = 0x0F0F0F0F
_E2M1 = torch.tensor(BOOKS["e2m1"]) / 2
_MAIN = {"fp4": "weight", "packed_fp4": "weight_packed"}  # the part with the codes
TENSOR_DIVISOR = "weight_global_scale"  # of NVFP4 as compressed-tensors has it
_LESS_ONE = {4: 0x11111111, 8: 0x01010101}  # subtracted from each word of zeros


@dataclass(frozen=True)
class Packed:
    """A packed matrix [outputs, inputs] of a checkpoint. parts: tensors by name, with the shapes in
    weights/quantised_folder.py. scales: [rows of scales, groups]. order: int64 [inputs], the group of each input; None:
    in order."""

    scheme: Scheme
    outputs: int
    inputs: int
    parts: Mapping[str, Tensor]
    scales: Tensor
    order: Tensor | None = None

    def blocks(self, kind: str) -> Tensor:
        """The rows in blocks of the encoding `kind`, uint8 [outputs, bytes]."""
        form = ENCODINGS[kind]
        if self.scheme.is_e2m1:
            scale = self._tensor_scale.reshape(1).view(torch.uint8) if form.tail else None
            return rows_in_blocks(self.parts[_MAIN[self.scheme.packing]], self.scales.view(torch.uint8), form, scale)
        groups = self._group_of(torch.arange(0, self.inputs, form.numbers))
        out = torch.empty(self.outputs, len(groups), form.nbytes // 4, dtype=torch.int32)
        for rows, scales, zeros in self._pieces():
            out[rows, :, 0] = self._heads(scales, zeros).index_select(1, groups)
            out[rows, :, 1:] = _bodies(self.scheme, self.parts, rows, form.numbers).view(torch.int32)
        return out.view(self.outputs, -1).view(torch.uint8)

    def _heads(self, scales: Tensor, zeros: Tensor) -> Tensor:
        """The heads of blocks, int32 [n, groups]: GROUP_HEAD bytes each, a scale of 4 bytes, or of 2 followed by a
        zero."""
        if scales.itemsize == GROUP_HEAD:
            return scales.view(torch.int32)
        low = scales.view(torch.int16).int() & 0xFFFF
        return low if self.scheme.is_float else low | zeros.int() << 16

    def numbers(self) -> Tensor:
        """The numbers, [outputs, inputs] in the scale's dtype, of e2m1 in fp32."""
        groups = self._group_of(torch.arange(self.inputs)) if self.order is None else self.order
        out = torch.empty(self.outputs, self.inputs, dtype=torch.float32 if self.scheme.is_e2m1 else self.scales.dtype)
        for rows, scales, zeros in self._pieces():
            codes = _codes(self.scheme, self.parts, rows)[:, : self.inputs]
            if self.scheme.is_e2m1:
                values = _E2M1[codes.int()]
            elif self.scheme.is_float:
                values = codes.view(torch.float8_e4m3fn).float()
            else:
                values = codes.float().sub_(zeros.float().index_select(1, groups))
            out[rows] = values.mul_(self._steps(scales).index_select(1, groups))
        return out

    def _steps(self, scales: Tensor) -> Tensor:
        """The numbers by which codes are multiplied, fp32."""
        if TENSOR_SCALE in self.parts:
            return scales.float() * self._tensor_scale
        return scales.float() / self._tensor_scale if TENSOR_DIVISOR in self.parts else scales.float()

    @property
    def _tensor_scale(self) -> Tensor:
        return self.parts[TENSOR_SCALE if TENSOR_SCALE in self.parts else TENSOR_DIVISOR]

    def _group_of(self, inputs: Tensor) -> Tensor:
        return inputs // self.scheme.inputs if self.scales.shape[1] > 1 else torch.zeros_like(inputs)

    def _pieces(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Pieces of the matrix: (outputs, their scales [n, groups], zeros int16 [n, groups])."""
        step = max(8, _PIECE // self.inputs // 8 * 8)  # whole words of packed outputs
        all_zeros = self.scales if self.scheme.is_float else _zeros(self.scheme, self.parts, self.scales)
        for first in range(0, self.outputs, step):
            rows = slice(first, min(first + step, self.outputs))
            scales = self._of_rows(self.scales, rows).contiguous()
            zeros = self._of_rows(all_zeros, rows).contiguous()
            yield rows, scales, zeros

    def _of_rows(self, grid: Tensor, rows: slice) -> Tensor:
        """The row of a grid of scales for each output."""
        if len(grid) == self.outputs and self.scheme.outputs == 1:
            return grid[rows]
        shared = self.scheme.outputs if len(grid) > 1 else self.outputs
        return grid[torch.arange(rows.start, rows.stop) // shared]


def _codes(scheme: Scheme, parts: Mapping[str, Tensor], rows: slice) -> Tensor:
    """The codes, uint8 [n, inputs padded to whole words]: numbers from 0 to 15 or 255, e4m3, or e2m1."""
    if scheme.packing == "bytes":
        codes = parts["weight"][rows].contiguous().view(torch.uint8)
        return codes if scheme.is_float else codes ^ 128
    if scheme.is_e2m1:
        return _unpacked(parts[_MAIN[scheme.packing]][rows].contiguous(), 4)
    if scheme.packing == "packed":
        return _unpacked(parts["weight_packed"][rows].contiguous(), scheme.bits)
    if scheme.packing == "gptq":
        return _unpacked(parts["qweight"][:, rows].T.contiguous(), scheme.bits)
    return _in_awq_order(_awq_words(parts, rows)).T.contiguous()


def _bodies(scheme: Scheme, parts: Mapping[str, Tensor], rows: slice, size: int) -> Tensor:
    """The numbers of blocks of `size`, uint8 [n, blocks, bytes]; with 4 bits, the low halves of bytes hold the first
    half of a block."""
    if scheme.bits == 8:
        codes = _codes(scheme, parts, rows)
        return codes.view(len(codes), -1, size)
    if scheme.packing == "awq":
        words = _awq_words(parts, rows)
        even, odd = _paired(words.view(-1, 2, size // 2, words.shape[1]), 1)
        pairs = torch.stack([even, odd], -1).view(torch.uint8).view(words.shape[0] // 2, -1)
        order = torch.tensor(_AWQ_PAIRS) + torch.arange(0, pairs.shape[1], 8)[:, None]
        outputs = pairs.T.contiguous().index_select(0, order.flatten())
        return outputs.view(len(outputs), -1, size // 2)
    words = parts["qweight"][:, rows].T if scheme.packing == "gptq" else parts["weight_packed"][rows]
    even, odd = _paired(words.contiguous().view(len(words), -1, 2, size // 16), 2)
    return torch.stack([even.view(torch.uint8), odd.view(torch.uint8)], -1).flatten(2)


def _paired(words: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The even and the odd 4-bit numbers of pairs of words, int32, along `dim` of size 2: the first word's numbers in
    the low halves of bytes, the second word's in the high halves."""
    low, high = words.unbind(dim)
    return low & _EVEN | (high & _EVEN) << 4, low >> 4 & _EVEN | high & ~_EVEN


def _awq_words(parts: Mapping[str, Tensor], rows: slice) -> Tensor:
    """The words of some rows, int32 [inputs, n / 8]."""
    return parts["qweight"][:, rows.start // 8 : rows.stop // 8].contiguous()


def _zeros(scheme: Scheme, parts: Mapping[str, Tensor], scales: Tensor) -> Tensor:
    """The zero points, int16, in the shape of scales."""
    if scheme.packing == "awq":
        return _in_awq_order(parts["qzeros"].contiguous()).T.to(torch.int16)
    if scheme.packing == "gptq":
        words = parts["qzeros"].contiguous()
        words = words + _LESS_ONE[scheme.bits] if scheme.less_one else words  # wraps around, as the subtraction did
        return _unpacked(words, scheme.bits).T.to(torch.int16)
    middle, zeros = 1 << scheme.bits - 1, parts.get("weight_zero_point")
    if zeros is None:
        return torch.full_like(scales, middle, dtype=torch.int16)
    if zeros.dtype == torch.int8:
        return zeros.to(torch.int16).view(scales.shape) + middle
    return _unpacked(zeros.T.contiguous(), scheme.bits).T[: len(scales)].to(torch.int16)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack words: int32 or uint8 [n, words], contiguous -> uint8 [n, numbers], from the lowest bits of each word."""
    numbers = words.view(torch.uint8)
    if bits == 8:
        return numbers
    return torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)


def _in_awq_order(words: Tensor) -> Tensor:
    """Unpack words in AWQ's order: int32 [n, words], contiguous -> uint8 [n, 8 * words]."""
    eights = _unpacked(words, 4).view(len(words), -1, 8)
    return eights[..., list(_AWQ_PLACES)].flatten(1)
