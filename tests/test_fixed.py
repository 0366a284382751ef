"""Products in fixed point: by every instruction set the bits of their definition (kit/fixed.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kit import fixed
from kit.processor import before_a_guard, built, on_this_machine, threads
from kit.stored import made_up, places
from offload.formats.encodings import ENCODINGS, Encoding
from offload.formats.stored import StoredMatrix
from offload.kernels.cpu import CpuKernels
from offload.kernels.products import Step, Steps, room_to_widen

KINDS = [name for name, each in ENCODINGS.items() if each.has_integers]
DTYPES = (torch.bfloat16, torch.float16)
SPECIAL = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E01)  # 0, -0, subnormal, inf, NaN in fp16


def multiplied(kernels: CpuKernels, x: Tensor, stored: StoredMatrix, **step: object) -> Tensor:
    """By the CPU's kernels. Nothing is read behind the matrix or the scratch."""
    out = torch.empty(len(x), stored.shape[0], dtype=x.dtype)
    room = room_to_widen(*x.shape).fill_(torch.nan)  # what is read before it is written shows
    with before_a_guard(room) as guarded, before_a_guard(stored.rows) as last:
        own = Step(x, StoredMatrix(last, stored.encoding), None, out, fixed=True, **step)
        Steps(kernels, [own], guarded).run(len(x))
    return out


def rows_of(count: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of every form: ordinary ones, of 2^20 ranges in a group, one large number, zeros, least numbers, all bits of
    a mantissa set, the dtype's largest numbers, infinite ones and none."""
    generator, own = torch.Generator().manual_seed(seed), torch.finfo(dtype)
    x = torch.randn(count, inputs, generator=generator)
    wide = torch.exp2(torch.randint(-20, 1, x.shape, generator=generator).float())
    x[1::9] *= wide[1::9]
    x[2::9, 5::32] *= 2.0**12
    x[3::9, : inputs // 2] = 0
    x[4::9] *= own.tiny
    x = x.to(dtype)
    bits = x.view(torch.int16)
    bits[5::9] |= 0x7F if dtype == torch.bfloat16 else 0x3FF
    bits[5::9, ::2] |= 0x180 if dtype == torch.bfloat16 else 0xC00
    x[6::9, ::7] = own.max
    x[7::9, :: inputs // 2] = torch.inf
    x[8::9, inputs - 1] = torch.nan
    return x


def random_blocks(kind: Encoding, outputs: int, inputs: int, seed: int = 0) -> StoredMatrix:
    """Any bytes: every code, and scales of all forms. The first outputs have special scales."""
    generator = torch.Generator().manual_seed(seed)
    shape = outputs, inputs // kind.numbers, kind.nbytes
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    blocks[0], blocks[1] = 0, 255
    if kind.scale == "F16":
        for number, bits in enumerate(SPECIAL, 2):
            for at in places(kind):
                blocks[number, :, at], blocks[number, :, at + 1] = bits & 255, bits >> 8
    tails = torch.tensor([1.0, -0.0, 1e-42, torch.inf, torch.nan, 1e30, *[0.37] * outputs])[:outputs, None]
    return StoredMatrix(torch.cat([blocks.flatten(1), tails.view(torch.uint8)[:, : kind.tail]], 1), kind)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit; NaN is NaN."""
    bits = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return bool(((one.view(bits) == other.view(bits)) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.few(48)
def test_products_have_the_bits_of_the_definition(name: str, dtype: torch.dtype, instructions: str) -> None:
    """With matrices of any bytes and with ordinary ones, rows of every form, and inputs that are no whole 256."""
    kernels, kind = built(instructions), ENCODINGS[name]
    for count in {1, 2, 3, 7, 256 // kind.numbers, 9, 1 + 512 // kind.numbers}:
        inputs = count * kind.numbers
        x = rows_of(19, inputs, dtype, seed=count)
        for stored in (made_up(name, 21, inputs, seed=count), random_blocks(kind, 37, inputs, seed=count)):
            assert same(multiplied(kernels, x, stored), fixed.linear(x, stored)), inputs
