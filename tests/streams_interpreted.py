"""The GPU's operations on residual streams in Triton's interpreter, beside torch's operators. test_gpu_kernels.py runs
this as it does gpu_interpreted.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gpu_interpreted import normal
from kit.interpreter import rounds_to_bf16
from offload.config.norm import Norm
from offload.kernels.gpu import streams as by_triton
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.kernels.norms import NormWeights
from offload.kernels.streams import BY_TORCH, StreamKernels
from offload.native.launch import counting

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Shape:
    count: int
    size: int
    rank: int


SHAPES = [Shape(4, 48, 10), Shape(2, 1030, 7), Shape(3, 5, 1030)]  # of more than one block of numbers, and of less


@pytest.fixture(autouse=True)
def _rounds_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds_to_bf16(monkeypatch)


def results(own: StreamKernels, shape: Shape, dtype: torch.dtype, rows: int = 3) -> dict[str, Tensor]:
    """What each operation makes of `rows` of eight rows."""
    width, count = shape.count * shape.size, shape.count
    x, mixes = (normal(8, width, seed=seed, dtype=dtype)[:rows].clone() for seed in (1, 2))
    norm = NormWeights(Norm(plus_one=True, fp32=True), 1 + normal(width, seed=3))
    low = normal(8, shape.rank + count, seed=4, dtype=dtype)[:rows].clone() * 5
    part, factors = normal(8, 2 * shape.size, seed=5, dtype=dtype)[:rows, : shape.size], normal(8, count, seed=6)
    found = {"normed": own.normed(x, norm, count), "mean": own.mean(mixes, x, count)}
    found["inner"], found["factors"] = own.gates(low, shape.rank, count)
    found["last"] = own.gates(low[:, : shape.rank].contiguous(), shape.rank, count)[0]
    own.inject(x, part, factors.to(dtype)[:rows].contiguous())
    return found | {"injected": x}


def near(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether both round alike: nearly all numbers are the same, and none is far, but in fp32, whose e^x may differ."""
    for name, out in ours.items():
        wanted, eps = theirs[name], torch.finfo(out.dtype).eps
        if out.shape != wanted.shape or out.dtype != wanted.dtype:
            return False
        if not torch.allclose(out.float(), wanted.float(), rtol=2 * max(eps, 1e-6), atol=max(eps, 1e-6)):
            return False
        if eps > 1e-6 and (out == wanted).float().mean() < 0.98:
            return False
    return torch.equal(ours["injected"], theirs["injected"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operations_are_torchs_own(shape: Shape, dtype: torch.dtype) -> None:
    assert near(results(by_triton.BY_TRITON, shape, dtype), results(BY_TORCH, shape, dtype))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_row_has_the_same_bits_beside_any_rows(shape: Shape) -> None:
    every = results(by_triton.BY_TRITON, shape, torch.bfloat16, 8)
    for rows in (1, 5):
        some = results(by_triton.BY_TRITON, shape, torch.bfloat16, rows)
        assert all(torch.equal(out, every[name][:rows]) for name, out in some.items())


def test_each_is_one_launch() -> None:
    assert GPU_KERNELS.streams is by_triton.BY_TRITON
    with counting() as launches:
        results(by_triton.BY_TRITON, SHAPES[0], torch.bfloat16)
    assert launches == {"norm_streams": 1, "open_gates": 2, "mean_streams": 1, "inject_part": 1}


ROUNDED = "other=0.0).to(tl.float32)).to(kind).to(tl.float32)"
MUTANTS = {
    "one stream's weights": ("weights + stream * size + number", "weights + number"),
    "a row's norm": ("squares) / size", "squares) / (size * count)"),
    "another epsilon": ("/ size + eps", "/ size + 0.0 * eps + 1e-2"),
    "squares of the last block alone": ("squares += own * own", "squares = own * own"),
    "not divided": ("* count).to(kind)", "* 1).to(kind)"),
    "quotients are not rounded": ("* count).to(kind).to(tl.float32)", "* count)"),
    "factors are not doubled": ("2.0 * opened", "1.0 * opened"),
    "factors are activated": ("2.0 * opened", "2.0 * activated"),
    "sums, not means": ("tl.full(total.shape, COUNT, tl.float32)", "tl.full(total.shape, 1, tl.float32)"),
    "a stream too few": ("static_range(COUNT)", "static_range(COUNT - 1)"),
    "mixes are not rounded": (f"{ROUNDED}\n        total", "other=0.0).to(tl.float32))\n        total"),
    "products are not rounded": (f"{ROUNDED}\n    tl.store", "other=0.0).to(tl.float32))\n    tl.store"),
    "factors of the first stream": ("factors + row * count + stream", "factors + row * count"),
    "parts are not rounded": ("* factor).to(kind)", "* factor)"),
    "rows without a stride": ("part + row * part_stride", "part + row * size"),
}


def edited(old: str, new: str, path: Path) -> ModuleType:
    source = Path(str(by_triton.__file__)).read_text()
    assert source.count(old) == 1, f"{source.count(old)} times {old!r}"
    path.write_text(source.replace(old, new))
    spec = spec_from_file_location("edited", path)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    sys.modules["edited"] = found
    spec.loader.exec_module(found)
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize(("old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_each_fault_is_seen(old: str, new: str, tmp_path: Path) -> None:
    own = edited(old, new, tmp_path / "edited.py").BY_TRITON
    same = [near(results(own, shape, torch.bfloat16), results(BY_TORCH, shape, torch.bfloat16)) for shape in SHAPES]
    assert not all(same)
