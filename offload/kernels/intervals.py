"""The rule by which numbers of bf16 split into codes in 4 bits and what they have beside these, by torch's operators:
what the kernels are tested against. The rule is in native/intervals.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

HEAD_BYTES = 8  # of a group: where its 4 bits begin, and its escapes
_MARGIN, _STEPS, _ALONE, _ESCAPE, _SIGN = 2, 6, 6, 7, 8  # as there


@dataclass(frozen=True)
class Intervals:
    """Of codes [groups, numbers]. least, most: of the magnitudes, int32. is_near, negative: bool."""

    least: Tensor
    most: Tensor
    is_near: Tensor
    negative: Tensor
    finite: bool

    @classmethod
    def of(cls, step: Tensor, middle: Tensor) -> Intervals:
        """Of each number the step, and the number that its code stands for: fp32 both."""
        size, half = middle.abs(), 0.5 * step
        least = ((size - half).view(torch.int32) >> 16) - _MARGIN
        most = ((size + half).view(torch.int32) >> 16) + _MARGIN
        is_near = ~(size > half) | (most - least >= 256) | (step == 0)
        return cls(least, most, is_near, middle.view(torch.int32) < 0, bool(middle.isfinite().all()))


@dataclass(frozen=True)
class Parts:
    """Of numbers [groups, numbers]. low: uint8, in that shape. fours: 4 bits each of those near zero; escapes: uint8
    both, group after group. counts: bytes of a group in these, int32 [groups, 2]."""

    low: Tensor
    fours: Tensor
    escapes: Tensor
    counts: Tensor


def split(numbers: Tensor, found: Intervals) -> Parts | None:
    """numbers: bf16 [groups, numbers]. None where not every one would come back."""
    bits = numbers.view(torch.int16).int() & 0xFFFF
    magnitude = bits & 0x7FFF
    one_of_them = found.least + (magnitude - found.least & 255) == magnitude
    if not found.finite or not (found.is_near | one_of_them & (found.negative == (bits > 0x7FFF))).all():
        return None
    steps = (found.most - (found.most - magnitude & 255) - magnitude) // 256
    counted = (magnitude <= found.most) & (steps < _STEPS)
    kinds = torch.where(counted, steps, torch.where(magnitude < 256, _ALONE, _ESCAPE))
    is_escape = found.is_near & (kinds == _ESCAPE)
    fours = (kinds | _SIGN * (bits >> 15)).to(torch.uint8)
    own = [pad(four[near], (0, int(near.sum()) % 2)) for four, near in zip(fours, found.is_near, strict=True)]
    first, second = torch.cat(own).view(-1, 2).unbind(1)
    counts = torch.stack([(found.is_near.sum(1) + 1) // 2, is_escape.sum(1)], 1).int()
    return Parts((bits & 255).to(torch.uint8), first | second << 4, (bits[is_escape] >> 8).to(torch.uint8), counts)


def join(content: Tensor, low: Tensor, heads: Tensor, fours: int, escapes: int, found: Intervals) -> Tensor:
    """What was split -> bf16 [groups, numbers]. content: uint8 [bytes], whose 4 bits begin at `fours`, and whose
    escapes at `escapes`; low: uint8 [groups, numbers]; heads: where those of a group are from there on, int32 [groups,
    2]."""
    near, low, last = found.is_near, low.int(), len(content) - 1
    rank = near.cumsum(1) - 1
    four = content[(fours + heads[:, :1] + rank // 2).clamp(0, last)].int() >> rank % 2 * 4 & 15
    kinds = four & 7
    is_escape = near & (kinds == _ESCAPE)
    upper = content[(escapes + heads[:, 1:] + is_escape.cumsum(1) - 1).clamp(0, last)].int()
    counted = found.most - (found.most - low & 255) - 256 * kinds
    close = torch.where(kinds == _ALONE, low, counted) | (four & _SIGN) << 12
    close = torch.where(is_escape, upper << 8 | low, close)
    bits = torch.where(near, close, found.least + (low - found.least & 255) | found.negative.int() << 15)
    numbers: Tensor = torch.where(bits < 1 << 15, bits, bits - (1 << 16)).short().view(torch.bfloat16)
    return numbers
