"""The GPU's short convolution in Triton's interpreter: bit for bit as torch's operators, and however tokens are divided
into launches. test_gpu_kernels.py runs this as it does gpu_interpreted.py."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import Tensor

from delta_interpreted import COUNTS, DIVIDED, DTYPES, Tokens, check_divided, copied, some
from gpu_interpreted import normal
from kit.interpreter import rounds_to_bf16
from offload.config.mixers import ShortConvolution
from offload.kernels import convolution as by_torch
from offload.kernels.gpu import convolution as by_triton
from offload.kernels.gpu.convolution import short_convolution
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.launch import counting

SHAPES = {
    "lfm2": ShortConvolution(32),
    "lfm3": ShortConvolution(144, 7),
    "odd": ShortConvolution(5, 4, taps_bias=True),
    "short": ShortConvolution(12, 2),
}


@pytest.fixture(autouse=True)
def _rounds_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds_to_bf16(monkeypatch)


@cache
def weights_of(own: ShortConvolution) -> RecurrenceWeights:
    bias = normal(own.channels, seed=3) if own.taps_bias else None
    return RecurrenceWeights(normal(own.width, own.channels, seed=2), taps_bias=bias)


def both(
    own: ShortConvolution, held: Held, rows: Tensor, replayed: int, *, settles: bool, graph: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """The output and what is held afterwards, as bytes, by torch and by Triton."""
    given = Replayed(9, torch.tensor([replayed])) if graph else Replayed(replayed)
    found = []
    for run, count in ((by_torch.short_convolution, Replayed(replayed)), (by_triton.short_convolution, given)):
        own_held = copied(held)
        out = run(own, weights_of(own), own_held, rows, count, settles=settles)
        found.append((out.view(torch.uint8), own_held.inputs.view(torch.uint8)))
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("replayed", "count"), [*COUNTS, (4, 0), (3, 40)])
@pytest.mark.parametrize("settles", [False, True])
def test_outputs_and_what_is_held_are_those_of_torchs_operators(
    dtype: torch.dtype, own: ShortConvolution, replayed: int, count: int, settles: bool
) -> None:
    held, rows = some(own, count, dtype, replayed=replayed)
    theirs, ours = both(own, held, rows, replayed, settles=settles)
    assert all(map(torch.equal, ours, theirs))


def tokens_of(own: ShortConvolution, dtype: torch.dtype) -> Tokens:
    held, rows = some(own, 9, dtype)
    return Tokens(own, rows, held, weights_of(own), short_convolution)


@pytest.mark.few(1)
@pytest.mark.parametrize("acts", [*DIVIDED.values()][::-1], ids=[*DIVIDED][::-1])  # all kinds first
@pytest.mark.parametrize("own", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_its_bits_however_tokens_are_divided(
    acts: list[tuple[str, int]], own: ShortConvolution, dtype: torch.dtype
) -> None:
    check_divided(tokens_of, own, dtype, acts)


def test_a_pass_is_one_launch_of_a_layer() -> None:
    own = SHAPES["lfm2"]
    held, rows = some(own, 4, torch.bfloat16, replayed=3)
    with counting() as launches:
        short_convolution(own, weights_of(own), held, rows, Replayed(3), settles=False)
    assert launches == {"convolve": 1}
    assert GPU_KERNELS.recurrences[ShortConvolution] is short_convolution


MUTANTS = {
    "new rows begin a place early": ("first_new, row = replayed + WIDTH - 1", "first_new, row = replayed + WIDTH - 2"),
    "a graph replays the host's count": (
        "replayed = tl.load(there, mask=count < 0, other=count).to(tl.int32)",
        "replayed = tl.maximum(count, 0)",
    ),
    "products are not rounded": ("(b.to(tl.float32) * x.to(tl.float32)).to(before.dtype)", "b.to(tl.float32) * x"),
    "sums are not rounded": ("sums.to(gate.dtype).to(tl.float32) * gate", "sums * gate"),
    "the convolution begins a token late": ("place + tap, first_new", "place + tap + 1, first_new"),
    "taps of other channels": ("taps + tap * CHANNELS + channel", "taps + tap + channel * WIDTH"),
    "no bias": ("if BIASED:", "if BIASED and WIDTH < 2:"),
    "gates are x": ("row_stride + CHANNELS + channel, mask=mask", "row_stride + 2 * CHANNELS + channel, mask=mask"),
    "the tail stays where it was": ("replayed + num_rows * settles + tail", "num_rows * settles + tail"),
    "a settled tail lacks the last row": ("num_rows * settles + tail", "(num_rows - 1) * settles + tail"),
    "the first rows alone are held": ("tl.where(settles == 0, num_rows, 0)", "tl.where(settles == 0, 1, 0)"),
    "settled rows are held": ("tl.where(settles == 0, num_rows, 0)", "num_rows"),
    "later blocks of rows begin anew": (
        "first_new, row = replayed + WIDTH - 1, first +",
        "first_new, row = replayed + WIDTH - 1, 0 * first +",
    ),
}


def edited_source(old: str, new: str) -> str:
    source = Path(str(by_triton.__file__)).read_text()
    assert source.count(old) == 1, f"{source.count(old)} times {old!r}"
    return source.replace(old, new)


@pytest.mark.few(3)
@pytest.mark.parametrize(("old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_each_fault_is_seen(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (path := tmp_path / "edited.py").write_text(edited_source(old, new))
    spec = spec_from_file_location("edited", path)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "edited", edited := module_from_spec(spec))
    spec.loader.exec_module(edited)
    monkeypatch.setattr(by_triton, "convolve", edited.convolve)
    assert not sees_no_fault(SHAPES["odd"])


def test_without_a_fault_none_is_seen() -> None:
    assert sees_no_fault(SHAPES["odd"])


def sees_no_fault(own: ShortConvolution) -> bool:
    """Whether outputs and what is held are those of torch's operators, in passes and prefills."""
    for replayed, count, settles, graph in ((2, 20, False, False), (1, 2, False, True), (3, 20, True, False)):
        held, rows = some(own, count, torch.bfloat16, replayed=replayed)
        theirs, ours = both(own, held, rows, replayed, settles=settles, graph=graph)
        if not all(map(torch.equal, ours, theirs)):
            return False
    return True
