"""A GPU's numbers of matrices as quantised checkpoints store them, and products with these, in Triton's interpreter, on
a CPU: run as gpu_interpreted.py is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from kit.interpreter import products_by_row, rounds_to_bf16, without_idle_work
from kit.processor import before_a_guard
from kit.stored import GGUF, NAMES, made_up, places
from offload.bench.kernel_checks import kernel_checks
from offload.formats.encodings import ENCODINGS, Field
from offload.formats.stored import StoredMatrix
from offload.formats.stored_gpu import blocks_at_once, decode, decode_blocks
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.kernels.gpu.stored_products import ROWS, product, split_blocks
from offload.speed.hardware import probe

DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # against fp64 with the same numbers: rounded once
# Of which there is a small case by default.
FEW = ["Q4_K", "Q6_K", "MXFP4", "IQ4_NL", "INT4_BF16/32", "FP8_F32/128", "Q2_K", "IQ3_XXS", "IQ1_M", "NVFP4_INV"]
GRIDS = [name for name in NAMES if ENCODINGS[name].grid]
GUARDED = ["MXFP4", "IQ3_XXS", "IQ2_XXS", "Q3_K", "NVFP4"]  # and of the same forms, with other last bytes, others
GUARDED += [name for name in GGUF if name not in GUARDED]
SPECIAL = (0.0, -0.0, 6e-8, 65504.0, torch.inf, torch.nan, -0.5)  # 6e-8 is less than any normal fp16

without_idle_work()


@pytest.fixture(autouse=True)
def _as_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    rounds_to_bf16(monkeypatch)


def inputs_of(name: str, steps: int) -> int:
    """So many that a program needs that many steps, the last of which is no whole one where it can be less. An odd
    number of blocks, where there are several at a time: rows of them are no whole words."""
    own = ENCODINGS[name]
    at_once = own.tiling.blocks(own)
    return (steps * at_once - (at_once > 1)) * own.numbers


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    """But for those of numbers that are none."""
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(bits(found.nan_to_num(7.0)), bits(wanted.nan_to_num(7.0)))


def put(blocks: Tensor, field: Field, values: Tensor) -> None:
    """Put values [blocks, items] into a field of blocks [blocks, bytes]."""
    of_blocks, item = np.unpackbits(blocks.numpy(), axis=1, bitorder="little"), np.arange(values.shape[1])
    for bit in range(field.bits):
        at = field.at + item // field.many * field.outer + item % field.many * field.inner + bit
        of_blocks[:, at] = values.numpy() >> bit & 1
    blocks.copy_(torch.from_numpy(np.packbits(of_blocks, axis=1, bitorder="little")))


def in_fp64(x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
    wanted = x.double() @ stored.matrix(x.dtype).double().T
    return wanted if bias is None else wanted + bias.double()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_torchs_operators(name: str, pytestconfig: pytest.Config) -> None:
    """Bit for bit; and nothing is written behind them. Blocks are no multiple of a program's."""
    deep = pytestconfig.getoption("deep")
    stored = made_up(name, 37, 3 * ENCODINGS[name].numbers, seed=1)
    for dtype in (*DTYPES, torch.float32) if deep else (torch.bfloat16,):
        room = torch.full((38 * stored.shape[1],), torch.nan, dtype=dtype)
        out = room[: -stored.shape[1]].view(stored.shape)
        decode(stored, out)
        assert torch.equal(bits(out), bits(stored.matrix(dtype)))
        assert room[-stored.shape[1] :].isnan().all()


@pytest.mark.parametrize("name", ["Q4_K", "FP8_F32/32"])
def test_numbers_near_zero_and_none_are_those_of_torchs_operators(name: str) -> None:
    """Scales below the least normal number; in floats of 8 bits, what is none."""
    stored = made_up(name, 5, 256, seed=2)
    kind = torch.float16 if name == "Q4_K" else torch.float32
    blocks = stored.rows.view(-1, stored.encoding.nbytes)
    blocks[:, : kind.itemsize] = torch.full((len(blocks), 1), 3e-7 if name == "Q4_K" else 1e-39, dtype=kind).view(
        torch.uint8
    )
    blocks[::2, 20] = 0x7F
    out = torch.zeros(stored.shape)
    decode(stored, out)
    wanted = stored.matrix(torch.float32)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert bool(wanted.isnan().any()) == (name != "Q4_K")
    assert torch.equal(bits(out.nan_to_num(7.0)), bits(wanted.nan_to_num(7.0)))


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of numpy's, which multiplies here
def test_special_scales_of_ggufs_blocks_are_torchs() -> None:
    """0 and -0, what is subnormal, infinite and none, and negative; also of the least values."""
    for name in GGUF:
        own = ENCODINGS[name]
        if own.scale not in ("F16", "F16/4"):
            continue
        stored = made_up(name, len(SPECIAL) ** 2, own.numbers, seed=21)
        scales = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL)).half()
        if own.scale == "F16":
            for place, at in enumerate(places(own)):
                stored.rows[:, at : at + 2] = scales[:, place, None].view(torch.uint8)
        else:
            put(stored.rows, Field(8 * own.scale_at + 12, 4, 16), parts_of(scales[:, 0]))
        out = torch.empty(stored.shape)
        decode(stored, out)
        assert_same_bits(out, stored.matrix(torch.float32))


def parts_of(scales: Tensor) -> Tensor:
    """Four bits each of fp16 numbers, [n, 4]."""
    return scales.view(torch.int16)[:, None].int() >> torch.arange(0, 16, 4) & 15


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("name", ["NVFP4", "NVFP4_INV"])
def test_every_scale_of_nvfp4_and_any_scale_of_a_row_are_torchs(name: str) -> None:
    """Each row has another one, so does the next one: one of a neighbour would show."""
    stored = made_up(name, 11, 64 * 64, seed=22)
    blocks = stored.rows[:, :-4].view(11, 64, 36)
    blocks[..., :4] = torch.arange(256, dtype=torch.uint8).view(64, 4)
    tails = torch.tensor([*SPECIAL, 1e-39, 3e38, -1 / 3, 1 / 2688])
    stored.rows[:, -4:] = tails[:, None].view(torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(stored.shape, dtype=dtype)
        decode(stored, out)
        assert_same_bits(out, stored.matrix(dtype))


@pytest.mark.parametrize("name", GRIDS)
def test_every_entry_of_a_grid_and_all_signs_are_torchs(name: str) -> None:
    own = ENCODINGS[name]
    assert own.grid is not None
    low, high, signs = own.grid.low, own.grid.high, own.grid.signs
    index, sign = own.numbers // own.grid.each, own.numbers // 8  # of a block
    stored = made_up(name, (1 << low.bits + high.bits) // index, own.numbers, seed=23)
    which = torch.arange(stored.rows.shape[0] * index).view(-1, index)
    put(stored.rows, low, which)
    put(stored.rows, high, which >> low.bits)
    put(stored.rows, signs, torch.arange(len(which) * sign).view(-1, sign))
    assert len(which) * sign >= 1 << signs.bits
    out, wanted = torch.empty(stored.shape), stored.matrix(torch.float32)
    decode(stored, out)
    assert torch.equal(bits(out), bits(wanted))
    codes = wanted.view(-1, 8).abs() if signs.bits > 1 else wanted.view(-1, 8)
    assert len(codes.div(codes.abs().amin(1, keepdim=True)).unique(dim=0)) > 64  # they differ


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of numpy's, which multiplies here
def test_every_scale_and_number_of_mxfp4_is_torchs() -> None:
    """Bit for bit: what is subnormal, infinite and -0, too, at every place of a block within a word."""
    stored = made_up("MXFP4", 256, 5 * 32, seed=12)
    blocks = stored.rows.view(256, 5, 17)
    blocks[..., 0] = torch.arange(256)[:, None]
    blocks[..., 1:] = torch.randint(256, (256, 5, 16), generator=torch.Generator().manual_seed(13))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.zeros(stored.shape, dtype=dtype)
        decode(stored, out)
        assert torch.equal(bits(out), bits(stored.matrix(dtype)))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", GUARDED)
def test_no_word_behind_the_blocks_is_read(name: str) -> None:
    """Of blocks whose words lie across those of the memory: a number has its bits in two of these. The other rows begin
    inside a word where blocks are of an odd number of halves."""
    own = ENCODINGS[name]
    stored, x = made_up(name, 12, 3 * own.numbers, seed=15), normal(3, 3 * own.numbers, seed=16).half()
    with before_a_guard(stored.rows) as rows:
        guarded, out = StoredMatrix(rows, own), torch.empty(stored.shape)
        assert guarded.aligned() is guarded
        decode(guarded, out)
        assert torch.equal(out, stored.matrix(torch.float32))
        assert torch.equal(product(x, guarded, None), product(x, stored, None))


@pytest.mark.few(len(FEW))
@pytest.mark.parametrize("name", [*FEW, *(name for name in NAMES if name not in FEW)])
def test_rows_of_one_number_find_every_weight(name: str) -> None:
    """At its place: the matrix itself comes out, here some of its columns."""
    stored = made_up(name, 17, inputs_of(name, 3), seed=3)
    where = torch.arange(0, stored.shape[1], stored.shape[1] // 16 + 1)
    for dtype in DTYPES:
        x = torch.nn.functional.one_hot(where, stored.shape[1]).to(dtype)
        assert torch.equal(product(x, stored, None), stored.matrix(dtype)[:, where].T + 0.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "steps"), [(70, 3), (16, 5)])
def test_products_are_those_of_fp64(name: str, dtype: torch.dtype, outputs: int, steps: int) -> None:
    """Outputs are no multiple of a program's, blocks none of a split's or of those at a time."""
    stored = made_up(name, outputs, inputs_of(name, steps), seed=4)
    bias = normal(outputs, seed=5).to(dtype)
    for num_rows, added in ((1, None), (3, bias), (ROWS[0] + 1, bias)):
        x = normal(num_rows, stored.shape[1], seed=num_rows).to(dtype)
        wanted = in_fp64(x, stored, added)
        out = product(x, stored, added)
        assert out.dtype == dtype
        assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*FEW, *(name for name in NAMES if name not in FEW)])
def test_a_rows_bits_are_those_of_the_row_alone(name: str, pytestconfig: pytest.Config) -> None:
    """Among 1 to 19 rows, wherever it is among them, over several splits; one of these is NaN."""
    stored, most = made_up(name, 8, 768, seed=6), ROWS[0] + 3
    assert split_blocks(*stored.shape, stored.encoding) < 768 // stored.encoding.numbers
    x = normal(most, 768, seed=7).half()
    x[5] = torch.nan
    alone = {place: product(x[place : place + 1], stored, None) for place in (0, 4, 5, 6, 15, 16, 18)}
    assert {place for place, row in alone.items() if row.isnan().any()} == {5}
    step = 1 if pytestconfig.getoption("deep") else 2
    for first, count in ((0, most), (4, 3), (3, ROWS[0]), (2, ROWS[0] + 1))[::step]:
        out = product(x[first : first + count], stored, None)
        for place in alone.keys() & range(first, first + count):
            assert torch.equal(bits(out[place - first]), bits(alone[place][0])), (place, first, count)


def test_rows_may_lie_apart() -> None:
    stored, x = made_up("Q8_0", 32, 96, seed=8), normal(5, 256, seed=9).half()
    assert torch.equal(product(x[::2, 64:160], stored, None), product(x[::2, 64:160].contiguous(), stored, None))


def test_a_matrix_that_begins_inside_a_word_is_copied() -> None:
    whole = made_up("MXFP4", 9, 96, seed=14)
    for first in range(4):
        part = whole[first:]
        assert (part.aligned() is part) == (first == 0)
        assert torch.equal(part.aligned().rows, part.rows)
        assert part.aligned().rows.data_ptr() % 4 == 0


def test_many_rows_and_other_dtypes_meet_the_numbers() -> None:
    stored, kernels = made_up("Q4_0", 16, 64, seed=10), GPU_KERNELS
    for x in (normal(65, 64, seed=11).half(), normal(3, 64, seed=12)):
        assert torch.equal(
            kernels.multiply_stored(x, stored, None), torch.nn.functional.linear(x, stored.matrix(x.dtype))
        )
    with pytest.raises(ValueError, match="float32; a GPU multiplies stored matrices with bf16 and fp16"):
        product(normal(3, 64, seed=12), stored, None)


def test_splits_are_alike_and_make_programs_enough() -> None:
    """Of the products of models of 7B and 32B."""
    shapes = ((4096, 4096), (22016, 4096), (4096, 11008), (5120, 5120), (5120, 27648), (55296, 5120))
    for name in ("Q4_K", "Q6_K", "Q8_0", "INT4_F16/128", "FP8_BF16/128", "IQ2_S", "NVFP4"):
        own = ENCODINGS[name]
        for outputs, inputs in shapes:
            each, num_blocks = split_blocks(outputs, inputs, own), inputs // own.numbers
            starts = [*range(0, num_blocks, each), num_blocks]
            counts = [stop - start for start, stop in pairwise(starts)]
            assert each % own.tiling.blocks(own) == 0
            assert each * len(counts) <= 1.25 * num_blocks
            assert 250 <= len(counts) * -(-outputs // own.tiling.outputs) <= 1100, (name, outputs, inputs)
    assert split_blocks(16, 256, ENCODINGS["Q4_K"]) == 1


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_doctors_small_kernels_hold(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.bench.kernel_checks.fitting", lambda *given: GPU_KERNELS)
    found = {name: check() for name, check, _ in kernel_checks(probe("cpu"), [dtype], "")}
    assert len(found) == 4
    assert all(passed for passed, _ in found.values()), found


def moved(call: Callable[..., None], first: int) -> Callable[..., None]:
    """The interpreter's call about a program of the grid, as if there were `first` programs before it."""
    return lambda builder, x, y, z: call(builder, first + x, y, z)


@pytest.mark.parametrize("name", ["Q8_0", "MXFP4", "NVFP4"])
def test_numbers_beyond_2_to_the_31_have_their_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last program alone, in memory of which only its own pages exist: elsewhere kernels counted in 32 bits
    (CVE-2026-53923)."""
    own, inputs = ENCODINGS[name], 1 << 16
    outputs, at_once = (1 << 15) + 2, blocks_at_once(own)
    last = made_up(name, 1, inputs, seed=17)
    rows = torch.empty(outputs, last.rows.shape[1], dtype=torch.uint8)
    out = torch.empty(outputs, inputs, dtype=torch.float16)
    rows[-1:], out[-1] = last.rows, torch.nan
    row_blocks = inputs // own.numbers
    num_blocks = outputs * row_blocks
    programs = inputs // own.numbers // at_once  # of the last row
    first = num_blocks // at_once - programs
    for each in ("set_grid_idx", "set_grid_dim"):
        monkeypatch.setattr(InterpreterBuilder, each, moved(getattr(InterpreterBuilder, each), first))
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda self, *args: None)  # it would touch all memory
    decode_blocks[(programs,)](rows, rows, out, num_blocks, row_blocks, BLOCKS=at_once, FORM=own)
    assert torch.equal(out[-1], last.matrix(torch.float16)[0])
