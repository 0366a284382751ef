"""Quantised weights in 4 or 6 bits: encoded from exact ones by the CPU's kernels, multiplied with rows in
`kernels.products`.

In each group of `GROUP` inputs of a row, a weight is low + step * code. low and step are bf16; low is at most the least
weight of the group, and step is at least its range over the codes, so that no code is clipped. The rule needs no
calibration text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.layout import CODE_GROUP, CODE_TILE, code_bytes
from offload.native.interface import DTYPES, Library

GROUP, TILE = CODE_GROUP, CODE_TILE
_TINY = 2.0**-100  # smaller steps are 0, since a power of two is divided by a step
_LEAST = torch.finfo(torch.bfloat16).min
_ENCODED = 2**22  # weights at a time, with 16 bytes of temporaries each
_SCALES = 4 * TILE  # bytes of the steps and lows of a block
_FOURS = TILE * GROUP // 2  # bytes of the 4-bit parts of a block's codes


@dataclass(frozen=True)
class Codes:
    """A quantised matrix [outputs, inputs], with outputs in tiles of `TILE`, padded with zeros.

    blocks: uint8 [outputs / TILE, inputs / GROUP, bytes], see native/codes.h for their order.
    """

    blocks: Tensor

    @staticmethod
    def shape_of_blocks(matrix: Sequence[int], bits: int) -> tuple[int, int, int]:
        """The shape of the blocks of a matrix. bits: 4 or 6. Raises ValueError if inputs are not a multiple of
        GROUP."""
        outputs, inputs = matrix
        if inputs % GROUP:
            raise ValueError(f"{inputs} inputs are no multiple of {GROUP}, the inputs that share a step")
        return -(-outputs // TILE), inputs // GROUP, code_bytes(TILE, GROUP, bits)

    @property
    def bits(self) -> int:
        return (self.blocks.shape[2] - _SCALES) * 8 // (TILE * GROUP)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (outputs, inputs)."""
        return self.blocks.shape[0] * TILE, self.blocks.shape[1] * GROUP

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The decoded numbers, computed in fp32 and rounded to `dtype`."""
        return self.middles()[1].to(dtype)

    def middles(self) -> tuple[Tensor, Tensor]:
        """The step of each weight and its decoded number: fp32 [outputs, inputs] both."""
        scales, fours, twos = self.blocks.split([_SCALES, _FOURS, self.blocks.shape[2] - _SCALES - _FOURS], 2)
        fours = fours.unflatten(2, (-1, TILE, 4)).permute(0, 3, 1, 2, 4)  # tiles, outputs, groups, inputs
        codes = torch.stack([fours & 15, fours >> 4], 3)  # [..., half, 8, 4]
        if self.bits == 6:
            twos = twos.unflatten(2, (-1, TILE, 2)).permute(0, 3, 1, 2, 4)
            both = torch.stack([twos & 15, twos >> 4], 5).flatten(4)  # [..., 8, 4]
            codes = codes << 2 | torch.stack([both & 3, both >> 2], 3)
        units = scales.contiguous().view(torch.bfloat16).float()
        step, low = units.unflatten(2, (TILE, 2)).transpose(1, 2)[..., None].unbind(3)
        exact: Tensor = low + step * codes.flatten(3)
        return step.expand_as(exact).reshape(self.shape), exact.reshape(self.shape)


def encode(weight: Tensor, into: Codes, kernels: Library) -> None:
    """Fill `into` with the codes of weight, [outputs, inputs] contiguous, on all threads."""
    assert weight.is_contiguous()
    assert into.blocks.shape == Codes.shape_of_blocks(weight.shape, into.bits)
    where = weight.data_ptr(), *weight.shape, into.bits, into.blocks.data_ptr()
    kernels.library.encode(DTYPES[weight.dtype], *where, torch.get_num_threads())


def encode_in_parts(weight: Tensor, into: Codes) -> None:
    """`encode` by torch's operators, on a GPU. Temporary memory: 64 MB, or that of 16 outputs if it is more."""
    outputs, inputs = weight.shape
    at_a_time = max(_ENCODED // inputs // TILE, 1) * TILE
    for first in range(0, outputs, at_a_time):
        tile, part = first // TILE, weight[first : first + at_a_time]
        encode_with_torch(part, Codes(into.blocks[tile : tile - (-len(part) // TILE)]))


def encode_with_torch(weight: Tensor, into: Codes) -> None:
    """`encode` by torch's operators, bit for bit the same."""
    scales, codes = group_codes(weight.unflatten(1, (-1, GROUP)), into.bits)
    into.blocks[..., :_SCALES] = _tiles(scales).transpose(1, 2).flatten(2).contiguous().view(torch.uint8)
    halves = codes.unflatten(2, (2, -1, 4))  # [outputs, groups, half, 8, 4]
    fours = halves >> into.bits - 4
    into.blocks[..., _SCALES : _SCALES + _FOURS] = _in_blocks(fours[:, :, 0] | fours[:, :, 1] << 4)
    if into.bits == 6:
        both = (halves[:, :, 0] & 3) | (halves[:, :, 1] & 3) << 2
        into.blocks[..., _SCALES + _FOURS :] = _in_blocks(both[..., ::2] | both[..., 1::2] << 4)


def group_codes(numbers: Tensor, bits: int = 4) -> tuple[Tensor, Tensor]:
    """The codes of each group, the last dimension: (step and low, bf16 [..., 2]; codes, uint8 [..., group])."""
    most = 2.0**bits - 1.0
    half = 0.5 * numbers.float()  # halves, since the range of the largest numbers overflows
    low = _below(2 * half.amin(-1))
    step = _above((half.amax(-1) - 0.5 * low) / low.new_full((), 0.5 * most))  # no float: GPUs would multiply by 1 / it
    step = torch.where(step < _TINY, 0.0, step)
    inverse = torch.where(step > 0, 2.0 / step, 0.0)
    codes = ((half - 0.5 * low[..., None]) * inverse[..., None]).clamp(0, most).round().to(torch.uint8)
    return torch.stack([step, low], -1).bfloat16(), codes


def _in_blocks(bytes_of_outputs: Tensor) -> Tensor:
    """Reorder to blocks: [outputs, groups, 8, n] -> [tiles, groups, 8 * TILE * n]."""
    return _tiles(bytes_of_outputs).permute(0, 2, 3, 1, 4).flatten(2)


def _tiles(x: Tensor) -> Tensor:
    """Split outputs into tiles: [outputs, ...] -> [tiles, TILE, ...]."""
    padded = torch.cat([x, x.new_zeros(-x.shape[0] % TILE, *x.shape[1:])])
    return padded.view(-1, TILE, *x.shape[1:])


def _below(x: Tensor) -> Tensor:
    """The largest bf16 number that is at most x, in fp32; at least the least finite one."""
    x = x + 0.0  # no negative zero
    return _cut(x.view(torch.int32) + torch.where(x < 0, 0xFFFF, 0).int()).clamp_min(_LEAST)


def _above(x: Tensor) -> Tensor:
    """The least bf16 number that is at least x >= 0, in fp32."""
    return _cut(x.view(torch.int32) + 0xFFFF)


def _cut(bits: Tensor) -> Tensor:
    return (bits & ~0xFFFF).view(torch.float32)
