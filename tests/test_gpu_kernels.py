"""The GPU's kernels without a GPU: run in Triton's interpreter, and compiled for the GPUs that they are for."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: nothing of the GPU's kernels is tested")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kit.forked import pytest_in_a_fork  # noqa: E402
from kit.processor import left_to_torch  # noqa: E402
from kit.stored import GGUF  # noqa: E402
from offload.bench.diagnosis import software  # noqa: E402
from offload.config.mixers import MOST_BEFORE, DeltaRule, DilatedConvolution, Mamba2, ShortConvolution  # noqa: E402
from offload.engine.engine import kernels_problem  # noqa: E402
from offload.formats import packed_gpu, quantised_kv_gpu, residuals_gpu, stored_gpu  # noqa: E402
from offload.formats.encodings import ENCODINGS  # noqa: E402
from offload.formats.layout import Packing  # noqa: E402
from offload.formats.packed_gpu import warps as warps_of  # noqa: E402
from offload.formats.residuals_gpu import WEIGHT_WARPS  # noqa: E402
from offload.kernels.choice import fitting, gpu_kernels  # noqa: E402
from offload.kernels.cpu import VARIABLE  # noqa: E402
from offload.kernels.device import DeviceKernels  # noqa: E402
from offload.kernels.gpu import (  # noqa: E402
    activation,
    block_slots,
    choosing,
    chosen_programs,
    convolution,
    copies,
    delta_programs,
    halves_programs,
    kv_programs,
    prefill_programs,
    programs,
    rotation_programs,
    splits,
    stored_products,
)
from offload.kernels.gpu import quantised_products as products  # noqa: E402
from offload.kernels.gpu.copies import rows_at_once, warps  # noqa: E402
from offload.kernels.gpu.delta import (  # noqa: E402
    COLUMNS,
    States,
    is_aligned,
    most_registers,
    row_constants,
    row_warps,
    state_constants,
)
from offload.kernels.gpu.halves import HalvesTiling  # noqa: E402
from offload.kernels.gpu.kernels import GPU_KERNELS, JOINED_KERNELS  # noqa: E402
from offload.kernels.gpu.prefill import PrefillTiling  # noqa: E402
from offload.kernels.gpu.tiling import ROWS, SPAN, STAGES, UNROLL, Tiling  # noqa: E402
from offload.plan.what_if import LLAMA2_7B  # noqa: E402

CUDA = torch.device("cuda:0")
ROOT = Path(__file__).resolve().parents[1]
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
CAPABILITIES = [89, 90]
SHARED_BYTES = 99 * 2**10  # that a program may have on compute capability 8.9
SCRATCH = ("partials", "sums", "earlier_partials", "earlier_sums", "running", "tops", "totals")
INTERPRETED = [
    "gpu",
    "delta",
    "convolution",
    "streams",
    "chosen",
    "prefill",
    "latent_prefill",
    "codes",
    "stored",
    "experts",
    "fixed",
    "kv_codes",
    "kv_residuals",
    "packed",
]
ENGINES = [
    "quantised",
    "graphs",
    "graph_bugs",
    "mixture_graphs",
]  # which run kernels that have small cases of their own


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A small case of each kernel in one process, or all of each file in a process of its own, side by side."""
    if "names" in metafunc.fixturenames:
        apart = [[name] for name in (*INTERPRETED, *ENGINES)]
        groups = apart if metafunc.config.getoption("deep") else [INTERPRETED]
        metafunc.parametrize("names", groups, ids=" ".join)


@pytest.mark.timeout(3600)  # with --deep a file's cases take minutes, on a busy machine ten times as many
def test_every_kernel_runs_in_the_interpreter(names: list[str], pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """In a process of its own, as Triton decides on import whether it compiles."""
    files = [f"tests/{name}_interpreted.py" for name in names]
    deep = ["--deep"] if pytestconfig.getoption("deep") else []
    said = tmp_path / "said"
    code = pytest_in_a_fork(["-q", "-p", "no:cacheprovider", *files, *deep], said, TRITON_INTERPRET="1")
    assert code == 0, said.read_text()[-8000:]
    assert re.search(r"\d passed", said.read_text()), said.read_text()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As far as `GPU` asks, this machine has one. What a process found is forgotten before and afterwards."""
    gpu_kernels.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    yield monkeypatch
    monkeypatch.undo()
    gpu_kernels.cache_clear()


def test_a_gpu_has_kernels_and_they_are_named(on_a_gpu: pytest.MonkeyPatch) -> None:
    assert gpu_kernels(CUDA) == fitting(CUDA, 128, ()) == GPU_KERNELS
    assert kernels_problem("cuda", LLAMA2_7B) == ""
    assert f"kernels by Triton {triton.__version__} for few rows and for 16-bit prefill" in software().attention


def test_a_gpu_leaves_no_operation_to_torch() -> None:
    assert left_to_torch(GPU_KERNELS) == {"name"}


def test_the_reason_for_none_is_said(on_a_gpu: pytest.MonkeyPatch) -> None:
    assert fitting(CUDA, 40, ()).reason == "they know heads of 16, 32, ... 512 numbers, not of 40"
    assert fitting(CUDA, 512, ()) == GPU_KERNELS
    assert fitting(CUDA, 528, ()).reason
    assert fitting(CUDA, 576, (), joined=True) == JOINED_KERNELS
    assert fitting(CUDA, 1600, (), joined=True).reason
    assert kernels_problem("cuda", LLAMA2_7B.changed(head_dim=40)) == fitting(CUDA, 40, ()).reason
    for change, reason in (
        (lambda: on_a_gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5)), "capability 8.0"),
        (
            lambda: on_a_gpu.setattr("offload.kernels.choice.installed_version", lambda package: None),
            "pip install triton",
        ),
        (lambda: on_a_gpu.setattr(torch.version, "cuda", None), "built without CUDA"),
    ):
        change()
        gpu_kernels.cache_clear()
        assert reason in gpu_kernels(CUDA).reason
        assert kernels_problem("cuda", LLAMA2_7B) == gpu_kernels(torch.device("cuda")).reason
        assert f"torch products ({gpu_kernels(CUDA).reason})" in software().attention


def test_the_user_may_turn_them_off(on_a_gpu: pytest.MonkeyPatch) -> None:
    on_a_gpu.setenv(VARIABLE, "off")
    assert gpu_kernels(CUDA) == DeviceKernels(reason="TRIFORCE_KERNELS is off", whose="GPU")
    assert not gpu_kernels(CUDA).usable
    assert kernels_problem("cuda", LLAMA2_7B) == ""


@dataclass(frozen=True)
class Compiled:
    ptx: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ttgir: str = ""  # Triton's program with its layouts


def compiled(
    program: object,
    capability: int,
    pointers: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    tiling: Tiling | None = None,
    warps: int = 4,
    most: int | None = None,
    stages: int = STAGES,
    divisible: Sequence[str] = (),
    fuses: bool = True,
) -> Compiled:
    """As the launch of it would be compiled: pointers, strides and `divisible` numbers are multiples of 16. fuses:
    products with sums."""
    names: list[str] = program.arg_names  # type: ignore[attr-defined]
    kinds = {"scale": "fp32"} | dict(pointers) | dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if name in pointers or name in divisible or name.endswith("_stride")]
    source = ASTSource(
        fn=program,
        signature={name: kinds.get(name, "i32") for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    if tiling is not None:
        warps, most = tiling.warps, tiling.most_registers
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuses}
    options |= {} if most is None else {"maxnreg": most}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return replace(read(kernel.asm["ptx"], kernel.metadata.shared, capability), ttgir=kernel.asm["ttgir"])


def read(ptx: str, shared_bytes: int, capability: int) -> Compiled:
    """What the assembler says of it: of Triton's several the one for this capability."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", "--gpu-name", target[1], str(path), "-o", f"{path}.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used, spilled = re.search(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    assert used is not None
    assert len(spilled) == 2, said  # stores and loads
    return Compiled(ptx, int(used[1]), sum(map(int, spilled)), shared_bytes)


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "chunk", "window", "cap", "ring"),
    [
        ("bf16", 128, 1, 32, 0, 0.0, False),
        ("bf16", 128, 4, 8, 0, 0.0, False),
        ("bf16", 128, 1, 0, 256, 0.0, False),
        ("bf16", 64, 1, 32, 0, 0.0, False),
        ("bf16", 256, 3, 32, 0, 0.0, False),
        ("fp16", 80, 1, 16, 0, 0.0, False),
        ("fp32", 128, 1, 32, 0, 0.0, False),
        ("fp32", 256, 1, 16, 0, 0.0, False),
        ("bf16", 256, 2, 32, 4096, 50.0, False),
        ("bf16", 128, 4, 0, 4096, 0.0, True),
        ("bf16", 512, 8, 32, 0, 0.0, False),
        ("bf16", 512, 8, 0, 4096, 50.0, True),
        ("fp16", 320, 4, 16, 0, 0.0, False),
        ("fp32", 512, 8, 16, 0, 0.0, False),
    ],
)
def test_attention_compiles_to_wide_loads_and_spills_nothing(
    capability: int, dtype: str, dim: int, group: int, chunk: int, window: int, cap: float, ring: bool
) -> None:
    tiling = Tiling(dim, ITEMSIZE[dtype])
    shape = {"DIM": dim, "DIM_PADDED": tiling.padded, "ROWS": ROWS, "STEP": tiling.step, "SPAN": SPAN, "GROUP": group}
    rest = {"WINDOW": window, "CAP": cap, "SPANS_OF_PAGE": 1, "CHUNK": min(chunk, tiling.step), "WIDEN": False}
    rest |= {"RING": ring, "JOINED": False, "HELD_PADDED": tiling.padded}
    pointers = dict.fromkeys(("queries", "keys", "values"), f"*{dtype}") | {"places": "*i64"}
    pointers |= dict.fromkeys((*SCRATCH, "masses"), "*fp32")
    found = compiled(programs.attend_spans, capability, pointers, shape | rest, tiling=tiling)
    assert found.spilled_bytes == 0
    if tiling.is_wide and tiling.itemsize == 2:  # so two programs have room on a multiprocessor
        assert found.registers <= 128
        assert found.shared_bytes <= SHARED_BYTES // 2
    else:
        assert found.registers <= (192 if tiling.itemsize == 2 else 255)
        assert found.shared_bytes <= (SHARED_BYTES if tiling.is_wide else 56 * 2**10)
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", found.ptx)
    assert copies
    assert {int(num_bytes, 0) for num_bytes in copies} == {16}  # keys and values go past the registers
    assert ("mma.sync" in found.ptx or "wgmma" in found.ptx) == (tiling.itemsize == 2)
    assert "tf32" not in found.ptx


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "dim", "group"), [("bf16", 256, 12), ("fp16", 128, 4), ("fp32", 64, 1)])
def test_attention_over_chosen_blocks_compiles_to_wide_loads_and_spills_nothing(
    capability: int, dtype: str, dim: int, group: int
) -> None:
    tiling = Tiling(dim, ITEMSIZE[dtype])
    shape = {"DIM": dim, "DIM_PADDED": tiling.padded, "ROWS": ROWS, "STEP": tiling.step, "SPAN": SPAN, "GROUP": group}
    rest = {"CAP": 0.0, "SIZE": 4, "PAGE": 512, "WIDEN": False}
    pointers = dict.fromkeys(("queries", "keys", "values"), f"*{dtype}") | {"blocks": "*i32", "counts": "*i32"}
    pointers |= {"partials": "*fp32", "sums": "*fp32"}
    found = compiled(chosen_programs.attend_chosen, capability, pointers, shape | rest, tiling=tiling)
    assert found.spilled_bytes == 0
    assert found.registers <= (192 if tiling.itemsize == 2 else 255)
    assert found.shared_bytes <= 56 * 2**10
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", found.ptx)
    assert {int(num_bytes, 0) for num_bytes in copies} == {16}  # whole rows, wherever they are
    assert ("mma.sync" in found.ptx or "wgmma" in found.ptx) == (tiling.itemsize == 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "heads", "dim"), [("bf16", 4, 128), ("fp16", 2, 16), ("fp32", 4, 128)])
def test_blocks_are_scored_and_chosen_in_registers(capability: int, dtype: str, heads: int, dim: int) -> None:
    pointers = {"q": f"*{dtype}", "pooled": f"*{dtype}", "visible": "*i64", "scores": "*fp32"}
    shape = {"HEADS": heads, "DIM": dim, "PART": choosing.part_of(dim, ITEMSIZE[dtype]), "ROWS": choosing.ROWS}
    scored = compiled(choosing.score_blocks, capability, pointers, shape | {"KEYS": choosing.KEYS, "WIDEN": False})
    assert scored.spilled_bytes == 0
    assert ("mma.sync" in scored.ptx or "wgmma" in scored.ptx) == (dtype != "fp32")
    pointers = dict.fromkeys(("scores", "numbers", "kept_scores", "kept_numbers"), "*i32") | {"visible": "*i64"}
    for is_first in (True, False):
        chunk, most = choosing.chunking(65536, 512)[0], 512
        found = compiled(
            choosing.keep_highest, capability, pointers, choosing.constants(chunk, most, is_first=is_first),
            warps=choosing.CHUNK_WARPS,
        )  # fmt: skip
        assert found.spilled_bytes == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("num_slots", [544, 8224])
def test_slots_for_blocks_are_given_in_registers(capability: int, num_slots: int) -> None:
    tables = dict.fromkeys(("blocks", "slot_of", "asked", "block_in", "used", "clock", "missing", "found"), "*i32")
    pointers, size = tables | {"positions": "*i64", "wanted": "*i64"}, {"SIZE": 4}
    programs = [
        (block_slots.mark_asked, size | {"BLOCK": block_slots.BLOCK}, 4),
        (block_slots.list_missing, {"CHUNK": block_slots.CHUNK}, block_slots.WARPS),
        (
            block_slots.give_slots,
            size | {"PADDED": block_slots.padded(num_slots), "CHUNK": block_slots.CHUNK},
            block_slots.WARPS,
        ),
        (block_slots.look_up, {"BLOCK": block_slots.BLOCK}, 4),
    ]
    for program, constants, num_warps in programs:
        found = compiled(program, capability, pointers, constants, warps=num_warps)
        assert found.spilled_bytes == 0
        assert found.registers <= 255


@pytest.mark.few(2)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "dim", "heads"), [("bf16", 576, 20), ("fp16", 576, 128), ("bf16", 320, 32)])
@pytest.mark.parametrize("chunk", [0, 32])
def test_attention_to_rows_of_halves_compiles_to_wide_loads_and_spills_next_to_nothing(
    capability: int, dtype: str, dim: int, heads: int, chunk: int
) -> None:
    tiling = Tiling(dim, ITEMSIZE[dtype], joined=True)
    shape = {"DIM": dim, "DIM_PADDED": tiling.padded, "ROWS": ROWS, "STEP": tiling.step, "SPAN": SPAN, "GROUP": heads}
    rest = {"WINDOW": 0, "CAP": 0.0, "SPANS_OF_PAGE": 1, "CHUNK": min(chunk, tiling.step), "WIDEN": False}
    rest |= {"RING": False, "JOINED": True, "HELD_PADDED": tiling.held_padded}
    pointers = dict.fromkeys(("queries", "keys", "values"), f"*{dtype}") | {"places": "*i64"}
    pointers |= dict.fromkeys((*SCRATCH, "masses"), "*fp32")
    found = compiled(programs.attend_spans, capability, pointers, shape | rest, tiling=tiling)
    assert found.spilled_bytes <= 128  # where the run before is folded, once for each program
    assert found.shared_bytes <= SHARED_BYTES
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", found.ptx)
    assert {int(num_bytes, 0) for num_bytes in copies} == {16}
    assert "mma.sync" in found.ptx or "wgmma" in found.ptx


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "window", "cap", "sinks"),
    [
        ("bf16", 128, 4, 0, 0.0, False),
        ("fp16", 128, 1, 0, 0.0, False),
        ("bf16", 64, 1, 0, 0.0, False),
        ("bf16", 256, 2, 0, 0.0, False),
        ("bf16", 256, 2, 4096, 50.0, False),
        ("bf16", 128, 4, 4096, 0.0, False),
        ("fp16", 80, 1, 0, 30.0, False),
        ("fp16", 96, 1, 0, 0.0, False),
        ("bf16", 64, 8, 0, 0.0, True),
        ("bf16", 64, 8, 128, 0.0, True),
    ],
)
def test_attention_of_a_prefill_compiles_to_wide_loads_and_spills_nothing(
    capability: int, dtype: str, dim: int, group: int, window: int, cap: float, sinks: bool
) -> None:
    tiling = PrefillTiling(dim)
    shape = {"DIM": dim, "DIM_PADDED": tiling.padded, "ROWS": tiling.rows, "STEP": tiling.step, "GROUP": group}
    pointers = dict.fromkeys(("queries", "keys", "values", "mean"), f"*{dtype}")
    pointers |= dict.fromkeys(("running", "tops", "totals", "sink_logits"), "*fp32")
    rest = {"WINDOW": window, "CAP": cap, "SINKS": sinks, "PAGE": 512, "WIDEN": False}
    found = compiled(
        prefill_programs.attend_tile, capability, pointers, shape | rest, warps=tiling.warps, stages=tiling.stages
    )
    assert found.spilled_bytes == 0
    assert found.registers <= 255
    assert found.shared_bytes <= SHARED_BYTES
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", found.ptx)
    assert copies
    assert {int(num_bytes, 0) for num_bytes in copies} == {16}
    assert "mma.sync" in found.ptx or "wgmma" in found.ptx


@pytest.mark.few(4)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "tiling", "window", "cap", "sinks"),
    [
        ("bf16", HalvesTiling.of_latents(288, 32), 0, 0.0, False),
        ("fp16", HalvesTiling.of_latents(160, 32), 0, 0.0, False),
        ("bf16", HalvesTiling.of_heads(512), 0, 0.0, False),
        ("fp16", HalvesTiling.of_heads(320), 0, 0.0, True),
        ("bf16", HalvesTiling.of_heads(512), 4096, 50.0, False),
    ],
)
def test_a_prefills_attention_to_halves_compiles_to_wide_loads_and_spills_next_to_nothing(
    capability: int, dtype: str, tiling: HalvesTiling, window: int, cap: float, sinks: bool
) -> None:
    """Of latents and of heads past 256 numbers."""
    rest = {"WINDOW": window, "CAP": cap, "SINKS": sinks, "PAGE": 512, "GROUP": 8, "WIDEN": False}
    pointers = dict.fromkeys(("queries", "keys", "values", "mean"), f"*{dtype}")
    pointers |= dict.fromkeys(("running", "tops", "totals", "sink_logits"), "*fp32")
    found = compiled(
        halves_programs.attend_halves, capability, pointers, tiling.constants | rest, warps=tiling.warps,
        stages=tiling.stages, divisible=("second",),
    )  # fmt: skip
    assert found.spilled_bytes <= (64 if tiling.parts == 2 else 128)
    assert found.registers <= 255
    assert found.shared_bytes <= SHARED_BYTES
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", found.ptx)
    assert {int(num_bytes, 0) for num_bytes in copies} == {16}
    assert "mma.sync" in found.ptx or "wgmma" in found.ptx


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "dim", "group"),
    [
        ("bf16", 128, 1),
        ("bf16", 128, 4),
        ("fp16", 128, 8),
        ("bf16", 64, 6),
        ("bf16", 256, 3),
        ("fp16", 80, 1),
        ("bf16", 512, 8),
        ("fp16", 400, 2),
        ("fp32", 128, 1),
    ],
)
def test_attention_to_codes_compiles_to_wide_loads_and_spills_nothing(
    capability: int, dtype: str, dim: int, group: int
) -> None:
    tiling = Tiling(dim, ITEMSIZE[dtype])
    shape = {"DIM": dim, "DIM_PADDED": tiling.padded, "ROWS": ROWS, "SPAN": SPAN, "GROUP": group}
    rest = {"BLOCKS": tiling.blocks, "PART": tiling.part, "CAP": 0.0, "COUNTED": True, "WIDEN": False}
    pointers = {"queries": f"*{dtype}", "blocks": "*u8", "units": "*i32", "counted": "*i64"}
    pointers |= dict.fromkeys(SCRATCH, "*fp32")
    most = tiling.most_coded_registers
    found = compiled(kv_programs.attend_codes, capability, pointers, shape | rest, warps=tiling.warps, most=most)
    assert found.spilled_bytes == 0
    assert found.registers <= (168 if dim in (64, 128) and tiling.itemsize == 2 else 255)
    assert found.shared_bytes <= min(SHARED_BYTES, 56 * 2**10)
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", found.ptx)
    widths = [int(num_bytes, 0) for num_bytes in copies]
    wide = 16 if tiling.itemsize == 2 else 8  # of more threads each has less to copy
    assert sum(width for width in widths if width == wide) >= 0.55 * sum(widths)  # the others are steps and lows
    assert not re.search(r"ld\.global[.\w]*\.b?8", found.ptx)
    assert not re.search(r"ld\.shared[.\w]*\.b8", found.ptx)  # tensor cores' operands come in words
    assert ("mma.sync" in found.ptx or "wgmma" in found.ptx) == (tiling.itemsize == 2)
    assert "tf32" not in found.ptx


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "dim"), [("bf16", 128), ("bf16", 64), ("fp16", 80), ("bf16", 256), ("bf16", 512), ("fp32", 128)]
)
@pytest.mark.parametrize("chosen", [False, True])
def test_codes_are_made_without_a_spill(capability: int, dtype: str, dim: int, chosen: bool) -> None:
    """Stored a word at a time at least, in which there are codes of four bytes or a step and a least value."""
    shape = {"CHOSEN": chosen, "DIM": dim, "DIM_PADDED": Tiling(dim, ITEMSIZE[dtype]).padded}
    pointers = {"rows": f"*{dtype}", "blocks": "*u8", "units": "*i32", "wanted": "*i64"}
    found = compiled(quantised_kv_gpu.encode_groups, capability, pointers, shape)
    assert found.spilled_bytes == 0
    assert found.registers <= 255
    assert found.shared_bytes <= SHARED_BYTES
    assert not re.search(r"(?:ld|st)\.global[.\w]*\.b?(?:8|16)\b", found.ptx)


ROTATED = ("q", "k", "v", "cos", "sin", "growth", "query_weights", "key_weights", "queries", "keys", "values")


@pytest.mark.few(2)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 128), ("fp32", 64), ("fp16", 80), ("bf16", 512), ("bf16", 576)])
@pytest.mark.parametrize("whole", [True, False])
def test_a_rotation_rounds_product_by_product(capability: int, dtype: str, dim: int, whole: bool) -> None:
    """whole: as of a full cache, without growth, weights or a ring."""
    shape = {"HEADS": 32, "DIM": dim, "DIM_PADDED": Tiling(dim, ITEMSIZE[dtype]).padded, "BOUNDED": True}
    shape |= {"QUERIES": 1 if whole else 2, "GROWN": not whole, "WEIGHED": not whole, "RING": not whole}
    shape |= {"JOINED": dim == 576, "TABLE": 64 if dim == 576 else dim}
    pointers = dict.fromkeys(ROTATED, f"*{dtype}") | dict.fromkeys(("positions", "slots", "bounds"), "*i64")
    found = compiled(rotation_programs.rotate_rows, capability, pointers, shape, warps=1, fuses=False)
    assert found.spilled_bytes == 0
    assert found.registers <= 96
    assert "fma.rn.f32" not in found.ptx  # in bf16 it stands for a product or a sum, with a zero or a one


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("number", range(4))
def test_gates_are_read_and_written_16_bytes_at_a_time(capability: int, dtype: str, number: int) -> None:
    pointers = dict.fromkeys(("x", "out"), f"*{dtype}")
    found = compiled(
        activation.activate_gate,
        capability,
        pointers,
        {"ACTIVATION": number, "COLUMNS": 1024},
        divisible=("size", "stride"),
        fuses=False,
    )
    assert found.ptx.count("fma.rn.f32") == (0 if number == 2 else 7 * 8)  # those of a power of two, of eight numbers
    assert found.spilled_bytes == 0
    assert found.registers <= 96
    assert "ld.global.v4" in found.ptx
    assert "st.global.v4" in found.ptx


DELTA_FP32 = ("state", "taps", "taps_bias", "decay", "time_bias", "skip", "seen", "norm")
DELTAS: dict[str, States] = {
    "27B": DeltaRule(16, 48, 128, 128),
    "9B": DeltaRule(16, 32, 128, 128),
    "tiled": DeltaRule(8, 24, 64, 64, 3, tiled=0),
    "Kimi Linear": DeltaRule(32, 32, 128, 128, gate="sigmoid", by_channel=True),
    "Ling 3": DeltaRule(32, 32, 128, 128, gate="sigmoid", by_channel=True, least=-5.0),
    "Nemotron 3 Nano": Mamba2(8, 64, 128, 64),
    "Granite 4 H-Tiny": Mamba2(1, 48, 128, 64),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("delta", DELTAS.values(), ids=DELTAS)
def test_states_stay_in_registers_and_sums_within_a_warp(capability: int, dtype: str, delta: States) -> None:
    """Each number of a state is in one register of one thread, which a fused multiply-add brings up to date."""
    assert is_aligned(delta)
    kinds = {"held": f"*{dtype}", "rows": f"*{dtype}", "there": "*i64"} | dict.fromkeys(DELTA_FP32, "*fp32")
    advance, finish, most = delta_programs.ADVANCE[True], delta_programs.FINISH[True], most_registers(delta)
    pointers = {name: each for name, each in (kinds | {"out": "*fp32"}).items() if name in advance.arg_names}
    found = compiled(advance, capability, pointers, state_constants(delta), warps=1, most=most, fuses=False)
    assert found.spilled_bytes == 0
    assert found.registers <= most
    assert found.shared_bytes <= 2 * 2**10
    each = delta.key_dim * COLUMNS // 32  # numbers of a thread
    assert len(re.findall(r"fma\.rn\.f32", found.ptx)) == each
    assert len(re.findall(r"ld\.global[.\w:]*v4\.b32", found.ptx)) >= each // 4
    assert len(re.findall(r"st\.global[.\w:]*v4\.b32", found.ptx)) >= each // 4
    pointers = {name: each for name, each in (kinds | {"out": f"*{dtype}"}).items() if name in finish.arg_names}
    found = compiled(finish, capability, pointers, row_constants(delta), warps=row_warps(delta), fuses=False)
    assert found.spilled_bytes == 0
    assert found.registers <= 128
    assert found.shared_bytes <= 1024 * (row_warps(delta) > 1)  # a group of more numbers than a warp's
    assert not re.search(r"(?:ld|st)\.global[.\w]*\.b?(?:8|16)\b", found.ptx)


def test_a_program_has_as_many_rows_as_configs_let_a_convolution_read_before_a_token() -> None:
    assert convolution.ROWS >= MOST_BEFORE


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize(
    "own",
    [ShortConvolution(2048), ShortConvolution(2048, 7, taps_bias=True), DilatedConvolution(10240, 4, 3)],
    ids=["3", "7", "dilated"],
)
def test_a_convolutions_sums_stay_in_registers(
    capability: int, dtype: str, own: ShortConvolution | DilatedConvolution
) -> None:
    pointers = dict.fromkeys(("held", "rows", "out"), f"*{dtype}") | dict.fromkeys(("taps", "bias"), "*fp32")
    pointers["there"] = "*i64"
    found = compiled(convolution.convolve, capability, pointers, convolution.constants(own), fuses=False)
    assert found.spilled_bytes == 0
    assert found.registers <= 128
    assert found.shared_bytes <= 2**12


MERGED = dict.fromkeys(("partials", "sums", "running", "tops", "totals", "logs", "sink_logits"), "*fp32")
MERGED |= {"out": "*bf16"}
MERGED_AS = {"SINKS": False, "GROUP": 1, "DIM": 128, "NUMBERS": 64, "ROWS": ROWS, "UNROLL": UNROLL}


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sink logits"])
def test_the_merges_compile_to_wide_loads_and_spill_nothing(capability: int, sinks: bool) -> None:
    merged = compiled(programs.merge_spans, capability, MERGED, MERGED_AS | {"SINKS": sinks})
    pointers = {"masses": "*fp32", "logs": "*fp32", "joined": "*bf16"}
    joined = compiled(programs.join_masses, capability, pointers, {"GROUP": 4, "COLUMNS": 256})
    assert merged.spilled_bytes == joined.spilled_bytes == 0
    assert merged.registers <= 96
    assert joined.registers <= 64
    assert "ld.global.v4" in merged.ptx or "cp.async.cg" in merged.ptx


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 128), ("bf16", 64), ("fp16", 80), ("bf16", 512), ("fp32", 128)])
@pytest.mark.parametrize("chunk", [8, 32, 64])
def test_chunks_are_copied_by_loads_and_stores_of_16_bytes(capability: int, dtype: str, dim: int, chunk: int) -> None:
    words = dim * ITEMSIZE[dtype] // 4
    padded = 1 << (words - 1).bit_length()
    shape = {"CHUNK": chunk, "PER_PAGE": 512 // chunk, "PER_TILE": 8192 // chunk, "WORDS": words}
    rows = rows_at_once(chunk, padded)
    shape |= {"WORDS_PADDED": padded, "ROWS": rows}
    pointers = {"homes": "*i64", "wanted": "*i64", "held": "*i32"}
    found = compiled(copies.copy_chunks, capability, pointers, shape, warps=warps(rows * padded))
    assert found.spilled_bytes == 0
    assert found.registers <= 64
    moved = [op for op in re.findall(r"(?:ld|st)\.global[.\w:]*", found.ptx) if not op.startswith("ld.global.b64")]
    assert moved
    assert all(".v4.b32" in op for op in moved), moved


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_packed_pages_are_unpacked_by_loads_of_8_and_stores_of_16_bytes(capability: int, dim: int) -> None:
    """But for escapes, of which there are few, a byte each, and what is read once."""
    packing = Packing.of(8 * 512 * dim, 16 * dim, 1 / 64)
    half = packing.group // 2
    shape = {"NUMBERS": packing.numbers, "HEADS": packing.heads, "ESCAPES": packing.escapes}
    shape |= {"HALF": half, "HALF_PADDED": half}
    pointers = {"slot": "*u8", "tile": "*i16", "flags": "*u8", "starts": "*i64"}
    unpacked = compiled(packed_gpu.unpack_pages, capability, pointers, shape, warps=warps_of(packing))
    shape |= {"GROUPS": 2, "PER_PAGE": 16, "DIM": dim}
    pointers = {"blocks": "*i64", "flags": "*u8", "wanted": "*i64", "held": "*i16"}
    copied = compiled(packed_gpu.copy_packed_chunks, capability, pointers, shape, warps=warps_of(packing))
    for found in (unpacked, copied):
        assert found.spilled_bytes == 0
        assert found.registers <= (96 if dim < 512 else 128)
        assert found.shared_bytes <= max(4 * 2**10, packing.group)
        stores = re.findall(r"st\.global[.\w:]*", found.ptx)
        assert stores
        assert all(".v4.b32" in op for op in stores), stores
        loads = Counter(re.findall(r"ld\.global[.\w:]*", found.ptx))
        per_thread = packing.group // (32 * warps_of(packing))  # numbers
        assert loads["ld.global.v2.b32"] >= 3 * per_thread // 16, loads  # signs and mantissas, and distances
        assert loads["ld.global.b8"] <= 2 * (per_thread + 1), loads
        assert not loads.keys() - {f"ld.global.{kind}" for kind in ("v4.b32", "v2.b32", "b64", "b32", "b8")}, loads


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 6])
def test_codes_come_in_wide_loads_and_become_weights_in_registers(capability: int, dtype: str, bits: int) -> None:
    """Weights never go through shared memory: nothing is stored there but, once, the sums."""
    pointers = {"rows": f"*{dtype}", "blocks": "*u8", "partials": "*fp32"}
    shape = {
        "ROWS": products.ROWS,
        "TILES": products.TILES,
        "GROUPS": products.GROUPS,
        "BITS": bits,
        "WIDEN": False,
    }
    found = compiled(
        products.multiply_codes, capability, pointers, shape, warps=products.WARPS,
        stages=products.STAGES
    )  # fmt: skip
    assert found.spilled_bytes == 0
    assert found.registers <= 128  # so four programs have room
    assert found.shared_bytes <= {4: 27, 6: 35}[bits] * 2**10
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", found.ptx)
    sizes = [int(num_bytes, 0) for num_bytes in copies]
    assert set(sizes) == {8, 16}
    assert sizes.count(8) == products.STAGES  # steps and lows
    assert len(re.findall(r"st\.shared", found.ptx)) == products.ROWS * products.TILES * 16 // (products.WARPS * 32 * 4)
    assert "mma.sync" in found.ptx
    assert "tf32" not in found.ptx
    stored = re.findall(r"st\.global[.\w:]*", found.ptx)
    assert stored
    assert all(".v4.b32" in op for op in stored)


STORED = [*GGUF, "INT4_F16/128", "INT4_BF16/32", "INT8_F16/128", "INT8_BF16/32", "FP8_F32/128", "FP8_F16/32"]
STORED += ["FP8_BF16/128", "NVFP4", "NVFP4_INV"]


def book_kind(name: str) -> str:
    """The pointer to the table in which codes are looked up."""
    return "*i32" if ENCODINGS[name].grid else "*i16"


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows", stored_products.ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", STORED)
def test_stored_matrices_are_multiplied_without_a_spill(capability: int, rows: int, dtype: str, name: str) -> None:
    own, tiling = ENCODINGS[name], ENCODINGS[name].tiling
    pointers = {"rows": f"*{dtype}", "stored": "*u8", "book": book_kind(name), "partials": "*fp32"}
    shape = {"ROWS": rows, "OUTPUTS": tiling.outputs, "BLOCKS": tiling.blocks(own), "WIDEN": False}
    found = compiled(
        stored_products.multiply_stored, capability, pointers, shape | {"FORM": own},
        warps=tiling.warps, stages=tiling.stages,
    )  # fmt: skip
    assert found.spilled_bytes == 0
    assert found.registers <= 255
    assert found.shared_bytes <= SHARED_BYTES
    assert "mma.sync" in found.ptx  # which has a row's bits whatever the number of rows
    assert "wgmma" not in found.ptx
    assert "tf32" not in found.ptx
    assert not re.search(r"ld\.global[.\w]*\.b?8\b", found.ptx)
    assert "cp.async" in found.ptx
    assert ".ftz" not in found.ptx  # bits cut out are numbers below the least normal one
    assert ("div.rn" in found.ptx) == (own.steps == "over")  # others divide by powers of 2 alone


@pytest.mark.few(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", STORED)
def test_stored_matrices_are_decoded_to_wide_stores(capability: int, dtype: str, name: str) -> None:
    shape = {"FORM": ENCODINGS[name], "BLOCKS": stored_gpu.blocks_at_once(ENCODINGS[name])}
    pointers = {"stored": "*u8", "book": book_kind(name), "out": f"*{dtype}"}
    found = compiled(stored_gpu.decode_blocks, capability, pointers, shape, warps=stored_gpu.WARPS)
    assert found.spilled_bytes == 0
    assert found.registers <= (168 if ITEMSIZE[dtype] == 2 else 200)
    assert found.shared_bytes <= SHARED_BYTES
    stores = re.findall(r"st\.global[.\w:]*", found.ptx)
    assert stores
    assert all(".v4.b32" in op for op in stores), stores
    assert not re.search(r"ld\.global[.\w]*\.b?8\b", found.ptx)


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_splits_are_joined_by_wide_loads(capability: int, bias: bool) -> None:
    pointers = {"partials": "*fp32", "bias": "*bf16", "out": "*bf16"}
    shape = {"BIAS": bias, "COLUMNS": splits.COLUMNS}
    found = compiled(splits.join_splits, capability, pointers, shape, warps=1)
    assert found.spilled_bytes == 0
    assert found.registers <= 64
    assert "ld.global.v4" in found.ptx


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("bits", [4, 6])
def test_weights_are_restored_without_a_spill_and_stored_16_bytes_at_a_time(capability: int, bits: int) -> None:
    pointers = {"content": "*u8", "blocks": "*u8", "out": "*i16"}
    found = compiled(residuals_gpu.restore_weights, capability, pointers, {"BITS": bits}, warps=WEIGHT_WARPS)
    assert found.spilled_bytes == 0
    assert found.registers <= 80
    assert found.shared_bytes <= 8 * 2**10
    stores = re.findall(r"st\.global[.\w:]*", found.ptx)
    assert stores
    assert all(".v4.b32" in op for op in stores), stores
    loads = Counter(re.findall(r"ld\.global[.\w:]*", found.ptx))
    assert loads["ld.global.v2.b32"] + 2 * loads["ld.global.v4.b32"] >= 1024 // (32 * WEIGHT_WARPS) // 8, loads


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256, 512])
def test_pages_are_restored_without_a_spill_and_stored_16_bytes_at_a_time(capability: int, dim: int) -> None:
    """Each thread has the scales, codes and low bytes of 8 numbers: only 4 bits and escapes come byte by byte."""
    pointers = {"slot": "*u8", "tile": "*i16", "flags": "*u8", "starts": "*i64", "codes": "*u8"}
    shape = {"PAGE": 512} | residuals_gpu.constants(dim)
    num_warps = shape.pop("num_warps")
    found = compiled(residuals_gpu.restore_pages, capability, pointers, shape, warps=num_warps)
    assert found.spilled_bytes == 0
    assert found.registers <= 128
    assert found.shared_bytes <= 8 * 2**10
    stores = re.findall(r"st\.global[.\w:]*", found.ptx)
    assert stores
    assert all(".v4.b32" in op for op in stores), stores
    loads = Counter(re.findall(r"ld\.global[.\w:]*", found.ptx))
    assert loads["ld.global.v2.b32"] >= 2, loads
    assert loads["ld.global.b8"] == 2 * 8 + 1, loads


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rows_of_a_table_on_the_host_are_copied_16_bytes_at_a_time(capability: int) -> None:
    pointers = {"address": "*i64", "tokens": "*i64", "out": "*i32", "width": "i32"}
    found = compiled(copies.copy_rows, capability, pointers, {"WORDS": 1024, "ALIGNMENT": 16})
    assert found.spilled_bytes == 0
    assert found.registers <= 48
    moved = [op for op in re.findall(r"(?:ld|st)\.global[.\w:]*", found.ptx) if not op.startswith("ld.global.b64")]
    assert moved
    assert all(".v4.b32" in op for op in moved), moved


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_new_rows_go_home_in_registers(capability: int) -> None:
    pointers = {"rows": "*i32", "positions": "*i64", "slot_of": "*i32", "held": "*i32", "homes": "*i64"}
    constants = {"SIZE": 4, "PAGE": 512, "TILE": 8192, "WORDS": 128, "WORDS_PADDED": 128}
    found = compiled(copies.copy_new_rows, capability, pointers, constants, warps=copies.warps(128))
    assert found.spilled_bytes == 0
    assert found.registers <= 48


def test_spills_are_noticed() -> None:
    assert compiled(programs.merge_spans, 89, MERGED, MERGED_AS, warps=1, most=32).spilled_bytes > 0
