"""Weights in 4 bits: made from exact ones by the processor's kernels, multiplied with rows in `kernels.products`.

By groups of `GROUP` inputs of a row a weight is low + step * code, both bf16, low no larger than the least of the group
and step no smaller than its range asks for, so that no code is cut off. The rule needs no text to calibrate on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.kernels.native import Kernels
from offload.kernels.native.interface import DTYPES
from offload.plan.sizing import CODE_GROUP, CODE_TILE

GROUP, TILE = CODE_GROUP, CODE_TILE
_TINY = 2.0**-100  # smaller steps are none, since a power of two is divided by them
_LEAST = torch.finfo(torch.bfloat16).min
_ENCODED = 2**22  # weights at a time, of 16 bytes of temporaries each
_SCALES = 4 * TILE  # bytes of the steps and lows of a block


@dataclass(frozen=True)
class Codes:
    """A matrix [outputs, inputs], the outputs in tiles of `TILE`: what an exact matrix lacks of them are zeros.

    blocks: uint8 [outputs / TILE, inputs / GROUP, bytes], see native/codes.h for their order.
    """

    blocks: Tensor

    @staticmethod
    def shape_of_blocks(matrix: Sequence[int]) -> tuple[int, int, int]:
        """For a matrix of that shape. Raises ValueError for inputs that are no multiple of GROUP."""
        outputs, inputs = matrix
        if inputs % GROUP:
            raise ValueError(f"{inputs} inputs are no multiple of {GROUP}, the inputs that share a step")
        return -(-outputs // TILE), inputs // GROUP, _SCALES + TILE * GROUP // 2

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self.blocks.shape[0] * TILE, self.blocks.shape[1] * GROUP

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the codes stand for, computed in fp32 and rounded to `dtype`."""
        return self.middles()[1].to(dtype)

    def middles(self) -> tuple[Tensor, Tensor]:
        """Of each weight the step, and the number that its code stands for: fp32 [outputs, inputs] both."""
        scales, codes = self.blocks.split([_SCALES, self.blocks.shape[2] - _SCALES], 2)
        codes = codes.unflatten(2, (-1, TILE, 4)).permute(0, 3, 1, 2, 4)  # tiles, outputs, groups, inputs
        codes = torch.cat([codes & 15, codes >> 4], 3)
        units = scales.contiguous().view(torch.bfloat16).float()
        step, low = units.unflatten(2, (TILE, 2)).transpose(1, 2)[..., None].unbind(3)
        exact: Tensor = low + step * codes.flatten(3)
        return step.expand_as(exact).reshape(self.shape), exact.reshape(self.shape)


def encode(weight: Tensor, into: Codes, kernels: Kernels) -> None:
    """Fill `into` with the codes of weight, [outputs, inputs] contiguous, on all threads."""
    assert kernels.library is not None
    assert weight.is_contiguous()
    assert into.blocks.shape == Codes.shape_of_blocks(weight.shape)
    where = weight.data_ptr(), *weight.shape, into.blocks.data_ptr()
    kernels.library.encode(DTYPES[weight.dtype], *where, torch.get_num_threads())


def encode_in_parts(weight: Tensor, into: Codes) -> None:
    """The same by torch's operators, on a card. Temporary memory: 64 MB, or that of 16 outputs where it is more."""
    outputs, inputs = weight.shape
    at_a_time = max(_ENCODED // inputs // TILE, 1) * TILE
    for first in range(0, outputs, at_a_time):
        tile, part = first // TILE, weight[first : first + at_a_time]
        encode_with_torch(part, Codes(into.blocks[tile : tile - (-len(part) // TILE)]))


def encode_with_torch(weight: Tensor, into: Codes) -> None:
    """The same by torch's operators, bit for bit: what the kernel is tested against."""
    scales, codes = group_codes(weight.unflatten(1, (-1, GROUP)))
    codes = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    into.blocks[..., :_SCALES] = _tiles(scales).transpose(1, 2).flatten(2).contiguous().view(torch.uint8)
    into.blocks[..., _SCALES:] = _tiles(codes).unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4).flatten(2)


def group_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Each group of the last dimension by itself: (step and low, bf16 [..., 2]; codes, uint8 [..., group])."""
    most = 15.0
    half = 0.5 * numbers.float()  # the range of the largest numbers is above them
    low = _below(2 * half.amin(-1))
    step = _above((half.amax(-1) - 0.5 * low) / low.new_full((), 0.5 * most))  # torch's cards multiply for a number
    step = torch.where(step < _TINY, 0.0, step)
    inverse = torch.where(step > 0, 2.0 / step, 0.0)
    codes = ((half - 0.5 * low[..., None]) * inverse[..., None]).clamp(0, most).round().to(torch.uint8)
    return torch.stack([step, low], -1).bfloat16(), codes


def _tiles(x: Tensor) -> Tensor:
    """[outputs, ...] -> [tiles, TILE, ...]"""
    padded = torch.cat([x, x.new_zeros(-x.shape[0] % TILE, *x.shape[1:])])
    return padded.view(-1, TILE, *x.shape[1:])


def _below(x: Tensor) -> Tensor:
    """The largest bf16 number no larger than x, fp32; not below the least finite one."""
    x = x + 0.0  # no negative zero
    return _cut(x.view(torch.int32) + torch.where(x < 0, 0xFFFF, 0).int()).clamp_min(_LEAST)


def _above(x: Tensor) -> Tensor:
    """The least bf16 number no smaller than x >= 0, fp32."""
    return _cut(x.view(torch.int32) + 0xFFFF)


def _cut(bits: Tensor) -> Tensor:
    return (bits & ~0xFFFF).view(torch.float32)
