"""Products in fixed point: by every instruction set the bits of their definition (kit/fixed.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kit import fixed
from kit.processor import before_a_guard, best, built, on_this_machine, threads
from kit.stored import is_quicker_in_fixed_point, made_up, places
from offload.config.networks import Activation, Experts, FeedForward
from offload.formats.encodings import ENCODINGS, Encoding
from offload.formats.stored import StoredMatrix
from offload.kernels.cpu import CpuKernels
from offload.kernels.experts import Bank
from offload.kernels.experts_cpu import MOST_ROWS, run_share
from offload.kernels.products import Step, Steps, room_to_widen
from offload.weights.experts import bank_of
from offload.weights.layout import LayerLayout
from test_stored import largest

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
    a mantissa set, the dtype's largest numbers, infinite ones and none, and nearly the same number everywhere."""
    generator, own = torch.Generator().manual_seed(seed), torch.finfo(dtype)
    x = torch.randn(count, inputs, generator=generator)
    wide = torch.exp2(torch.randint(-20, 1, x.shape, generator=generator).float())
    x[1::10] *= wide[1::10]
    x[2::10, 5::32] *= 2.0**12
    x[3::10, : inputs // 2] = 0
    x[4::10, :32] *= own.tiny
    x[4::10, 32:] *= max(own.tiny, 2.0**-56)  # less than the least unit times 2^15
    x = x.to(dtype)
    bits = x.view(torch.int16)
    bits[5::10] |= 0x7F if dtype == torch.bfloat16 else 0x3FF
    bits[5::10, ::2] |= 0x180 if dtype == torch.bfloat16 else 0xC00
    x[6::10, ::7] = own.max
    x[7::10, :: inputs // 2] = torch.inf
    x[8::10, inputs - 1] = torch.nan
    x[9::10], x[9::10, ::32] = 1.984375, 0.0137  # sums of more than 24 bits
    return x


def random_blocks(kind: Encoding, outputs: int, inputs: int, seed: int = 0) -> StoredMatrix:
    """Any bytes: every code, and scales of all forms. The first outputs have special scales, and the fourth the same
    code everywhere."""
    generator = torch.Generator().manual_seed(seed)
    shape = outputs, inputs // kind.numbers, kind.nbytes
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    blocks[0], blocks[1], blocks[3] = 0, 255, 0x11
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
    """With matrices of any bytes and with ordinary ones, rows of every form, and inputs that are no whole 256. Also
    before the result is rounded: rows may be in fp32."""
    kernels, kind = built(instructions), ENCODINGS[name]
    for count in {1, 2, 3, 7, 256 // kind.numbers, 9, 1 + 512 // kind.numbers}:
        inputs = count * kind.numbers
        x = rows_of(19, inputs, dtype, seed=count)
        for stored in (made_up(name, 21, inputs, seed=count), random_blocks(kind, 37, inputs, seed=count)):
            assert same(multiplied(kernels, x.float(), stored), fixed.product(x, stored)), inputs
            assert same(multiplied(kernels, x, stored), fixed.linear(x, stored)), inputs


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.few(24)
def test_it_is_used_where_it_is_quicker(name: str, instructions: str) -> None:
    """Elsewhere small numbers beside large ones that cancel count, too."""
    kind, kernels = ENCODINGS[name], built(instructions)
    inputs = kind.numbers * (9 if kind.numbers < 256 else 1)
    half = made_up(name, 21, inputs, seed=1)
    stored = StoredMatrix(torch.cat([half.rows[:, : half.rows.shape[1] - kind.tail], half.rows], 1), kind)
    for dtype in (*DTYPES, torch.float32):
        x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(0))
        x[:, 5::32] *= 2.0**12
        x = torch.cat([x, torch.where(x.abs() > 100, -x, 0)], 1).to(dtype)
        out = torch.empty(3, 21, dtype=dtype)
        Steps(kernels, [Step(x, stored, None, out)], room_to_widen(*x.shape)).run(3)
        in_fixed_point = is_quicker_in_fixed_point(name, dtype, instructions)
        assert same(out, fixed.linear(x, stored)) is in_fixed_point


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.few(16)
def test_rows_have_the_same_bits_beside_any_rows(name: str, instructions: str, num_cases: Callable[[int], int]) -> None:
    """One to 64 of them, on any number of threads."""
    kernels, kind = built(instructions), ENCODINGS[name]
    inputs = kind.numbers * (9 if kind.numbers < 256 else 2)
    stored, x = made_up(name, 35, inputs, seed=1), rows_of(70, inputs, torch.bfloat16)
    wanted = fixed.linear(x, stored)
    for count in (1, 2, 3, 4, 5, 7, 8, 13, 64, 70)[: num_cases(10)]:
        for first in (0, 70 - count):
            with threads(1 + count % 3):
                found = multiplied(kernels, x[first : first + count], stored)
            assert same(found, wanted[first : first + count]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_rows_have_the_least_unit_that_16_bits_allow(dtype: torch.dtype) -> None:
    """By exact fractions. A bf16 number within 2^-6 of its group's largest is exact."""
    rows = rows_of(27, 64, dtype)
    found = fixed.in_fixed_point(rows)
    for row, values, units in zip(rows, found.values, found.units, strict=True):
        for group, of_group, unit in zip(row.view(2, 32).tolist(), values.tolist(), units.tolist(), strict=True):
            if not all(abs(x) < float("inf") for x in group):
                assert unit != unit
                continue
            most, exact = max(map(abs, map(Fraction, group))), Fraction(unit)
            assert most <= 32639 * exact
            assert most > 32639 * exact / 2 or unit == 2.0**-64
            for x, value in zip(map(Fraction, group), of_group, strict=True):
                assert value == round(x / exact)  # ties to even
                assert dtype == torch.float16 or abs(x) < most / 2**6 or most < 2.0**-50 or value * exact == x


def test_the_definitions_fma_rounds_once() -> None:
    """Beside exact fractions, also just beside a tie, where a sum that was rounded to fp64 is rounded the other way."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(3000, generator=generator) for _ in range(3))
    c[1000:2000] = -(a * b)[1000:2000] * (1 + torch.randint(-3, 4, (1000,), generator=generator) * 2.0**-22)
    a[2000:], b[2000:] = 2.0**24 + 2 * torch.randint(1000, (1000,), generator=generator), 1 + 2.0**-23
    a[2999], b[2999], c[2999] = 2.0**12 + 1, 2.0**12 + 1 - 2.0**-11, 2.0**-80
    for one, other, added, found in zip(*(each.tolist() for each in (a, b, c, fixed.fma(a, b, c))), strict=True):
        exact, near = Fraction(one) * Fraction(other) + Fraction(added), torch.tensor(found)
        below, above = (torch.nextafter(near, torch.tensor(way)).item() for way in (-torch.inf, torch.inf))
        distance = abs(Fraction(found) - exact)
        assert distance <= abs(Fraction(below) - exact)
        assert distance <= abs(Fraction(above) - exact)


@pytest.mark.parametrize("name", KINDS)
def test_products_in_fixed_point_are_near_exact_ones(name: str) -> None:
    """Beside fp64: half a unit for each input, and the rounding of fp32 sums; of ordinary rows in bf16 400 times less
    than rounding the result to bf16."""
    stored = made_up(name, 24, 2048, seed=0)
    numbers = stored.matrix(torch.float32).double()
    for dtype in DTYPES:
        x = torch.randn(18, 2048, generator=torch.Generator().manual_seed(0))
        x[9:, 5::32] *= 2.0**12
        x = x.to(dtype)
        found, exact = fixed.product(x, stored).double(), x.double() @ numbers.T
        units = fixed.in_fixed_point(x).units.double().repeat_interleave(32, 1)
        limit = units / 2 @ numbers.abs().T + 4e-7 * x.double().abs() @ largest(stored).T
        assert ((found - exact).abs() <= limit).all()
        if dtype == torch.bfloat16:
            error, rounding = ((each - exact)[:9].square().mean().sqrt() for each in (found, exact.bfloat16().double()))
            assert error * 250 < rounding


NETWORKS = {
    "silu": (FeedForward(512), "Q4_K", "Q4_K", "Q6_K"),
    "gelu_tanh": (FeedForward(256, "gelu_tanh"), "Q4_K", "Q5_K", "Q8_0"),
    "relu_squared": (FeedForward(256, "relu_squared", gated=False), "", "IQ4_XS", "IQ3_S"),
    "clamped_silu, biases": (FeedForward(96, "clamped_silu", bias=True), "MXFP4", "Q5_1", "MXFP4"),
    "no gate, biases": (FeedForward(64, "gelu_tanh", gated=False, bias=True), "", "NVFP4", "NVFP4_INV"),
    "relu_squared with a gate": (FeedForward(64, "relu_squared"), "Q2_0", "Q4_0", "Q2_0"),
}
OTHERS = {
    "plain": (FeedForward(48), "plain", "plain", "plain"),
    "our blocks": (FeedForward(64, "clamped_silu", bias=True), "INT4_BF16/64", "INT4_BF16/64", "FP8_F32/32"),
    "one of our blocks": (FeedForward(64), "Q4_0", "Q4_0", "INT8_F16/64"),
    "GGUF": (FeedForward(256), "Q4_K", "Q4_K", "Q6_K"),
}
HIDDEN = 256


def bank_for(network: FeedForward, kinds: Sequence[str], count: int, dtype: torch.dtype) -> Bank:
    """Places for `count` experts with matrices of the kinds gate, up and down."""
    shapes = [(network.size, HIDDEN), (network.size, HIDDEN), (HIDDEN, network.size)]
    tensors, stored = {}, {}
    for name, kind, (outputs, inputs) in zip(("gate", "up", "down"), kinds, shapes, strict=True):
        if not kind:
            continue
        view = f"{name}.{'weight' if kind == 'plain' else 'stored'}"
        tensors[view] = (outputs, inputs), dtype
        if kind != "plain":
            stored[view] = kind
            tensors[view] = (outputs, ENCODINGS[kind].row_bytes(inputs)), torch.uint8
    if network.bias:
        tensors |= {"gate_up.bias": ((network.size * (1 + network.gated),), dtype), "down.bias": ((HIDDEN,), dtype)}
    packed = LayerLayout.pack(tensors)
    layout = LayerLayout(packed.views, packed.num_bytes, stored=stored)
    content = torch.zeros(count, layout.num_bytes, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for place in range(count):
        for name, view in layout.views.items():
            to = view.of(content[place])
            if name in stored:
                inputs = network.size if name.startswith("down") else HIDDEN
                to.copy_(made_up(stored[name], len(to), inputs, 10 * place + len(name)).rows)
            else:
                to.copy_(torch.randn(to.shape, generator=generator) / to.shape[-1] ** 0.5)
    return bank_of(layout, content)


@dataclass(frozen=True)
class Share:
    """A share of a layer's experts, and rows whose experts are chosen: some in the share, some not, some none."""

    experts: Experts
    bank: Bank
    places: Tensor
    rows: Tensor
    chosen: Tensor

    def by(self, kernels: CpuKernels) -> tuple[Tensor, Tensor]:
        return run_share(self.experts, self.bank, self.places, self.rows, self.chosen, kernels=kernels)

    def wanted(self) -> list[tuple[int, int, int]]:
        """The pairs: number, row, place; in their order."""
        found = list[tuple[int, int, int, int]]()
        for row, own in enumerate(self.chosen.tolist()):
            for rank, expert in enumerate(own):
                if expert < self.experts.count and self.places[expert] >= 0:
                    number = row * len(own) + rank
                    found.append((row // MOST_ROWS, expert, number, int(self.places[expert])))
        return [(number, number // self.chosen.shape[1], place) for _, _, number, place in sorted(found)]


def share_of(network: FeedForward, kinds: Sequence[str], dtype: torch.dtype, num_rows: int) -> Share:
    """Seven experts, four of them in places of a bank in another order; a row in five is padding."""
    generator = torch.Generator().manual_seed(num_rows)
    chosen = torch.rand(num_rows, 7, generator=generator).argsort(1)[:, :3].int()
    chosen[3::5] = 7
    places = torch.tensor([2, -1, 0, 3, -1, 1, -1], dtype=torch.int32)
    rows = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    return Share(Experts(network, 7, 3), bank_for(network, kinds, 4, dtype), places, rows, chosen.contiguous())


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.few(18)
def test_a_share_of_experts_has_the_bits_of_the_definition(network: str, dtype: torch.dtype, instructions: str) -> None:
    own, *kinds = NETWORKS[network]
    for num_rows in (1, 2, 9, 70):
        share = share_of(own, kinds, dtype, num_rows)
        assert share.bank.places[0].has_integers
        pairs, made = share.by(built(instructions))
        wanted = share.wanted()
        assert pairs.tolist() == [number for number, _, _ in wanted]
        assert made.shape == (len(wanted), HIDDEN)
        for (_, row, place), found in zip(wanted, made, strict=True):
            exact = fixed.through(own, share.bank.places[place], share.rows[row : row + 1])
            assert same(found[None], exact), (row, place)


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("network", OTHERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.few(12)
def test_a_share_without_fixed_point_has_the_bits_of_products(
    network: str, dtype: torch.dtype, instructions: str
) -> None:
    own, *kinds = OTHERS[network]
    kernels, share = built(instructions), share_of(own, kinds, dtype, 23)
    assert share.bank.places[0].has_integers == (network == "GGUF")
    pairs, made = share.by(kernels)
    assert pairs.tolist() == [number for number, _, _ in share.wanted()]
    for (_, row, place), found in zip(share.wanted(), made, strict=True):
        weights, x = share.bank.places[place], share.rows[row : row + 1]
        inner, out = torch.empty(1, own.size, dtype=dtype), torch.empty(1, HIDDEN, dtype=dtype)
        gate = Step(
            x, weights.gate, weights.gate_up_bias, inner, None, "gate", activation=own.activation, up=weights.up,
            fixed=True,
        )  # fmt: skip
        down = Step(inner, weights.down, weights.down_bias, out, fixed=True)
        Steps(kernels, [gate, down], room_to_widen(1, 256)).run(1)
        assert torch.equal(found, out[0])


def test_shares_may_be_of_many_rows_or_of_none() -> None:
    """Rows run by MOST_ROWS, and pairs are numbered through."""
    kernels, (own, *kinds) = best(), NETWORKS["relu_squared with a gate"]
    share = share_of(own, kinds, torch.bfloat16, 2 * MOST_ROWS + 5)
    pairs, made = share.by(kernels)
    assert pairs.tolist() == [number for number, _, _ in share.wanted()]
    for at in (0, len(pairs) // 2, len(pairs) - 1):
        _, row, place = share.wanted()[at]
        assert same(made[at : at + 1], fixed.through(own, share.bank.places[place], share.rows[row : row + 1]))
    nothing = replace(share, places=torch.full((7,), -1, dtype=torch.int32))
    assert [len(each) for each in nothing.by(kernels)] == [0, 0]
    padding = replace(share, rows=share.rows[:2], chosen=torch.full((2, 3), 7, dtype=torch.int32))
    assert [len(each) for each in padding.by(kernels)] == [0, 0]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu_squared", "clamped_silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_definitions_activations_are_those_of_the_kernels(activation: Activation, dtype: torch.dtype) -> None:
    """Of every number of the dtype."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    ones = torch.zeros(16, 32, dtype=dtype)
    ones[:, 0] = 1
    out = torch.empty(2**16, 16, dtype=dtype)
    alone = torch.zeros(2**16, 32, dtype=dtype)
    alone[:, 0] = x
    step = Step(alone, ones, None, out, None, "activate", activation=activation)
    Steps(best(), [step], room_to_widen(*alone.shape)).run(len(x))
    least = torch.finfo(dtype).tiny if dtype == torch.bfloat16 else 0.0  # pairs of bf16 have no subnormal numbers
    products = torch.where((x == 0) | (x.abs() < least), 0, x)  # and a sum that begins with 0 is never -0
    assert same(out[:, 0], fixed.activated(products, activation))
