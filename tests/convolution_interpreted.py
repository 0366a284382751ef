"""The GPU's short convolutions in Triton's interpreter: as torch's operators, gated ones bit for bit, and bit for bit
however tokens are divided into launches. test_gpu_kernels.py runs this as it does gpu_interpreted.py."""

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
from offload.config.mixers import DilatedConvolution, ShortConvolution
from offload.kernels.device import DeviceKernels
from offload.kernels.gpu import convolution as by_triton
from offload.kernels.gpu.convolution import convolution
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.launch import counting

Convolution = ShortConvolution | DilatedConvolution
SHAPES: dict[str, Convolution] = {
    "lfm2": ShortConvolution(32),
    "lfm3": ShortConvolution(144, 7),
    "odd": ShortConvolution(5, 4, taps_bias=True),
    "short": ShortConvolution(12, 2),
    "dilated": DilatedConvolution(144, 4, 3),
    "dilated, odd": DilatedConvolution(5, 3, 2),
    "dilated, short": DilatedConvolution(12, 2, 1),
}
BY_TORCH = DeviceKernels().recurrences


@pytest.fixture(autouse=True)
def _rounds_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds_to_bf16(monkeypatch)


@cache
def weights_of(own: Convolution) -> RecurrenceWeights:
    bias = normal(own.channels, seed=3) if "taps_bias" in own.vectors else None
    return RecurrenceWeights(normal(*own.vectors["taps"], seed=2), taps_bias=bias)


def both(
    own: Convolution, held: Held, rows: Tensor, replayed: int, *, settles: bool, graph: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """The output and what is held afterwards by torch and by Triton."""
    given = Replayed(9, torch.tensor([replayed])) if graph else Replayed(replayed)
    found = []
    for run, count in ((BY_TORCH[type(own)], Replayed(replayed)), (by_triton.convolution, given)):
        own_held = copied(held)
        out = run(own, weights_of(own), own_held, rows, count, settles=settles)
        found.append((out, own_held.inputs))
    return found


def alike(own: Convolution, theirs: tuple[Tensor, Tensor], ours: tuple[Tensor, Tensor]) -> bool:
    """Whether both have the same bits; of activated outputs of which e^x may have others, nearly the same numbers."""
    out, wanted = ours[0], theirs[0]
    if isinstance(own, DilatedConvolution):
        eps = torch.finfo(out.dtype).eps
        same = torch.allclose(out.float(), wanted.float(), rtol=2 * max(eps, 1e-6), atol=0)
        same = same and bool((out == wanted).float().mean() > (0.9 if out.dtype.itemsize == 2 else 0)) | (not len(out))
    else:
        same = torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    return same and torch.equal(ours[1].view(torch.uint8), theirs[1].view(torch.uint8))


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("replayed", "count"), [*COUNTS, (4, 0), (3, 40)])
@pytest.mark.parametrize("settles", [False, True])
def test_outputs_and_what_is_held_are_those_of_torchs_operators(
    dtype: torch.dtype, own: Convolution, replayed: int, count: int, settles: bool
) -> None:
    held, rows = some(own, count, dtype, replayed=replayed)
    theirs, ours = both(own, held, rows, replayed, settles=settles)
    assert alike(own, theirs, ours)


def tokens_of(own: Convolution, dtype: torch.dtype) -> Tokens:
    held, rows = some(own, 9, dtype)
    return Tokens(own, rows, held, weights_of(own), convolution)


@pytest.mark.few(1)
@pytest.mark.parametrize("acts", [*DIVIDED.values()][::-1], ids=[*DIVIDED][::-1])  # all kinds first
@pytest.mark.parametrize("own", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_its_bits_however_tokens_are_divided(
    acts: list[tuple[str, int]], own: Convolution, dtype: torch.dtype
) -> None:
    check_divided(tokens_of, own, dtype, acts)


@pytest.mark.parametrize("own", [SHAPES["lfm2"], SHAPES["dilated"]], ids=["gated", "dilated"])
def test_a_pass_is_one_launch_of_a_layer(own: Convolution) -> None:
    held, rows = some(own, 4, torch.bfloat16, replayed=3)
    with counting() as launches:
        convolution(own, weights_of(own), held, rows, Replayed(3), settles=False)
    assert launches == {"convolve": 1}
    assert GPU_KERNELS.recurrences[type(own)] is convolution


MUTANTS = {
    "new rows begin a place early": ("first_new, row = replayed + WIDTH - 1", "first_new, row = replayed + WIDTH - 2"),
    "a graph replays the host's count": (
        "replayed = tl.load(there, mask=count < 0, other=count).to(tl.int32)",
        "replayed = tl.maximum(count, 0)",
    ),
    "products are not rounded": ("(own.to(tl.float32) * x.to(tl.float32)).to(before.dtype)", "own.to(tl.float32) * x"),
    "sums are not rounded": ("sums.to(dtype).to(tl.float32)", "sums"),
    "the convolution begins a token late": (
        "place + tap * DILATION, first_new",
        "place + tap * DILATION + 1, first_new",
    ),
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
OF_DILATED = {
    "neighbouring tokens": ("place + tap * DILATION", "place + tap"),
    "a tap too few": ("(WIDTH - 1) // DILATION + 1", "(WIDTH - 1) // DILATION"),
    "no activation": ("made / (1.0 + tl.exp(-made))", "made"),
    "rows are gated": ("    if GATED:\n        x =", "    if True:\n        x ="),
}


def edited_source(old: str, new: str) -> str:
    source = Path(str(by_triton.__file__)).read_text()
    assert source.count(old) == 1, f"{source.count(old)} times {old!r}"
    return source.replace(old, new)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [*(("odd", *each) for each in MUTANTS.values()), *(("dilated, odd", *each) for each in OF_DILATED.values())],
    ids=[*MUTANTS, *OF_DILATED],
)
def test_each_fault_is_seen(name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (path := tmp_path / "edited.py").write_text(edited_source(old, new))
    spec = spec_from_file_location("edited", path)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "edited", edited := module_from_spec(spec))
    spec.loader.exec_module(edited)
    monkeypatch.setattr(by_triton, "convolve", edited.convolve)
    assert not sees_no_fault(SHAPES[name])


def test_without_a_fault_none_is_seen() -> None:
    assert sees_no_fault(SHAPES["odd"])
    assert sees_no_fault(SHAPES["dilated, odd"])


def sees_no_fault(own: Convolution) -> bool:
    """Whether outputs and what is held are those of torch's operators, in passes and prefills."""
    for replayed, count, settles, graph in ((2, 20, False, False), (1, 2, False, True), (3, 20, True, False)):
        held, rows = some(own, count, torch.bfloat16, replayed=replayed)
        theirs, ours = both(own, held, rows, replayed, settles=settles, graph=graph)
        if not alike(own, theirs, ours):
            return False
    return True
