"""A GPU's products with weights in 4 and 6 bits in Triton's interpreter, on a CPU: run as gpu_interpreted.py is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kit.interpreter import without_idle_work
from kit.oracles import split_off_with_torch
from offload.formats.quantised import GROUP, TILE, Codes, encode_with_torch
from offload.formats.residuals_gpu import restore
from offload.kernels.gpu.quantised_products import GROUPS, ROWS, TILES, product, split_groups

DTYPES = [torch.bfloat16, torch.float16]
# Against fp64 with the same rounded weights. The interpreter cuts bf16 off where a GPU rounds.
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = [(144, 11 * 64), (48, 192), (16, 27 * 64), (16, 64)]  # of 2, 1, 4 and 1 splits

without_idle_work()


@pytest.fixture(params=[4, 6])
def bits(request: pytest.FixtureRequest) -> int:
    return request.param


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made_up(outputs: int, inputs: int, bits: int, seed: int) -> Codes:
    """Any codes; steps are powers of two and lows a few of them, so that numbers are exact in either dtype."""
    generator = torch.Generator().manual_seed(seed)
    shape = Codes.shape_of_blocks((outputs, inputs), bits)
    codes = Codes(torch.randint(256, shape, generator=generator, dtype=torch.uint8))
    steps = 2.0 ** torch.randint(-4, 2, (*shape[:2], TILE), generator=generator)
    scales = torch.stack([steps, steps * torch.randint(-12, 1, steps.shape, generator=generator)], -1)
    codes.blocks[..., : 4 * TILE] = scales.bfloat16().flatten(2).view(torch.uint8)
    return codes


def in_fp64(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    wanted = x.double() @ codes.matrix(x.dtype).double().T
    return wanted if bias is None else wanted + bias.double()


@pytest.fixture(autouse=True)
def _memory_is_written_before_it_is_read_and_no_further(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    empty, behind = torch.empty, list[Tensor]()

    def watched(*size: int, **more: Any) -> Tensor:
        number = prod(size)
        room = empty(number + 64, **more).fill_(torch.nan)
        behind.append(room[number:].fill_(7.0))
        return room[:number].view(size)

    monkeypatch.setattr(torch, "empty", watched)
    yield
    assert all(bool((rest == 7.0).all()) for rest in behind)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_number_find_every_weight(bits: int, dtype: torch.dtype) -> None:
    """At its place, with the step and the least number of its group: the matrix itself comes out."""
    codes = made_up(48, 3 * GROUP, bits, seed=1)
    out = product(torch.eye(3 * GROUP, dtype=dtype), codes, None)
    assert torch.equal(out, codes.matrix(dtype).T)


@pytest.mark.deep
def test_weights_are_rounded_as_those_of_the_matrix(bits: int) -> None:
    """Encoded ones, which are no few bits long."""
    codes = Codes(torch.zeros(Codes.shape_of_blocks((37, 2 * GROUP), bits), dtype=torch.uint8))
    encode_with_torch(normal(37, 2 * GROUP, seed=2), codes)
    out = product(torch.eye(2 * GROUP, dtype=torch.float16), codes, None)
    assert torch.equal(out, codes.matrix(torch.float16).T)
    assert not torch.equal(out.float(), codes.matrix(torch.float32).T)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_fp64(
    bits: int, outputs: int, inputs: int, dtype: torch.dtype, pytestconfig: pytest.Config
) -> None:
    """Outputs are no multiple of a program's, groups none of a split's or of those at a time."""
    codes = made_up(outputs, inputs, bits, seed=3)
    bias = normal(outputs, seed=4).to(dtype)
    step = 1 if pytestconfig.getoption("deep") else 3
    for num_rows, added in ((1, None), (3, bias), (ROWS, None), (ROWS + 1, bias))[::step]:
        x = normal(num_rows, inputs, seed=num_rows).to(dtype)
        wanted = in_fp64(x, codes, added)
        out = product(x, codes, added)
        assert out.dtype == dtype
        assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.deep
def test_rows_may_lie_apart(bits: int) -> None:
    codes, x = made_up(32, 128, bits, seed=5), normal(5, 256, seed=6).half()
    assert torch.equal(product(x[::2, 64:192], codes, None), product(x[::2, 64:192].contiguous(), codes, None))


@pytest.mark.deep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_are_those_of_the_row_alone(bits: int, dtype: torch.dtype) -> None:
    """Among 1 to 24 rows, wherever it is among them, over two splits; one of these is NaN."""
    most, inputs = ROWS + 8, 11 * GROUP
    codes, x = made_up(32, inputs, bits, seed=7), normal(most, inputs, seed=8).to(dtype)
    x[5] = torch.nan
    alone = torch.cat([product(row[None], codes, None) for row in x])
    assert alone[5].isnan().all()
    for first, count in ((0, most), (4, 3), (5, ROWS + 1), (ROWS + 1, 7)):
        out = product(x[first : first + count], codes, None)
        assert torch.equal(out.view(torch.int16), alone[first : first + count].view(torch.int16))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32; a GPU multiplies quantised weights with bf16 and fp16"):
        product(torch.ones(1, 64), made_up(16, 64, 4, seed=9), None)


def test_splits_are_alike_and_make_programs_enough() -> None:
    """Of the products of models of 7B and 13B."""
    shapes = ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096))
    for outputs, inputs in (*shapes, (15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824), (32000, 5120)):
        each, num_groups = split_groups(outputs, inputs), inputs // GROUP
        starts = [*range(0, num_groups, each), num_groups]
        counts = [stop - start for start, stop in pairwise(starts)]
        assert each % GROUPS == 0
        assert each * len(counts) <= 1.2 * num_groups
        assert 250 <= len(counts) * -(-outputs // (TILES * TILE)) <= 800
    assert split_groups(16, 64) == GROUPS


# Weights from their codes and what they have beside these.


def escaping(*size: int, share: float, seed: int) -> Tensor:
    """Of a normal distribution, a share of them any smaller number."""
    small = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    small = small[small.abs() < 1.0]
    generator = torch.Generator().manual_seed(seed)
    some = small[torch.randint(len(small), size, generator=generator)]
    return torch.where(torch.rand(size, generator=generator) < share, some, normal(*size, seed=seed).bfloat16())


@pytest.mark.few(2)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 192), (32, 5 * 64), (16, 64)])
@pytest.mark.parametrize("share", [0.4, 0.02, 0.0])
def test_weights_come_back_from_their_codes_and_their_residuals(
    bits: int, outputs: int, inputs: int, share: float
) -> None:
    weight = escaping(outputs, inputs, share=share, seed=outputs + inputs)
    weight[3] = weight[3, 0]
    weight[5, :7] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-20, -1e-20, 3.0])
    weight[6] = weight[6] + 50
    codes = Codes(torch.zeros(Codes.shape_of_blocks(weight.shape, bits), dtype=torch.uint8))
    encode_with_torch(weight, codes)
    split = split_off_with_torch(weight, codes)
    assert split is not None
    out = torch.full_like(weight, torch.nan)
    restore(split.content, split.escapes, codes, out)
    assert torch.equal(out.view(torch.int16), weight.view(torch.int16))
