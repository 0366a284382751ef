"""Matrices as quantised checkpoints store them: their numbers beside llama.cpp's own package, bit for bit, and products
with them beside fp64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from kit import fixed
from kit.processor import before_a_guard, built, on_this_machine, threads
from kit.stored import GGUF, NAMES, YOUNG, is_quicker_in_fixed_point, made_up
from offload.config.norm import Norm
from offload.formats.encodings import ENCODINGS, GROUP_HEAD, KINDS, Encoding
from offload.formats.grids import grid
from offload.formats.stored import StoredMatrix, decode
from offload.kernels.cpu import CpuKernels
from offload.kernels.device import NONE
from offload.kernels.norms import NormWeights
from offload.kernels.products import Step, Steps, room_to_widen
from offload.weights.linear import Linear, Parts

OURS = [name for name in NAMES if "/" in name]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_blocks(kind: Encoding, count: int, seed: int = 0) -> Tensor:
    """Any bytes: scales that are infinite, not numbers, zero and tiny among them."""
    found = torch.randint(
        0, 256, (count, kind.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    found[0] = 0
    found[1] = 255
    if kind.kind.startswith("INT"):  # zeros as checkpoints have them, and scales that are tiny bf16 numbers
        found[2:, 3], found[2:, 2] = 0, found[2:, 2] & 31
        found[2 : count // 8, 1] &= 128
    return found


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit; NaN is NaN."""
    integers = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return bool(((one.view(integers) == other.view(integers)) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("name", [name for name in GGUF if name not in YOUNG])
def test_numbers_are_those_of_llama_cpps_package(name: str, num_cases: Callable[[int], int]) -> None:
    blocks = random_blocks(ENCODINGS[name], num_cases(100_000))
    with np.errstate(all="ignore"):
        wanted = quants.dequantize(blocks.numpy(), GGMLQuantizationType[name])
    assert same(StoredMatrix(blocks, ENCODINGS[name]).matrix(torch.float32), torch.from_numpy(wanted))


def test_grids_are_those_of_llama_cpps_package() -> None:
    for kind in (ENCODINGS[name] for name in GGUF if ENCODINGS[name].grid):
        own = getattr(quants, "IQ1_S" if kind.grid.name == "iq1" else kind.name)
        own.init_grid()
        wanted = own.grid.reshape(own.grid.shape[-2:]) * (8 if kind.grid.name == "iq1" else 1)
        assert np.array_equal(np.array(grid(kind.grid.name)), wanted), kind.name


@pytest.mark.parametrize("name", YOUNG)
def test_numbers_of_kinds_that_the_package_lacks_are_ggmls(name: str, num_cases: Callable[[int], int]) -> None:
    """By ggml's C: codes in the order of the bits, from the lowest on."""
    blocks = random_blocks(ENCODINGS[name], num_cases(2_000))
    scale, codes = blocks[:, :2].clone().view(torch.float16).float(), blocks[:, 2:].numpy()
    if name == "Q1_0":
        numbers = 2 * torch.from_numpy(np.unpackbits(codes, axis=1, bitorder="little")).float() - 1
    else:
        numbers = torch.from_numpy(np.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], -1)).flatten(1).float() - 1
    assert same(StoredMatrix(blocks, ENCODINGS[name]).matrix(torch.float32), scale * numbers)


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4_INV"])
def test_nvfp4s_steps_are_rounded_with_the_rows_scale_first(name: str, num_cases: Callable[[int], int]) -> None:
    """modelopt multiplies, compressed-tensors divides; a row without a scale has GGUF's numbers."""
    blocks, kind = random_blocks(ENCODINGS[name], num_cases(20_000)), ENCODINGS[name]
    blocks[:, :4] &= 127
    tails = torch.rand(len(blocks), 1, generator=torch.Generator().manual_seed(1)) + 0.01
    tails[:4, 0] = torch.tensor([0.0, 1e-30, 1e30, 1.0])
    found = StoredMatrix(torch.cat([blocks, tails.view(torch.uint8)], 1), kind).matrix(torch.float32)
    steps = blocks[:, :4].contiguous().view(torch.float8_e4m3fn).float()
    steps = steps * tails if name == "NVFP4" else steps / tails
    halves = blocks[:, 4:].view(-1, 4, 1, 8) >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[halves.int()]
    wanted = steps[..., None] * e2m1.view(len(blocks), 4, 16)
    assert same(found, wanted.flatten(1))
    plain = blocks[(blocks[:, :4] != 127).all(1)]
    ones = torch.ones(len(plain), 1).view(torch.uint8)
    found = StoredMatrix(torch.cat([plain, ones], 1), kind).matrix(torch.float32)
    assert same(found, torch.from_numpy(quants.dequantize(plain.numpy(), GGMLQuantizationType.NVFP4)))


@pytest.mark.parametrize("name", OURS)
def test_numbers_of_our_blocks_are_codes_times_scales(name: str) -> None:
    """By the definition, number by number."""
    kind = ENCODINGS[name]
    blocks, half = random_blocks(kind, 24), kind.numbers // 2
    found = StoredMatrix(blocks, kind).matrix(torch.float32)
    scales = kind.kind.partition("_")[2]
    for block, row in zip(blocks, found, strict=True):
        head, codes = block[:GROUP_HEAD], block[GROUP_HEAD:].tolist()
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[scales]
        scale = head[: dtype.itemsize].view(dtype)
        zero = head[2:].view(torch.int16).item()
        for i in (0, 1, half - 1, half, kind.numbers - 1):
            if kind.kind.startswith("FP8"):
                number = torch.tensor([codes[i]], dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
            else:
                code = (codes[i % half] >> 4 * (i // half)) & 15 if kind.kind.startswith("INT4") else codes[i]
                number = torch.tensor([code - zero], dtype=torch.float64)
            exact = (number.float() * scale.float()).to(dtype).float()
            assert same(row[i : i + 1], exact), (i, row[i], exact)


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(24)
def test_the_cpus_kernels_find_the_same_numbers(name: str, instructions: str) -> None:
    """Nothing is read behind the blocks, and any number of threads finds the same."""
    kernels, kind = built(instructions), ENCODINGS[name]
    blocks = random_blocks(kind, 37 * 8).view(37, -1)
    tails = torch.tensor([0.0, 1e-30, 1e30, *[0.37] * 34])[:, None].view(torch.uint8)[:, : kind.tail]
    wanted = StoredMatrix(torch.cat([blocks, tails], 1), kind)
    with before_a_guard(wanted.rows) as rows:
        for dtype in DTYPES:
            for number in (1, 3):
                out = torch.empty(wanted.shape, dtype=dtype)
                with threads(number):
                    decode(StoredMatrix(rows, kind), out, kernels)
                assert same(out, wanted.matrix(dtype)), dtype


def multiplied(kernels: CpuKernels, x: Tensor, weight: Tensor | StoredMatrix, **step: Any) -> Tensor:
    """By the CPU's kernels, without a norm. A mapped file may end with a matrix, and so does memory here."""
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype)
    room = room_to_widen(*x.shape).fill_(torch.nan)  # what is read before it is written shows
    content = weight.rows if isinstance(weight, StoredMatrix) else weight
    with before_a_guard(room) as guarded, before_a_guard(content) as last:
        matrix = StoredMatrix(last, weight.encoding) if isinstance(weight, StoredMatrix) else last
        Steps(kernels, [Step(x, matrix, None, out, **step)], guarded).run(len(x))
    return out


def largest(stored: StoredMatrix) -> Tensor:
    """For each number the largest magnitudes of its group that a number is the sum of: a step times a code, and the
    least value. fp64 [outputs, inputs]."""
    numbers = stored.matrix(torch.float32).double()
    codes, own = numbers, stored.encoding
    if own.steps == "least" or own.least:
        blocks = stored.rows.view(-1, own.nbytes).clone()
        blocks[:, own.scale_at + 2 : own.scale_at + 4] = 0
        codes = StoredMatrix(blocks.view_as(stored.rows), stored.encoding).matrix(torch.float32).double()
    groups = codes.abs().view(len(numbers), -1, 16).amax(2) + (numbers - codes).abs().view(len(numbers), -1, 16).amax(2)
    return groups.repeat_interleave(16, 1)


def rows_of(form: str, count: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(count, inputs, generator=generator)
    if form == "ranges":
        x *= torch.exp2(torch.randint(-20, 21, x.shape, generator=generator).float())
    if form in ("one large", "one huge"):
        x[:, 5::32] *= 2.0**6 if form == "one large" else 2.0**20
    if form == "zeros":
        x[:, : inputs // 2] = 0
        x[0] = 0
    return x


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.few(32)
def test_products_are_those_with_the_librarys_numbers_in_fp32(name: str, dtype: torch.dtype, instructions: str) -> None:
    """Beside fp64, also where rounding is all that is left: where the second half of a sum is the first one's negative,
    the result is small, and its own rounding smaller. The bound is of the terms with the group's largest weight: where
    a step and a least value cancel, the numbers are small and what they are summed of is not. In fixed point each
    number of a row may be off by half a unit."""
    kernels, kind, own = built(instructions), ENCODINGS[name], torch.finfo(dtype)
    bound = 5e-7 if name.startswith("INT") and instructions == "avx2" else 4e-7  # sums of eight lanes are longer
    forms = ("plain", "zeros") if dtype == torch.float16 else ("plain", "zeros", "ranges", "one large", "one huge")
    for inputs in [kind.numbers * blocks for blocks in (1, 2, 3, 9)]:
        half = made_up(name, 19, inputs, seed=inputs)
        blocks = half.rows[:, : half.rows.shape[1] - kind.tail]
        both = StoredMatrix(torch.cat([blocks, half.rows], 1), kind)
        for form in forms:
            x = rows_of(form, 11, inputs).to(dtype)
            for rows, stored in ((x, half), (torch.cat([x, x.flip(0)], 1), both), (torch.cat([x, -x], 1), both)):
                numbers = stored.matrix(torch.float32).double()
                found, exact = multiplied(kernels, rows, stored).double(), rows.double() @ numbers.T
                limit = bound * rows.double().abs() @ largest(stored).T
                if is_quicker_in_fixed_point(name, dtype, instructions):
                    units = fixed.in_fixed_point(rows).units.double().repeat_interleave(32, 1)
                    limit += units / 2 @ numbers.abs().T
                rounding = (exact.abs() + limit).clamp(min=own.tiny) * own.eps / 2 if own.bits == 16 else 0
                assert ((found - exact).abs() <= rounding + limit).all(), (inputs, form)


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_mxfp4_are_powers_of_two(dtype: torch.dtype, instructions: str) -> None:
    """Of 2 and more, too: a product has the same bits with a greater scale and a row that is less by as much, in fixed
    point unless it is less than the least unit."""
    kernels, kind = built(instructions), ENCODINGS["MXFP4"]
    stored, x = made_up("MXFP4", 19, 9 * kind.numbers, seed=2), torch.randn(5, 9 * kind.numbers).to(dtype)
    wanted = multiplied(kernels, x, stored)
    for power in (-100, -1, 5, 8, 9, 10, *((60, 110) if dtype == torch.float32 else (40,))):
        blocks = stored.rows.view(-1, kind.nbytes).clone()
        blocks[:, 0] += power
        found = multiplied(kernels, x * 2.0**-power, StoredMatrix(blocks.view_as(stored.rows), kind))
        assert torch.equal(found, wanted), power


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.few(4)
def test_a_last_group_is_multiplied_without_a_second_one(instructions: str) -> None:
    kernels = built(instructions)
    for name in (name for name in NAMES if ENCODINGS[name].numbers == 32):
        for groups in (1, 3, 9):
            stored, x = made_up(name, 5, 32 * groups, seed=groups), torch.randn(3, 32 * groups)
            exact = x.double() @ stored.matrix(torch.float32).double().T
            torch.testing.assert_close(multiplied(kernels, x, stored).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.few(48)
def test_a_row_of_a_product_has_the_same_bits_beside_any_rows(
    name: str, dtype: torch.dtype, instructions: str, num_cases: Callable[[int], int]
) -> None:
    """On any number of threads, with rows that are infinite beside it, and nothing is read behind the blocks."""
    kernels, kind = built(instructions), ENCODINGS[name]
    inputs = 9 * kind.numbers
    stored, x = made_up(name, 21, inputs, seed=1), torch.randn(70, inputs).to(dtype)
    wanted = multiplied(kernels, x[:1], stored)
    generator = torch.Generator().manual_seed(0)
    with before_a_guard(stored.rows) as blocks:
        for count in (2, 3, 4, 7, 8, 13, 64, 70)[: num_cases(8)]:
            rows = torch.randn(count, inputs, generator=generator).to(dtype)
            rows[torch.rand(count, generator=generator) < 0.2] = float("inf")
            place = int(torch.randint(count, (), generator=generator))
            rows[place] = x[0]
            with threads(1 + count % 3):
                found = multiplied(kernels, rows, StoredMatrix(blocks, kind))
            assert torch.equal(found[place], wanted[0]), count


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", NAMES)
def test_special_values_of_rows_come_through(name: str, instructions: str) -> None:
    """What is no number leaves none, and only in its own row; zeros give zeros, least values among them."""
    kernels, stored = built(instructions), made_up(name, 17, 512, seed=0)
    x = torch.randn(4, 512)
    x[0], x[1, 100], x[2, 3] = 0, float("nan"), float("inf")
    for dtype in DTYPES:
        found = multiplied(kernels, x.to(dtype), stored)
        assert (found[0] == 0).all()
        assert found[1].isnan().all()
        assert not found[2].isfinite().any()
        assert found[3].isfinite().all()


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize(
    "kinds",
    [
        ("Q4_K", "Q4_K"),
        ("Q4_K", "Q6_K"),
        ("Q2_K", "Q5_K"),
        ("IQ2_XS", "NVFP4"),
        ("Q5_0", "INT4_F16/64"),
        ("Q8_0", "plain"),
        ("plain", "Q4_1"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_a_gate_may_be_stored_otherwise(kinds: Sequence[str], dtype: torch.dtype, instructions: str) -> None:
    """Also beside plain numbers."""
    kernels, x = built(instructions), torch.randn(19, 512).to(dtype)
    first, up = (
        torch.randn(24, 512).to(dtype) / 16 if kind == "plain" else made_up(kind, 24, 512, seed=seed)
        for seed, kind in enumerate(kinds)
    )
    products = [multiplied(kernels, x, weight) for weight in (first, up)]
    wanted = torch.nn.functional.silu(products[0]) * products[1]
    near = 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(multiplied(kernels, x, first, ending="gate", up=up), wanted, rtol=near, atol=1e-5)


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", ["Q4_K", "Q4_1", "INT8_BF16/64", "FP8_F32/128"])
def test_endings_follow_a_product_with_a_stored_matrix(name: str, instructions: str) -> None:
    """With a bias and a norm before it; rows may be strided."""
    kernels, stored = built(instructions), made_up(name, 40, 512, seed=0)
    x, bias = torch.randn(5, 512).bfloat16(), torch.randn(40).bfloat16()
    norm = NormWeights(Norm(eps=1e-5), torch.randn(512).bfloat16())
    normed = torch.nn.functional.rms_norm(x.float(), (512,), eps=1e-5) * norm.weight.float()
    wanted = normed.bfloat16().double() @ stored.matrix(torch.float32).double().T + bias.double()
    for ending, after in (("write", wanted), ("add", wanted + 1), ("activate", torch.nn.functional.silu(wanted))):
        out = torch.ones(5, 80, dtype=torch.bfloat16)[:, 40:]
        Steps(kernels, [Step(x, stored, bias, out, norm, ending)], room_to_widen(5, 512)).run(5)
        torch.testing.assert_close(out.double(), after, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_are_multiplied_by_torchs_operators(dtype: torch.dtype) -> None:
    """With numbers of the dtype."""
    first, second, bias = made_up("Q4_K", 32, 256, seed=0), made_up("Q8_0", 16, 256, seed=0), torch.randn(48).to(dtype)
    x = torch.randn(70, 256).to(dtype)
    found = Linear(Parts((first, second)), bias)(x)
    whole = torch.cat([first.matrix(dtype), second.matrix(dtype)])
    wanted = x.double() @ whole.double().T + bias.double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_kernels_numbers_are_not_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    stored, bias, x = made_up("Q4_K", 32, 256, seed=0), torch.randn(32).to(dtype), torch.randn(16, 256).to(dtype)
    numbers, own = stored.matrix(torch.float32).double(), torch.finfo(dtype)
    exact, most = x.double() @ numbers.T + bias.double(), x.double().abs() @ numbers.abs().T + bias.double().abs()
    found = NONE.multiply_stored(x, stored, bias)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= exact.abs() * own.eps / 2 + 1e-6 * most).all()


class Form(ctypes.Structure):
    """A row of the table of stored_forms.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("numbers", "nbytes", "codes_at", "codes_bits", "high_at", "high_bits")),
        *((name, ctypes.c_char_p) for name in ("code", "scale", "steps")),
        *((name, ctypes.c_int64) for name in ("scale_at", "group", "centre")),
        *((name, ctypes.c_double) for name in ("times", "plus")),
        ("leasts", ctypes.c_int64),
    ]


@pytest.mark.parametrize("instructions", on_this_machine())
def test_the_kernels_have_the_same_table(instructions: str) -> None:
    """Of this program's blocks it has no sizes."""
    row = built(instructions).library.form
    row.restype, row.argtypes = ctypes.POINTER(Form), [ctypes.c_int64]
    for number, kind in enumerate(KINDS, 1):
        own = next(each for each in ENCODINGS.values() if each.kind == kind)
        *sizes, group = (own.numbers, own.nbytes, own.group) if "/" not in own.name else (0, 0, 0)
        planes = own.codes.at, own.codes.bits, own.high.at, own.high.bits
        texts = [each.encode() for each in (kind, own.code, own.scale, own.steps)]
        small = (own.small.times, own.small.plus, own.least is not None) if own.small else (0, 0, 0)
        wanted = [texts[0], *sizes, *planes, *texts[1:], own.scale_at, group, own.centre, *small]
        assert [getattr(row(number).contents, name) for name, _ in Form._fields_] == wanted
    assert not row(len(KINDS) + 1)


def test_encodings_have_names() -> None:
    assert ENCODINGS["Q4_K"].bits == 4.5
    assert ENCODINGS["INT4_F16/128"].nbytes == 68
    assert ENCODINGS["FP8_F32/32"].row_bytes(64) == 72
    assert not ENCODINGS.keys() & {"", "F16", "INT4_F16", "INT4_F16/48", "Q4_K/32", "INT3_F16/32"}


@pytest.mark.deep
@pytest.mark.parametrize("name", on_this_machine())
def test_more_than_2_to_the_31_numbers_are_decoded(name: str) -> None:
    """In 7 GB of memory, of which everything is marked first: elsewhere the rest kept old memory (CVE-2026-53923)."""
    outputs, inputs, mark = (1 << 15) + 3, 1 << 16, 0x7FC1
    last = made_up("Q8_0", 4, inputs, 1)
    rows = torch.zeros(outputs, last.rows.shape[1], dtype=torch.uint8)
    rows[-4:] = last.rows
    out = torch.empty(outputs, inputs, dtype=torch.bfloat16)
    out.view(torch.int16).fill_(mark)
    decode(StoredMatrix(rows, last.encoding), out, built(name))
    assert torch.equal(out[-4:], last.matrix(torch.bfloat16))
    assert not any(bool((part.view(torch.int16) == mark).any()) for part in out.split(1 << 10))
