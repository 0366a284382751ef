"""Products in fixed point by their definition, with exact integers and correctly rounded fp32 operations. No tests in
here.

Independent of the kernels: only codes, steps and least values of stored matrices are those of formats/stored.py, whose
numbers tests/test_stored.py compares with llama.cpp's package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload.config.networks import Activation, FeedForward
from offload.formats.stored import StoredMatrix, _codes, _steps
from offload.kernels.experts import ExpertWeights

GROUP, MOST, LEAST_UNIT = 32, 127 * 257, 2.0**-64
_E = torch.tensor(  # of native/vectors.h: 2^t by powers of t, the highest first
    [1.52527338e-5, 1.54035304e-4, 1.33335581e-3, 9.61812911e-3, 5.55041087e-2, 2.40226507e-1, 6.93147181e-1, 1.0]
)


@dataclass(frozen=True)
class Rows:
    """Rows in fixed point. values: int64 [T, groups, 32], |value| <= MOST. units: powers of two, fp32 [T, groups]; NaN
    where a number of the group is not finite, and its values are 0."""

    values: Tensor
    units: Tensor

    def parts(self, size: int) -> Tensor:
        """The values by parts of `size`, 16 or 32: int64 [T, parts, size]."""
        return self.values.flatten(1).unflatten(1, (-1, size))

    def units_of(self, size: int) -> Tensor:
        """The unit of each part, fp32 [T, parts]."""
        return self.units.repeat_interleave(GROUP // size, 1)


def in_fixed_point(x: Tensor) -> Rows:
    """Rows x [T, inputs], bf16 or fp16, in fixed point."""
    groups = x.double().unflatten(1, (-1, GROUP))
    finite = groups.isfinite().all(2)
    groups = groups.where(finite[..., None], 0)
    fraction, exponent = torch.frexp(most := groups.abs().amax(2))  # fraction is below 1
    units = torch.ldexp(torch.ones_like(fraction), exponent - 15 + (fraction * 2**15 > MOST).int())
    units = units.clamp(min=LEAST_UNIT).where(most > 0, LEAST_UNIT)
    values = (groups / units[..., None]).round()  # ties to even; the quotient is exact
    return Rows(values.long(), units.where(finite, torch.nan).float())


@dataclass(frozen=True)
class Integers:
    """A stored matrix as integers. codes: less the centre, int64 [outputs, inputs]. steps: of parts of `part` inputs,
    fp32 [outputs, parts]. least: what codes less the centre leave, likewise, or None."""

    codes: Tensor
    steps: Tensor
    least: Tensor | None
    part: int


def integers_of(stored: StoredMatrix) -> Integers:
    """The integers of a stored matrix of GGUF's kinds."""
    own = stored.encoding
    assert not own.is_rounded
    blocks = stored.rows[:, : stored.rows.shape[1] - own.tail].reshape(-1, own.nbytes)
    codes = _codes(blocks, own).long()
    steps, least = (None if each is None else each[..., 0] for each in _steps(blocks, own, stored._scales(len(blocks))))
    if least is not None and own.codes.bits >= 4:  # those of formats/stored.py have no centre there
        centre = 1 << (own.codes.bits + own.high.bits - 1)
        codes, least = codes - centre, steps * centre + least
    part = min(own.group, GROUP)
    shape = len(stored.rows), stored.shape[1] // part
    expanded = [
        None if each is None else each.expand(len(blocks), own.numbers // own.group)
        .repeat_interleave(own.group // part, 1).reshape(shape) for each in (steps, least)
    ]  # fmt: skip
    return Integers(codes.view(stored.shape), expanded[0], expanded[1], part)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in fp32 with one rounding. The product is exact in fp64; its sum there is rounded to odd, of which
    rounding to fp32 makes the nearest number."""
    product, c = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    is_even = (total.view(torch.int64) & 1) == 0
    towards = torch.copysign(torch.full_like(total, torch.inf), error)
    odd = torch.nextafter(total, towards)
    return torch.where(total.isfinite() & (error != 0) & is_even, odd, total).float()


def fold(lanes: Tensor) -> Tensor:
    """The sum of the last dimension, of a power of two: halves are added until one is left, in fp32."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def product(x: Tensor, stored: StoredMatrix) -> Tensor:
    """The product of rows x [T, inputs] with a matrix [outputs, inputs], fp32 [T, outputs]."""
    rows, own = in_fixed_point(x), integers_of(stored)
    values, codes = rows.parts(own.part).double(), own.codes.unflatten(1, (-1, own.part)).double()
    sums = torch.einsum("tpi,opi->pto", values, codes)  # below 2^27: exact in fp64
    units = rows.units_of(own.part).T[..., None]
    lanes = 256 // own.part
    total = _by_lanes(sums.float(), own.steps.T[:, None] * units, lanes)
    if own.least is None:
        return total
    scaled = values.sum(2).float().T[..., None] * units
    return total + _by_lanes(scaled, own.least.T[:, None], lanes)


def _by_lanes(first: Tensor, second: Tensor, count: int) -> Tensor:
    """The sum over parts of first * second, [parts, T, outputs] each: part p is added to lane p mod `count`."""
    first, second = torch.broadcast_tensors(first, second)
    lanes = torch.zeros(count, *first.shape[1:])
    for start in range(0, len(first), count):
        some = slice(start, start + count)
        added = fma(first[some], second[some], lanes[: len(first[some])])
        lanes[: len(added)] = added
    return fold(lanes.movedim(0, -1))


def linear(x: Tensor, stored: StoredMatrix, bias: Tensor | None = None) -> Tensor:
    """The product of rows x [T, inputs] with a matrix, plus its bias, in the dtype of the rows: [T, outputs]."""
    total = product(x, stored)
    return (total if bias is None else total + bias.float()).to(x.dtype)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x, by the operations of native/products.h: rounded to the dtype of x."""
    y = x.float()
    if activation == "relu_squared":
        y = torch.where(y < 0, 0.0, y)
        return (y * y).to(x.dtype)
    if activation == "silu":
        return _opened(y, y * _fp32(-1.44269504)).to(x.dtype)
    if activation == "clamped_silu":
        y = torch.where(y > 7, 7.0, y)
        return _opened(y, y * (_fp32(-1.702) * _fp32(1.44269504))).to(x.dtype)
    return _opened(y, y * (1 + _fp32(0.044715) * y * y) * _fp32(-2.30220818)).to(x.dtype)


def _fp32(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)


def _opened(x: Tensor, power: Tensor) -> Tensor:
    """x / (1 + 2^power)."""
    return x / (1 + torch.where(power > 126, torch.inf, exp2(power)))


def exp2(x: Tensor) -> Tensor:
    """2^x of native/vectors.h, fp32: a polynomial of degree 7 by fma, times a power of two."""
    x = torch.where(x < -127, -127.0, x)
    whole = x.round()
    t, total = x - whole, _E[0].expand_as(x)
    for factor in _E[1:]:
        total = fma(total, t, factor)
    exponent = whole.nan_to_num(0).int() + 127
    return total * (exponent << 23).view(torch.float32)


def _opening(up: Tensor, activation: Activation) -> Tensor:
    """What an activation opens, of the dtype."""
    return (up.float().clamp(-7, 7) + 1).to(up.dtype) if activation == "clamped_silu" else up


def through(network: FeedForward, weights: ExpertWeights, x: Tensor) -> Tensor:
    """What an expert makes of normed rows x [T, inputs], all of its matrices stored in GGUF's kinds: [T, outputs]."""
    bias, activation = weights.gate_up_bias, network.activation
    if weights.gate is None:
        inner = activated(linear(x, weights.up, bias), activation)
    else:
        of_gate, of_up = (None, None) if bias is None else bias.chunk(2)
        gate = activated(linear(x, weights.gate, of_gate), activation)
        up = _opening(linear(x, weights.up, of_up), activation)
        inner = (gate.float() * up.float()).to(x.dtype)
    return linear(inner, weights.down, weights.down_bias)
