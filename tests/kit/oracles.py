"""What the kernels are tested against, by torch's operators: products, and bit for bit the rules by which numbers
become packed ones, codes and residuals. No tests in here.

Intervals are those of native/intervals.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad, silu

from offload.formats.layout import RESIDUAL_HEAD_BYTES, Packing, PageShape
from offload.formats.packed import ESCAPE
from offload.formats.quantised import GROUP, TILE, Codes
from offload.formats.quantised_kv import GROUP as TOKENS
from offload.formats.quantised_kv import KVCodes
from offload.formats.residuals import Residual, _num_groups, _places
from offload.kernels.products import Step

_HALF = TOKENS // 2
_MARGIN, _STEPS, _ALONE, _ESCAPE, _SIGN = 2, 6, 6, 7, 8  # as in native/intervals.h


def step_with_torch(step: Step, num_rows: int) -> None:
    """What a step does to its first rows. Codes: with rows as they are."""
    x, out = step.x[:num_rows], step.out[:num_rows]
    normed = x if step.norm is None else step.norm(x)
    weight = step.weight.matrix(x.dtype) if isinstance(step.weight, Codes) else step.weight
    assert weight is not None
    width = out.shape[1] * (2 if step.ending == "gate" else 1)
    y = linear(normed, weight[:width], step.bias)
    if step.ending == "add":
        y = y * step.factor + out
    if step.ending == "square":
        y = y.relu().square()
    if step.ending == "gate":
        gate, up = y.chunk(2, -1)
        y = _activated(gate, step) * up
    if step.ending == "activate":
        y = _activated(y, step)
    out.copy_(y)


def _activated(x: Tensor, step: Step) -> Tensor:
    if step.activation == "silu":
        return silu(x)
    return gelu(x, approximate="tanh") if step.activation == "gelu_tanh" else x.relu().square()


def pack_with_torch(numbers: Tensor, packing: Packing) -> Tensor | None:
    """bf16 [numbers] -> uint8 [nbytes], bit for bit what the kernel makes of them; None where it leaves them."""
    bits = numbers.view(torch.int16).int().view(-1, packing.group) & 0xFFFF
    exponents, low = bits >> 7 & 255, bits >> 8 & 128 | bits & 127
    largest = exponents.amax(1, keepdim=True)
    distances = (largest - exponents).clamp(max=ESCAPE)
    escaped = distances == ESCAPE
    counts = escaped.sum(1)
    if counts.sum() > packing.room:
        return None
    first, second = distances.view(len(bits), 2, -1).unbind(1)
    heads = (largest[:, 0] | (counts.cumsum(0) - counts) << 8).int()
    escapes = torch.zeros(packing.room, dtype=torch.uint8)
    escapes[: counts.sum()] = exponents[escaped].to(torch.uint8)
    parts = low.to(torch.uint8).flatten(), (first | second << 4).to(torch.uint8).flatten(), heads.view(torch.uint8)
    return torch.cat([*parts, escapes])


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


def split_off_with_torch(weight: Tensor, codes: Codes) -> Residual | None:
    """What `residuals.split_off` does."""
    parts = split(_by_group(weight), _intervals(codes))
    if parts is None:
        return None
    heads, escapes, size = _places(parts.counts)
    content = torch.cat([parts.low.flatten(), heads.view(torch.uint8).flatten(), parts.fours, parts.escapes])
    return Residual(pad(content, (0, size - len(content))), escapes)


def restore_with_torch(content: Tensor, escapes: int, codes: Codes) -> Tensor:
    """What `residuals.restore` does, into a new matrix."""
    outputs, inputs = codes.shape
    numbers, first = outputs * inputs, outputs * inputs + RESIDUAL_HEAD_BYTES * _num_groups(codes)
    low, heads = content[:numbers].view(-1, TILE * GROUP), content[numbers:first].clone().view(torch.int32).view(-1, 2)
    groups = join(content, low, heads, first, escapes, _intervals(codes))
    return groups.view(outputs // TILE, inputs // GROUP, TILE, GROUP).transpose(1, 2).reshape(outputs, inputs)


def _intervals(codes: Codes) -> Intervals:
    """By group."""
    step, middle = codes.middles()
    return Intervals.of(_by_group(step), _by_group(middle))


def _by_group(matrix: Tensor) -> Tensor:
    """[outputs, inputs] -> [groups, TILE * GROUP], group after group of a tile's outputs."""
    tiles, groups = matrix.shape[0] // TILE, matrix.shape[1] // GROUP
    return matrix.view(tiles, TILE, groups, GROUP).transpose(1, 2).reshape(tiles * groups, TILE * GROUP)


def split_off_kv_with_torch(block: Tensor, codes: KVCodes, kind: int) -> Tensor | None:
    """bf16 [H_kv, S, D] and the codes of that page, of one layer -> uint8 [bytes], bit for bit what the kernel writes;
    None where it writes none, or more than the block has."""
    parts = split(block.reshape(-1, TOKENS * codes.head_dim), _kv_intervals(codes, kind))
    if parts is None:
        return None
    heads = pad(parts.counts.cumsum(0), (0, 0, 1, 0)).int()
    content = torch.cat([parts.low.flatten(), heads.view(torch.uint8).flatten(), parts.fours, parts.escapes])
    content = pad(content, (0, -len(content) % 16))
    return content if len(content) <= 2 * block.numel() else None


def restore_kv_with_torch(content: Tensor, codes: KVCodes, kind: int) -> Tensor:
    """What `kv_residuals.restore` does of all groups, into a new block [H_kv, S, D]. content: uint8, what was split
    off, and perhaps more behind it."""
    _, num_kv_heads, groups_of_head, _ = codes.blocks.shape
    shape = PageShape(num_kv_heads, groups_of_head * TOKENS, codes.head_dim)
    low, heads = content[: shape.numbers], content[shape.numbers : shape.fours].clone().view(torch.int32).view(-1, 2)
    places = heads[:-1], shape.fours, shape.fours + int(heads[-1, 0])
    groups = join(content, low.view(shape.num_groups, -1), *places, _kv_intervals(codes, kind))
    return groups.view(num_kv_heads, -1, codes.head_dim)


def _kv_intervals(codes: KVCodes, kind: int) -> Intervals:
    """By group, of one layer's keys or values."""
    step, middle = (x[0, kind].reshape(-1, TOKENS * codes.head_dim) for x in (codes.steps(), codes.rows(torch.float32)))
    return Intervals.of(step, middle)
