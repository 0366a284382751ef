"""Weights in 4 and 6 bits: their making, bit for bit, and products of rows with them, beside the exact rule in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from kit.oracles import step_with_torch
from kit.processor import built, on_this_machine, threads
from offload.config.norm import Norm
from offload.formats import quantised as codes
from offload.formats.quantised import GROUP, TILE, Codes, encode, encode_with_torch
from offload.kernels.norms import NormWeights
from offload.kernels.products import Ending, Step, Steps, room_to_widen
from offload.native.interface import Library

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=on_this_machine() or ["none"])
def found(request: pytest.FixtureRequest) -> Library:
    if request.param == "none":
        pytest.skip("there are no kernels for this machine")
    return built(request.param)


@pytest.fixture(params=[4, 6])
def bits(request: pytest.FixtureRequest) -> int:
    return request.param


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def empty(outputs: int, inputs: int, bits: int) -> Codes:
    """Memory for codes, full of what is none."""
    return Codes(torch.full(Codes.shape_of_blocks((outputs, inputs), bits), 0xA5, dtype=torch.uint8))


def encoded(found: Library, bits: int, weight: Tensor) -> Codes:
    into = empty(*weight.shape, bits)
    encode(weight, into, found)
    return into


# Making.


def awkward(dtype: torch.dtype) -> Tensor:
    """[outputs, 128]: groups of one number, of zeros, of two signs, of the smallest, largest and subnormal numbers."""
    info = torch.finfo(dtype)
    rows = [normal(2 * GROUP, seed=i) * 10.0 ** (i - 4) for i in range(6)]
    rows += [torch.full((2 * GROUP,), value) for value in (0.0, -0.0, 1.0, -2.75, info.tiny, -info.tiny / 4)]
    rows += [normal(2 * GROUP, seed=9).abs() + offset for offset in (100.0, -1000.0)]
    rows.append(torch.linspace(-1, 1, 2 * GROUP))
    last = torch.zeros(2 * GROUP)
    last[3], last[70], last[90] = info.max, info.max, -info.max  # a range above what fp32 holds
    return torch.stack([*rows, last]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_made_in_parts_are_the_same(bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, sizes, real = normal(117, 3 * GROUP, seed=10).to(dtype), list[int](), encode_with_torch
    wanted = empty(*weight.shape, bits)
    encode_with_torch(weight, wanted)
    monkeypatch.setattr(codes, "encode_with_torch", lambda part, into: (sizes.append(len(part)), real(part, into)))
    for most, parts in ((40 * 3 * GROUP, [32, 32, 32, 21]), (1, [16] * 7 + [5]), (2**20, [117])):
        monkeypatch.setattr(codes, "_ENCODED", most)
        made = empty(*weight.shape, bits)
        codes.encode_in_parts(weight, made)
        assert sizes == parts
        assert torch.equal(made.blocks, wanted.blocks)
        sizes.clear()


class Divisions(TorchDispatchMode):
    """What is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[object] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::div"):
            self.divisors.append(args[1])
        return func(*args, **(kwargs or {}))


def test_a_gpu_divides_as_the_processor_does(bits: int) -> None:
    """For a number that is no tensor torch's operator multiplies there by its inverse, which is rounded."""
    weight = normal(16, GROUP)
    with Divisions() as seen:
        encode_with_torch(weight, empty(*weight.shape, bits))
    assert len(seen.divisors) == 1
    assert all(isinstance(divisor, Tensor) for divisor in seen.divisors)


def scales(codes: Codes) -> Tensor:
    """Step and low, [outputs, groups, 2, 1]."""
    units = codes.blocks[..., : 4 * TILE].contiguous().view(torch.bfloat16)
    return units.unflatten(2, (TILE, 2)).transpose(1, 2).flatten(0, 1)[..., None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_code_stands_for_a_number_half_a_step_away_at_most(bits: int, dtype: torch.dtype) -> None:
    """And steps are no wider than the range asks for, but for their rounding to bf16."""
    weight, most = awkward(dtype)[:-1], 2**bits - 1
    into = empty(*weight.shape, bits)
    encode_with_torch(weight, into)
    step, low = scales(into)[: len(weight)].double().unbind(2)
    exact = weight.double().view(len(weight), -1, GROUP)
    number = into.matrix(torch.float32)[: len(weight)].double().view(exact.shape)
    # Steps below 2^-100 count as none, and the codes stand for fp32 numbers.
    bound = 0.5 * step + 4e-7 * (low.abs() + most * step) + 2.0**-100 * most
    assert bool(((number - exact).abs() <= bound).all())
    width = exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)
    off = exact.abs().amax(-1, keepdim=True) / 128  # low is rounded down
    assert bool((step * most <= (width + off) * (1 + 2**-7) + 1e-40).all())


def test_inputs_that_are_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="100 inputs are no multiple of 64"):
        Codes.shape_of_blocks((3, 100), 4)


# Products.


def make_step(
    found: Library, bits: int, dtype: torch.dtype, num_rows: int, inputs: int, outputs: int, *,
    ending: Ending = "write", norm: bool = False, bias: bool = False, seed: int = 0,
) -> Step:  # fmt: skip
    if ending == "gate":  # its halves have whole tiles
        outputs = -(-outputs // TILE) * TILE
    width = 2 * outputs if ending == "gate" else outputs
    weight = (normal(width, inputs, seed=seed) / inputs**0.5).to(dtype)
    return Step(
        x=normal(num_rows, inputs, seed=seed + 1).to(dtype),
        weight=encoded(found, bits, weight),
        bias=normal(width, seed=seed + 2).to(dtype) if bias else None,
        out=normal(num_rows, outputs, seed=seed + 3).to(dtype),
        norm=NormWeights(Norm(1e-5), normal(inputs, seed=seed + 4).to(dtype)) if norm else None,
        ending=ending,
    )


def by_the_rule(step: Step) -> Tensor:
    """What the step leaves in `out`: rows in 8 bits, by groups, times the codes; nothing else is rounded."""
    assert isinstance(step.weight, Codes)
    x = step.x.double()
    if step.norm is not None:
        x = rms_norm(x, x.shape[1:], step.norm.weight.double(), step.norm.norm.eps).to(step.x.dtype).double()
    groups = x.view(len(x), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).float().double() / 127
    numbers = (groups / torch.where(scale > 0, scale, 1.0)).float().round().double()
    width = step.out.shape[1] * (2 if step.ending == "gate" else 1)
    y = (scale * numbers).flatten(1) @ step.weight.matrix(torch.float32)[:width].double().T
    if step.bias is not None:
        y += step.bias.double()
    if step.ending == "gate":
        gate, up = y.chunk(2, -1)
        return silu(gate) * up
    return y + step.out.double() if step.ending == "add" else y


def run(found: Library, step: Step, num_rows: int | None = None) -> Tensor:
    """The step's `out` afterwards; the step keeps its own. All memory to widen is NaN before."""
    own = replace(step, out=step.out.clone())
    widened = room_to_widen(*own.x.shape).fill_(torch.nan)
    Steps(found, [own], widened).run(len(own.x) if num_rows is None else num_rows)
    return own.out


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("ending", ["write", "add", "gate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_follow_the_rule(
    found: Library, bits: int, dtype: torch.dtype, ending: Ending, norm: bool, bias: bool
) -> None:
    """Sizes on either side of a vector of groups and of a thread's outputs. A tie of the rule may fall either way: one
    of 8 bits of one input."""
    few = 8 * torch.finfo(dtype).eps
    for seed, (inputs, outputs) in enumerate([(64, 1), (128, 16), (512, 37), (1024, 5), (1088, 48), (2240, 17)]):
        for num_rows in (1, 2, 3, 5, 8, 9, 17):
            step = make_step(
                found, bits, dtype, num_rows, inputs, outputs, ending=ending, norm=norm, bias=bias, seed=7 * seed
            )
            wanted, out = by_the_rule(step), run(found, step)
            largest = max(1.0, float(wanted.abs().max()))
            assert_close(out.double(), wanted, atol=(few + 0.02 * inputs**-0.5) * largest, rtol=few)
            middle = float((out.double() - wanted).abs().median())
            assert middle <= few / 2 * largest


@pytest.mark.parametrize("ending", ["write", "add", "gate"])
def test_a_rows_product_has_the_same_bits_beside_any_rows(found: Library, bits: int, ending: Ending) -> None:
    """With 1 to 33 rows, at every place among them, on 1, 2 and 4 threads; one of the rows beside it is NaN."""
    most = 33
    step = make_step(found, bits, torch.bfloat16, most, 1088, 37, ending=ending, norm=True, bias=True)
    step.x[5] = torch.nan
    alone = torch.cat([run(found, replace(step, x=step.x[i : i + 1], out=step.out[i : i + 1])) for i in range(most)])
    sound = torch.arange(most) != 5
    assert bool(alone[5].isnan().all())
    assert bool(alone[sound].isfinite().all())
    for number, count in enumerate(range(1, most + 1)):
        places = (torch.arange(count) + 29 * number) % most
        with threads((1, 2, 4)[number % 3]):
            out = run(found, replace(step, x=step.x[places], out=step.out[places]))
        assert torch.equal(out[sound[places]], alone[places][sound[places]])


def test_the_first_rows_are_those_of_all_and_the_rest_stays(found: Library, bits: int) -> None:
    step = make_step(found, bits, torch.bfloat16, 80, 128, 21, ending="add", norm=True, bias=True)
    whole = run(found, step)
    for count in (1, 9, 70, 79):
        out = run(found, step, count)
        assert torch.equal(out[:count], whole[:count])
        assert torch.equal(out[count:], step.out[count:])


def test_the_largest_codes_and_rows_do_not_overflow(found: Library, bits: int) -> None:
    """All codes are the largest, all numbers of a row 127 or -127: sums of 64 products are exact."""
    codes = empty(3, 2 * GROUP, bits)
    codes.blocks.fill_(255)
    codes.blocks[..., : 4 * TILE] = torch.tensor([0.25, -1.0] * TILE).bfloat16().view(torch.uint8)
    x = torch.ones(2, 2 * GROUP)
    x[1] = -3.0
    wanted = x @ codes.matrix(torch.float32)[:3].T
    assert_close(run(found, Step(x, codes, None, torch.empty(2, 3))), wanted, rtol=1e-6, atol=0)


def test_rows_of_zeros_and_of_the_smallest_numbers_are_finite(found: Library, bits: int) -> None:
    step = make_step(found, bits, torch.float32, 3, 128, 5)
    step.x[0], step.x[1] = 0.0, 1e-39
    out = run(found, step)
    assert bool((out[:2] == 0).all())
    assert bool(out.isfinite().all())


def test_torchs_operators_give_nearly_the_same(found: Library, bits: int) -> None:
    """Their rows are not taken to 8 bits."""
    step = make_step(found, bits, torch.float32, 4, 1024, 48, ending="gate", norm=True)
    out = run(found, step)
    step_with_torch(step, 4)
    assert_close(out, step.out, rtol=0, atol=0.02 * float(step.out.abs().max()))


def test_steps_with_codes_and_without_follow_one_another(found: Library, bits: int) -> None:
    first = make_step(found, bits, torch.bfloat16, 4, 128, 192)
    plain = Step(first.out, (normal(64, 192) / 14).to(torch.bfloat16), None, normal(4, 64).to(torch.bfloat16))
    wanted = run(found, replace(plain, x=run(found, first)))
    joined = replace(plain, x=first.out.clone(), out=plain.out.clone())
    Steps(found, [replace(first, out=joined.x), joined], room_to_widen(4, 192)).run(4)
    assert torch.equal(joined.out, wanted)
