"""A GPU's products of stored experts in fixed point in Triton's interpreter, on a CPU, beside their definition, bit for
bit: run as gpu_interpreted.py is."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import test_experts
from experts_interpreted import InBatches
from kit import fixed
from kit.fixed_products import FIXED, defined, has_the_defined_bits, matrix, normal, product, rows_of, same
from kit.interpreter import products_by_row, rounds_products_once, rounds_to_bf16, runs_assembly, without_idle_work
from kit.processor import before_a_guard, best
from kit.stored import places
from offload.bench.fixed_checks import fixed_checks
from offload.config.networks import Activation, Experts, FeedForward
from offload.formats import fixed_gpu
from offload.formats.encodings import ENCODINGS
from offload.formats.fixed_gpu import sums_of
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import ExpertWeights, Matrix
from offload.kernels.gpu import experts as by_triton
from offload.kernels.gpu import fixed_programs, fixed_rows
from offload.kernels.gpu.activation import gated
from offload.kernels.gpu.experts import choose, run_experts, score
from offload.kernels.gpu.fixed_rows import FixedRows, Pairs
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.speed.hardware import probe
from test_experts import Scene, scene

DTYPES = [torch.bfloat16, torch.float16]
FEW = ["MXFP4", "Q4_K", "Q6_K"]  # of which there is a small case by default
KINDS = [*FEW, *(name for name in FIXED if name not in FEW)]
SPECIAL = (0.0, -0.0, 6e-8, 65504.0, torch.inf, torch.nan, -0.5)
NETWORKS = {
    "gate": FeedForward(64, bias=True),
    "clamped gate": FeedForward(64, "clamped_silu", bias=True),
    "gelu": FeedForward(64, "gelu_tanh"),
    "no gate": FeedForward(64, "relu_squared", gated=False, bias=True),
}

without_idle_work()


@pytest.fixture(autouse=True)
def _as_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    rounds_to_bf16(monkeypatch)
    rounds_products_once(monkeypatch)
    runs_assembly(monkeypatch)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of numpy's
@pytest.mark.few(2 * len(FEW))
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_have_the_bits_of_their_definition(dtype: torch.dtype, name: str) -> None:
    assert has_the_defined_bits(name, dtype, torch.get_default_device())


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_special_scales_have_the_bits_of_their_definition(name: str) -> None:
    """0, what is subnormal, infinite and none, of either sign; any bytes where scales are no fp16."""
    own, stored = ENCODINGS[name], matrix(name, blocks=1, outputs=len(SPECIAL) ** 2)
    stored = stored if own.numbers >= 64 else matrix(name, blocks=3, outputs=len(SPECIAL) ** 2)
    rows = stored.rows[:, : len(stored.rows[0]) - own.tail]
    if own.scale == "F16":
        scales = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL)).half()
        for number, at in enumerate(places(own)):
            rows[:, at : at + 2] = scales[:, number, None].view(torch.uint8)
    else:
        every = torch.randint(256, rows.shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
        rows.copy_(every.to(rows.device))
    x = rows_of(stored.shape[1]).bfloat16()
    assert same(product(x, stored), defined(x, stored))


@pytest.mark.parametrize("name", ["Q8_0", "MXFP4", "NVFP4", "Q4_K", "Q2_K"])
def test_rows_are_integers_times_units(name: str) -> None:
    """In the order of codes; with the sums that least values are multiplied by."""
    own = ENCODINGS[name]
    for dtype in DTYPES:
        x = torch.cat([rows_of(768), rows_of(768).ldexp(torch.tensor(60)), rows_of(768).ldexp(torch.tensor(-130))])
        x = x.to(dtype)
        found = FixedRows.of(x, own)
        with torch.device("cpu"):
            wanted = fixed.in_fixed_point(x.cpu())
        values = found.planes[0].cpu().int() * 256 + found.planes[1].cpu().int()
        values = values.view(-1, 32)[:, order(own.name).argsort()].view_as(values)
        assert torch.equal(values.long(), wanted.values.flatten(1))
        assert same(found.units, wanted.units)
        if size := sums_of(own):
            sums = wanted.parts(size).sum(2).float() * wanted.units_of(size)
            assert same(found.sums, sums)


def order(name: str) -> Tensor:
    """The inputs of a group in the order of codes: those of a word's lower two bytes, each byte's lower half first,
    then those of the upper two, within a run of bytes."""
    with torch.device("cpu"):
        if name not in ("MXFP4", "NVFP4"):
            return torch.arange(32)
        run = ENCODINGS[name].codes.run
        of_byte = torch.arange(32).view(-1, 2, run // 4, 2, 2)  # runs, parts, words, halves, bytes
        return of_byte.permute(0, 3, 2, 4, 1).flatten()


def test_rows_of_other_batches_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = ENCODINGS["Q4_K"], normal(4, 256, seed=5).half()
    pairs = Pairs(torch.tensor([2, 0, 3, 1], dtype=torch.int32), torch.tensor([-1, 5, 0], dtype=torch.int32))
    monkeypatch.setattr(fixed_rows.torch, "empty", lambda *size, **more: torch.full(size, 99, **more))
    found, whole = FixedRows.of(x, own, pairs), FixedRows.of(x, own)
    for some, every in ((found.planes[0], whole.planes[0]), (found.units, whole.units), (found.sums, whole.sums)):
        assert torch.equal(some[[0, 3]], every[[0, 3]])
        assert (some[[1, 2]] == 99).all()  # of an expert that is not there, and of padding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_have_the_bits_of_their_definition(activation: Activation, dtype: torch.dtype) -> None:
    special = torch.tensor([*SPECIAL, *(-number for number in SPECIAL)])
    gate = torch.cat([normal(4000, seed=6) * 4, normal(2000, seed=7) * 60, special])
    gate = torch.cat([gate, torch.linspace(-95, -80, 500), torch.linspace(6.9, 7.1, 40)]).to(dtype)
    up = (normal(len(gate), seed=8) * 4).to(dtype)
    found = gated(torch.cat([gate, up])[None], activation)[0]
    with torch.device("cpu"):
        active = fixed.activated(gate.cpu(), activation)
        wanted = (active.float() * fixed._opening(up.cpu(), activation).float()).to(dtype)
    assert same(found, wanted)


def on_the_cpu(weights: ExpertWeights) -> ExpertWeights:
    def moved(part: Matrix | None) -> Any:
        return StoredMatrix(part.rows.cpu(), part.encoding) if isinstance(part, StoredMatrix) else part

    biases = (None if each is None else each.cpu() for each in (weights.gate_up_bias, weights.down_bias))
    return ExpertWeights(moved(weights.gate), moved(weights.up), moved(weights.down), *biases)


def through_experts(given: Scene, out: Tensor) -> bool:
    """Whether each row's output, of its one expert, is by the definition."""
    normed, scored = given.mixture.normed(given.rows)
    chosen, _ = choose(given.experts, given.router, score(given.experts, given.router, scored))
    with torch.device("cpu"):
        wanted = [
            fixed.through(given.experts.network, on_the_cpu(given.homes.bank.places[expert]), row[None].cpu())
            for expert, row in zip(chosen[:, 0].tolist(), normed, strict=True)
        ]
    return same(out + 0.0, torch.cat(wanted) + 0.0)  # -0 becomes 0


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("encodings", [("MXFP4",) * 3, ("Q4_0", "Q5_1", "Q8_0"), ("IQ4_NL", "IQ4_NL", "Q4_1")], ids=str)
def test_experts_have_the_bits_of_their_definition(
    encodings: tuple[str, ...], network: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up in one encoding or in two; in one batch or several; and among other rows."""
    monkeypatch.setattr(test_experts, "HIDDEN", 96)
    own = NETWORKS[network]
    given = scene(Experts(own, 2, 1), dtype, 9, *(encodings if own.gated else encodings[1:]))
    out = given.by(run_experts)
    assert through_experts(given, out)
    assert torch.equal(replace(given, homes=InBatches(given.homes, 1)).by(run_experts), out)  # type: ignore[arg-type]
    assert torch.equal(given.by(run_experts, given.rows[4:6]), out[4:6])
    assert torch.equal(given.by(run_experts, given.rows.repeat(2, 1))[9:], out)  # in larger tiles
    real = torch.arange(9, device=out.device) % 3 != 1
    assert torch.equal(given.by(run_experts, real=real)[real], out[real])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_nothing_behind_a_matrix_is_read(name: str) -> None:
    stored = matrix(name, outputs=8)
    x = normal(2, stored.shape[1], seed=9).half()
    with before_a_guard(stored.rows) as rows:
        assert torch.equal(product(x, StoredMatrix(rows, stored.encoding)), product(x, stored))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_doctor_finds_the_cpus_bits_and_others(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.bench.fixed_checks.fitting", lambda *given: GPU_KERNELS)
    best()
    ((name, check, _),) = fixed_checks(probe("cpu"), [dtype, "fp32"], "")
    assert name == f"products, experts in fixed point, {dtype}"
    assert check() == (True, "61,952 of 61,952 numbers have the CPU's bits")
    monkeypatch.setattr("offload.bench.fixed_checks.STORED", ("Q4_K", "MXFP4"))
    shares = fixed_rows.FixedRows.of

    def without_sums(*given: Any) -> FixedRows:
        made = shares(*given)
        return replace(made, sums=made.sums * 2)

    monkeypatch.setattr(fixed_rows.FixedRows, "of", without_sums)
    passed, shown = check()
    assert not passed
    assert shown.endswith("not in Q4_K")


FAULTS = {
    "planes are swapped": ("_sum_groups", "inputs + begun * 32 + second, mask", "inputs + begun * 32, mask"),
    "the upper plane counts less": ("_sum_groups", "* 256 +", "* 255 +"),
    "a carry is lost": ("fix_rows", "number + 128 >> 8", "number >> 8"),
    "a unit is too large": ("fix_rows", "0x101FF", "0x7FFFFF"),
    "a unit is too small": ("fix_rows", "0x101FF", "0xFFFF"),
    "rounding toward zero": ("fix_rows", "(scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000",
                             "scaled.to(tl.int32)"),
    "a unit of zeros": ("fix_rows", "- 14, 63)", "- 14, 64)"),
    "what is infinite has a unit": ("fix_rows", 'tl.where(finite, unit, float("nan"))', "unit"),
    "a neighbour's unit": ("_sum_groups", "of_units + begun, mask", "of_units + (begun ^ 1), mask"),
    "another group's unit": ("_sum_groups", "+ group[:, None], sums", "+ (group ^ 1)[:, None], sums"),
    "neighbouring lanes are added": ("_halved", "(2, lanes.shape[0] // 2, lanes.shape[1], lanes.shape[2]))",
                                     "(lanes.shape[0] // 2, 2, lanes.shape[1], lanes.shape[2])).permute(1, 0, 2, 3)"),
    "a product is rounded": ("_sum_groups", "lanes = tl.fma(total, scale, lanes)", "lanes = total * scale + lanes"),
    "leasts are rounded": ("_sum_groups", "least_lanes = tl.fma(least, added, least_lanes)",
                           "least_lanes = least * added + least_lanes"),
    "leasts are left out": ("_sum_groups", "        made += leasts\n", "        made += 0\n"),
    "sums are not in units": ("fix_rows", "to(tl.float32) * unit[:, None]", "to(tl.float32)"),
    "halves are one": ("_sum_groups", "number // 16 == half", "number // 16 <= 1"),
    "the upper halves have the lower ones' steps": ("_sum_groups", "(group * HALVES + half)", "(group * HALVES)"),
    "codes have bits below them": ("_sum_groups", "total >> spare_of(FORM)", "total >> 0"),
    "leasts without the centre": ("steps_of_parts", "step * FORM.centre_taken + least", "least"),
    "codes with the centre": ("codes_of_groups", " << spare_of(FORM) ^ TOPS", " << spare_of(FORM)"),
    "a byte is its neighbour": ("_plane", "% PARTS * APART)", "% PARTS * 8)"),
    "a part is another": ("_plane", "group // EACH % PARTS * BITS", "group // EACH % PARTS * 0"),
    "words are not shifted": ("_words_at", "place % 4 * 8", "place % 4 * 0"),
    "codes of a book are halves in order": ("fix_rows", "place % 2 * RUN", "place % 2 * 0"),
    "the sign of a code": ("_in_book", "codes >> 1 & 0x4444", "codes & 0"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.few(3)
@pytest.mark.parametrize(("program", "old", "new"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_seen(program: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(program, old, new, tmp_path, monkeypatch)
    assert not sees_no_fault()


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_without_a_fault_none_is_seen() -> None:
    assert sees_no_fault()


def test_each_program_has_the_text_of_its_faults() -> None:
    for program, old, new in FAULTS.values():
        assert edited_source(module_of(program), program, old, new)


def sees_no_fault() -> bool:
    """Whether products of forms with least values, with parts of 16 and with codes of a book are by the definition."""
    return all(has_the_defined_bits(name, torch.bfloat16, torch.get_default_device()) for name in FEW)


def module_of(program: str) -> ModuleType:
    source = Path(str(fixed_programs.__file__)).read_text()
    return fixed_programs if f"\ndef {program}(" in source else fixed_gpu


def edited_source(module: ModuleType, program: str, old: str, new: str) -> str:
    """The source of a module with `old`, which `program` has once, replaced in it."""
    before, name, rest = Path(str(module.__file__)).read_text().partition(f"\ndef {program}(")
    own, following, after = rest.partition("\n@triton.jit")
    assert own.count(old) == 1, f"{own.count(old)} times {old!r}"
    return before + name + own.replace(old, new) + following + after


def plant(program: str, old: str, new: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have the launches run programs with a fault, and those that they call."""
    module = module_of(program)
    edited = loaded("edited", edited_source(module, program, old, new), folder, patch)
    if module is fixed_gpu:
        source = Path(str(fixed_programs.__file__)).read_text().replace("offload.formats.fixed_gpu", "edited")
        edited = loaded("edited_programs", source, folder, patch)
    patch.setattr(by_triton, "multiply_fixed", edited.multiply_fixed)
    patch.setattr(fixed_rows, "fix_rows", edited.fix_rows)


def loaded(name: str, source: str, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    patch.setitem(sys.modules, name, module := module_from_spec(spec))
    spec.loader.exec_module(module)
    return module
