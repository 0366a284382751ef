"""What weights of bf16 have beside their codes in 4 bits: about 9 of 16 bits. Together they are the weights.

Where the codes are on the device, this alone has to cross the link. A code says in which interval its weight lies, and
the low byte of the weight, which has one bit of its exponent, tells which number of the interval it is, unless zero is
near: then 4 more bits do. The rule and the order of the parts are in native/remainders.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.card import Card
from offload.kernels.codes import GROUP, TILE, Codes
from offload.kernels.native import Kernels
from offload.kernels.native.interface import Remainder as Struct

_MARGIN, _STEPS, _ALONE, _ESCAPE, _SIGN = 2, 6, 6, 7, 8  # as there
_HEAD_BYTES = 8


@dataclass(frozen=True)
class Remainder:
    """Of a matrix [outputs, inputs]. content: uint8 [bytes], low bytes, heads, 4 bits each, and from `escapes` on the
    escapes."""

    content: Tensor
    escapes: int


@dataclass(frozen=True)
class _Intervals:
    """Of the codes of a matrix, in its shape. least, most: of the magnitudes, int32. is_near, negative: bool."""

    least: Tensor
    most: Tensor
    is_near: Tensor
    negative: Tensor
    finite: bool

    @classmethod
    def of(cls, codes: Codes) -> _Intervals:
        step, middle = codes.middles()
        size, half = middle.abs(), 0.5 * step
        least = ((size - half).view(torch.int32) >> 16) - _MARGIN
        most = ((size + half).view(torch.int32) >> 16) + _MARGIN
        is_near = ~(size > half) | (most - least >= 256) | (step == 0)
        return cls(least, most, is_near, middle.view(torch.int32) < 0, bool(middle.isfinite().all()))


def split_off(weight: Tensor, codes: Codes, kernels: Kernels) -> Remainder | None:
    """Of weight, bf16 [outputs, inputs] contiguous on the host, and its codes, on all threads. None where not every
    weight would come back, as of numbers that are not finite."""
    assert kernels.library is not None
    threads, num_groups = torch.get_num_threads(), _num_groups(codes)
    heads = torch.empty(num_groups, 2, dtype=torch.int32)
    struct = _struct(weight, codes, heads=heads.data_ptr())
    if not kernels.library.count_remainder(ctypes.byref(struct), threads):
        return None
    heads, escapes, size = _places(heads)
    content = torch.empty(size, dtype=torch.uint8)
    content[weight.numel() : weight.numel() + heads.nbytes] = heads.view(torch.uint8).flatten()
    struct = _struct_over(content, escapes, weight, codes)
    kernels.library.split_remainder(ctypes.byref(struct), threads)
    return Remainder(content, escapes)


def restore(content: Tensor, escapes: int, codes: Codes, out: Tensor, kernels: Kernels | Card) -> None:
    """Fill out, bf16 [outputs, inputs] contiguous, from a remainder's content; all are on the kernels' device."""
    assert out.is_contiguous()
    assert codes.shape == out.shape
    if isinstance(kernels, Card):
        from offload.kernels.card.remainders import restore as restore_on_card  # it imports Triton

        return restore_on_card(content, escapes, codes, out)
    assert kernels.library is not None
    struct = _struct_over(content, escapes, out, codes)
    kernels.library.restore_remainder(ctypes.byref(struct), torch.get_num_threads())
    return None


def split_off_with_torch(weight: Tensor, codes: Codes) -> Remainder | None:
    """The same as `split_off`, bit for bit, by torch's operators."""
    found, bits = _Intervals.of(codes), weight.view(torch.int16).int() & 0xFFFF
    magnitude, low = bits & 0x7FFF, bits & 255
    one_of_them = found.least + (magnitude - found.least & 255) == magnitude
    if not found.finite or not (found.is_near | one_of_them & (found.negative == (bits > 0x7FFF))).all():
        return None
    steps = (found.most - (found.most - magnitude & 255) - magnitude) // 256
    counted = (magnitude <= found.most) & (steps < _STEPS)
    kinds = torch.where(counted, steps, torch.where(magnitude < 256, _ALONE, _ESCAPE))
    fours = kinds | _SIGN * (bits >> 15)
    is_near, bits, fours, kinds = (_by_group(x) for x in (found.is_near, bits, fours, kinds))
    is_escape = is_near & (kinds == _ESCAPE)
    heads, escapes, size = _places(torch.stack([(is_near.sum(1) + 1) // 2, is_escape.sum(1)], 1).int())
    packed = [pad(four[near], (0, int(near.sum()) % 2)).view(-1, 2) for four, near in zip(fours, is_near, strict=True)]
    parts = [
        _by_group(low).flatten(),
        heads.view(torch.uint8).flatten(),
        torch.cat([pairs[:, 0] | pairs[:, 1] << 4 for pairs in packed]),
        bits[is_escape] >> 8,
    ]
    content = torch.cat([part.to(torch.uint8) for part in parts])
    return Remainder(pad(content, (0, size - len(content))), escapes)


def restore_with_torch(content: Tensor, escapes: int, codes: Codes) -> Tensor:
    """The same as `restore`, into a new matrix."""
    found, (outputs, inputs) = _Intervals.of(codes), codes.shape
    numbers, first = outputs * inputs, outputs * inputs + _HEAD_BYTES * _num_groups(codes)
    low, heads = content[:numbers].view(-1, TILE * GROUP).int(), content[numbers:first].clone().view(torch.int32)
    near, least, most, negative = (_by_group(x) for x in (found.is_near, found.least, found.most, found.negative))
    rank = near.cumsum(1) - 1
    at = (first + heads.view(-1, 2)[:, :1] + rank // 2).clamp(0, len(content) - 1)
    fours = content[at].int() >> rank % 2 * 4 & 15
    kinds = fours & 7
    is_escape = near & (kinds == _ESCAPE)
    kept = content[(escapes + is_escape.flatten().cumsum(0) - 1).clamp(0, len(content) - 1)].view_as(low).int()
    counted = most - (most - low & 255) - 256 * kinds
    close = torch.where(kinds == _ALONE, low, counted) | (fours & _SIGN) << 12
    close = torch.where(is_escape, kept << 8 | low, close)
    bits = torch.where(near, close, least + (low - least & 255) | negative.int() << 15)
    bits = torch.where(bits < 1 << 15, bits, bits - (1 << 16)).short()
    in_order = bits.view(outputs // TILE, inputs // GROUP, TILE, GROUP).transpose(1, 2).reshape(outputs, inputs)
    weight: Tensor = in_order.view(torch.bfloat16)
    return weight


def _num_groups(codes: Codes) -> int:
    return codes.blocks.shape[0] * codes.blocks.shape[1]


def _by_group(matrix: Tensor) -> Tensor:
    """[outputs, inputs] -> [groups, TILE * GROUP], group after group of a tile's outputs."""
    tiles, groups = matrix.shape[0] // TILE, matrix.shape[1] // GROUP
    return matrix.view(tiles, TILE, groups, GROUP).transpose(1, 2).reshape(tiles * groups, TILE * GROUP)


def _places(counts: Tensor) -> tuple[Tensor, int, int]:
    """counts: bytes of 4 bits and escapes of each group, int32 [groups, 2] -> (heads, where escapes begin, all bytes: a
    multiple of 16)."""
    heads = (counts.cumsum(0) - counts).int()
    fours, escapes = (int(total) for total in counts.sum(0))
    begin = (TILE * GROUP + _HEAD_BYTES) * len(counts) + fours
    return heads, begin, -(-(begin + escapes) // 16) * 16


def _struct(weight: Tensor, codes: Codes, **addresses: int) -> Struct:
    assert weight.is_contiguous()
    assert codes.shape == weight.shape
    outputs, inputs = weight.shape
    return Struct(weight=weight.data_ptr(), blocks=codes.blocks.data_ptr(), outputs=outputs, inputs=inputs, **addresses)


def _struct_over(content: Tensor, escapes: int, weight: Tensor, codes: Codes) -> Struct:
    low, numbers = content.data_ptr(), weight.numel()
    fours = low + numbers + _HEAD_BYTES * _num_groups(codes)
    return _struct(weight, codes, low=low, heads=low + numbers, fours=fours, escapes=low + escapes)
