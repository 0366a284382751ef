"""Checks that a device computes recurrent states correctly, at the shape of a well-known model; part of `triforce
doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from offload.bench.findings import TOLERANCES, Named, Shown, error_of
from offload.config.block import DeltaRule, Mamba2, Norm
from offload.kernels import choice
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.norms import NormWeights
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.kv.layer_states import LayerStates
from offload.model.loading import DTYPES
from offload.speed.hardware import Hardware
from offload.transfer.memory import Memory

# A quarter of the heads.
STATES: dict[str, DeltaRule | Mamba2] = {
    "Qwen3.6-27B": DeltaRule(4, 12, 128, 128, norm=Norm(fp32=True)),
    "Nemotron 3 Nano": Mamba2(2, 16, 128, 64, norm=Norm(fp32=True)),
}
HEAD_DIM = 256  # of a layer that attends
NUM_ROWS = 40
ROUNDS = ((24, 24), (1, 1), (6, 3), (12, 12))  # rows of a pass, and how many of them stay


def state_checks(hardware: Hardware, dtypes: Sequence[str], remedy: str) -> Iterator[Named]:
    """The checks of one device in each of `dtypes`."""
    for model, states in STATES.items():
        for dtype in dtypes:
            yield f"states, {model}, {dtype}", partial(_states, hardware, dtype, states), remedy


def _states(hardware: Hardware, dtype: str, states: DeltaRule | Mamba2) -> Shown:
    """Compare passes of which rows are rejected with torch's operators in fp32, and check that a row has the same bits
    alone."""
    device, rows = torch.device(hardware.device), _random(NUM_ROWS, sum(states.parts), seed=1).to(DTYPES[dtype])
    kernels = choice.fitting(device, HEAD_DIM, ())
    together = _run(kernels, device, states, rows, ROUNDS)
    alone = _run(kernels, device, states, rows, ((1, 1),) * NUM_ROWS)
    error, same = error_of(together, _expected(states, rows).double()), torch.equal(together, alone)
    bits = "the same bits" if same else "OTHER BITS"
    shown = f"errors of up to {error:.1e}, at most {TOLERANCES[dtype]:.0e}; {bits} of rows together and one at a time"
    return same and error <= TOLERANCES[dtype], shown


def _run(
    kernels: DeviceKernels,
    device: torch.device,
    recurrence: DeltaRule | Mamba2,
    rows: Tensor,
    rounds: Sequence[tuple[int, int]],
) -> Tensor:
    """The output of `rows` in passes, each of which is followed by wrong rows, [n, out_size] on the CPU."""
    memory, start, out = Memory(device), 0, list[Tensor]()
    states = LayerStates(memory, recurrence, num_layers=1, rows=NUM_ROWS, dtype=rows.dtype, kernels=kernels)
    weights = _weights(recurrence, device)
    for count, kept in rounds:
        some = rows[start : start + kept]
        wrong = rows.flip(0)[: count - kept]
        states.begin(start, count)
        found = states.run(0, start, torch.cat([some, wrong]).to(device), weights, settles=False)
        out.append(found[:kept].cpu())
        start += kept
    states.release()
    return torch.cat(out)


def _expected(states: DeltaRule | Mamba2, rows: Tensor) -> Tensor:
    """The output of `rows` by torch's operators in fp32, one row after the other."""
    held = Held(torch.zeros(states.state_shape), torch.zeros(states.width - 1, states.kept))
    run, weights = NONE.recurrences[type(states)], _weights(states, torch.device("cpu"))
    return run(states, weights, held, rows.float(), Replayed(0), settles=True)


def _weights(states: DeltaRule | Mamba2, device: torch.device) -> RecurrenceWeights:
    vectors = {name: _random(*shape, seed=at) for at, (name, shape) in enumerate(states.vectors.items(), 2)}
    vectors |= {"taps": vectors["taps"] / 2, "decay": -vectors["decay"].exp()}
    assert states.norm is not None
    norm = NormWeights(states.norm, (1 + _random(states.norm_size, seed=9) / 4).to(device))
    return RecurrenceWeights(**{name: each.to(device) for name, each in vectors.items()}, norm=norm)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
