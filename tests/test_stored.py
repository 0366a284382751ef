"""Matrices as quantised checkpoints store them: their numbers beside llama.cpp's own package, bit for bit, and products
with them beside products with these numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from offload.formats.layout import GGUF_BLOCKS, GROUP_HEAD, Encoding, encoding, is_encoding
from offload.formats.stored import StoredMatrix, decode
from offload.kernels.products import Ending, Step, Steps, room_to_widen
from offload.weights.linear import Linear, Parts
from processor import before_a_guard, built, on_this_machine, threads
from stored import NAMES, made_up

OURS = [name for name in NAMES if name not in GGUF_BLOCKS]
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


@pytest.mark.parametrize("name", GGUF_BLOCKS)
def test_numbers_are_those_of_llama_cpps_package(name: str, num_cases: Callable[[int], int]) -> None:
    blocks = random_blocks(encoding(name), num_cases(100_000))
    with np.errstate(all="ignore"):
        wanted = quants.dequantize(blocks.numpy(), GGMLQuantizationType[name])
    assert same(StoredMatrix(blocks, encoding(name)).matrix(torch.float32), torch.from_numpy(wanted))


@pytest.mark.parametrize("name", OURS)
def test_numbers_of_our_blocks_are_codes_times_scales(name: str) -> None:
    """By the definition, number by number."""
    kind = encoding(name)
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
    kernels, kind = built(instructions), encoding(name)
    blocks = random_blocks(kind, 37 * 8)
    wanted = StoredMatrix(blocks.view(37, -1), kind)
    with before_a_guard(wanted.rows) as rows:
        for dtype in DTYPES:
            for number in (1, 3):
                out = torch.empty(wanted.shape, dtype=dtype)
                with threads(number):
                    decode(StoredMatrix(rows, kind), out, kernels)
                assert same(out, wanted.matrix(dtype)), dtype


@pytest.mark.parametrize("instructions", on_this_machine())
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "Q5_0", "INT4_BF16/64", "FP8_F32/128"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_have_the_bits_of_those_with_the_numbers(name: str, dtype: torch.dtype, instructions: str) -> None:
    kernels, stored = built(instructions), made_up(name, 2 * 40, 512, seed=0)
    plain = stored.matrix(dtype)
    endings: tuple[Ending, ...] = ("write", "add", "gate", "activate")
    bias = torch.randn(80).to(dtype)
    for rows in (1, 5, 33):
        x = (torch.randn(rows, 512) / 16).to(dtype)
        for ending in endings:
            outputs = 40 if ending == "gate" else 80
            outs = []
            for weight in (stored, plain):
                out = torch.ones(rows, outputs, dtype=dtype)
                Steps(kernels, [Step(x, weight, bias, out, ending=ending)], room_to_widen(rows, 512)).run(rows)
                outs.append(out)
            assert outs[0].isfinite().all()
            assert torch.equal(*outs), (rows, ending)


@pytest.mark.parametrize("instructions", on_this_machine())
def test_halves_of_a_gate_may_be_stored_otherwise(instructions: str) -> None:
    kernels, x = built(instructions), torch.randn(3, 256).bfloat16()
    first, up = made_up("Q4_K", 24, 256, seed=0), made_up("Q6_K", 24, 256, seed=1)
    outs = []
    for halves in ((first, up), (first.matrix(torch.bfloat16), up.matrix(torch.bfloat16))):
        out = torch.empty(3, 24, dtype=torch.bfloat16)
        Steps(kernels, [Step(x, halves[0], None, out, ending="gate", up=halves[1])], room_to_widen(3, 256)).run(3)
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_are_multiplied_by_torchs_operators(dtype: torch.dtype) -> None:
    first, second, bias = made_up("Q4_K", 32, 256, seed=0), made_up("Q8_0", 16, 256, seed=0), torch.randn(48).to(dtype)
    x = torch.randn(70, 256).to(dtype)
    found = Linear(Parts((first, second)), bias)(x)
    whole = torch.cat([first.matrix(dtype), second.matrix(dtype)])
    wanted = x.double() @ whole.double().T + bias.double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-2)


def test_encodings_have_names() -> None:
    assert encoding("Q4_K").bits == 4.5
    assert encoding("INT4_F16/128").nbytes == 68
    assert encoding("FP8_F32/32").row_bytes(64) == 72
    assert not any(map(is_encoding, ["", "F16", "INT4_F16", "INT4_F16/48", "Q4_K/32", "INT3_F16/32"]))
