"""Checks that a device computes recurrences correctly, at the shapes of well-known models; part of `triforce
doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from offload.bench.findings import TOLERANCES, Named, Shown, error_of
from offload.config.mixers import DeltaRule, DilatedConvolution, Mamba2, Recurring, ShortConvolution
from offload.config.norm import Norm
from offload.kernels import choice
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.norms import NormWeights
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.kv.layer_states import LayerStates
from offload.model.loading import DTYPES
from offload.speed.hardware import Hardware
from offload.transfer.memory import Memory

DELTA = DeltaRule(4, 12, 128, 128, norm=Norm(fp32=True))  # a quarter of the heads of Qwen3.6-27B
HEAD_DIM = 256  # of its layers that attend
KIMI = DeltaRule(8, 8, 128, 128, norm=Norm(fp32=True), gate="sigmoid", by_channel=True)  # a quarter of the heads
CHECKED: dict[str, Recurring] = {
    "states, Qwen3.6-27B": DELTA,
    "states, Kimi Linear": KIMI,
    "states, Ling 3": replace(KIMI, least=-5.0),
    "states, Nemotron 3 Nano": Mamba2(2, 16, 128, 64),  # a quarter of its heads
    "short convolutions, LFM2-1.2B": ShortConvolution(2048),
    "short convolutions, Qwen3.8-Flash-Next": DilatedConvolution(10240, 4, 3),
}
NUM_ROWS = 40
ROUNDS = ((24, 24), (1, 1), (6, 3), (12, 12))  # rows of a pass, and how many of them stay


def state_checks(hardware: Hardware, dtypes: Sequence[str], remedy: str) -> Iterator[Named]:
    """The checks of one device in each of `dtypes`."""
    for name, mixer in CHECKED.items():
        for dtype in dtypes:
            yield f"{name}, {dtype}", partial(_states, hardware, dtype, mixer), remedy


def _states(hardware: Hardware, dtype: str, mixer: Recurring) -> Shown:
    """Compare passes of which rows are rejected with torch's operators in fp32, and check that a row has the same bits
    alone."""
    device, rows = torch.device(hardware.device), _random(NUM_ROWS, sum(mixer.row_parts), seed=1).to(DTYPES[dtype])
    kernels = choice.fitting(device, HEAD_DIM, ())
    together = _run(kernels, device, mixer, rows, ROUNDS)
    alone = _run(kernels, device, mixer, rows, ((1, 1),) * NUM_ROWS)
    error, same = error_of(together, _expected(mixer, rows).double()), torch.equal(together, alone)
    bits = "the same bits" if same else "OTHER BITS"
    shown = f"errors of up to {error:.1e}, at most {TOLERANCES[dtype]:.0e}; {bits} of rows together and one at a time"
    return same and error <= TOLERANCES[dtype], shown


def _run(
    kernels: DeviceKernels, device: torch.device, mixer: Recurring, rows: Tensor, rounds: Sequence[tuple[int, int]]
) -> Tensor:
    """The output of `rows` in passes, each of which is followed by wrong rows, [n, out_size] on the CPU."""
    memory, start, out = Memory(device), 0, list[Tensor]()
    states = LayerStates(memory, mixer, num_layers=1, rows=NUM_ROWS, dtype=rows.dtype, kernels=kernels)
    weights = _weights(mixer, device)
    for count, kept in rounds:
        some = rows[start : start + kept]
        wrong = rows.flip(0)[: count - kept]
        states.begin(start, count)
        found = states.run(0, start, torch.cat([some, wrong]).to(device), weights, settles=False)
        out.append(found[:kept].cpu())
        start += kept
    states.release()
    return torch.cat(out)


def _expected(mixer: Recurring, rows: Tensor) -> Tensor:
    """The output of `rows` by torch's operators in fp32, one row after the other."""
    inputs = torch.zeros(mixer.width - 1, mixer.kept)
    held, weights = Held(torch.zeros(mixer.state_shape), inputs), _weights(mixer, torch.device("cpu"))
    return NONE.recurrences[type(mixer)](mixer, weights, held, rows.float(), Replayed(0), settles=True)


def _weights(mixer: Recurring, device: torch.device) -> RecurrenceWeights:
    made = {name: _random(*shape, seed=seed) for seed, (name, shape) in enumerate(mixer.vectors.items(), 2)}
    made["taps"] /= 2
    if "decay" in made:
        made["decay"] = -made["decay"].exp()
    norm = None
    if mixer.norm is not None:
        norm = NormWeights(mixer.norm, (1 + _random(mixer.norm_size, seed=1) / 4).to(device))
    return RecurrenceWeights(**{name: each.to(device) for name, each in made.items()}, norm=norm)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
