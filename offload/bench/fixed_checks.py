"""Check that a GPU's stored experts have the bits of the CPU's kernels; part of `triforce doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from offload.bench.findings import Named, Shown
from offload.config.block import Encodings
from offload.config.networks import Experts, FeedForward
from offload.formats.encodings import ENCODINGS
from offload.kernels import cpu
from offload.kernels.choice import fitting
from offload.kernels.cpu import CpuKernels
from offload.kernels.device import DeviceKernels
from offload.kernels.experts import Bank, Mixture, Router
from offload.kernels.experts_cpu import run_share
from offload.model.loading import DTYPES
from offload.plan.what_if import LLAMA31_8B
from offload.speed.hardware import Hardware
from offload.weights.expert_layout import bank_of, layout_of
from offload.weights.experts import ResidentExperts

# One of each sort of codes and steps.
STORED = ("Q4_K", "Q6_K", "MXFP4", "Q8_0", "Q5_1", "IQ4_XS", "Q2_K", "IQ3_S", "IQ1_M", "TQ2_0", "NVFP4")
NUM_ROWS, INPUTS = 11, 512
EXPERT = Experts(FeedForward(256), 1, 1)  # whose weight is 1: the output is what it makes of a row
_MOST_BYTE = 0x2B  # with no larger byte no scale is infinite, and few sums are


def fixed_checks(hardware: Hardware, dtypes: Sequence[str], remedy: str) -> Iterator[Named]:
    """The checks of a GPU with kernels, beside those of the CPU."""
    device, host = torch.device(hardware.device), cpu.kernels()
    kernels = fitting(device, LLAMA31_8B.head_dim, ())
    if kernels.whose != "GPU" or kernels.experts is None or not isinstance(host, CpuKernels):
        return
    for dtype in dtypes:
        if dtype != "fp32":
            given = kernels, host, device, DTYPES[dtype]
            yield f"products, experts in fixed point, {dtype}", partial(_fixed, *given), remedy


def _fixed(kernels: DeviceKernels, host: CpuKernels, device: torch.device, dtype: torch.dtype) -> Shown:
    """Compare what an expert of each sort makes of some rows."""
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(NUM_ROWS, INPUTS, generator=generator) * 4 / INPUTS).to(dtype)
    router = Router(torch.zeros(1, INPUTS, device=device))
    others, equal, total = list[str](), 0, 0
    for name in STORED:
        encodings = Encodings(experts=(name,) * 3)
        config = LLAMA31_8B.changed(hidden_size=INPUTS)
        config = config.mapped(partial(replace, experts=EXPERT, encodings=encodings))
        layout = layout_of(config, dtype)
        content = torch.randint(_MOST_BYTE + 1, (1, layout.num_bytes), dtype=torch.uint8, generator=generator)
        bank = bank_of(layout, content)
        _made_numbers(bank, name)
        chosen, places = torch.zeros(NUM_ROWS, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        _, wanted = run_share(EXPERT, bank, places, rows, chosen, kernels=host)
        assert kernels.experts is not None
        there = ResidentExperts(bank_of(layout, content.to(device)))
        found = kernels.experts(Mixture(EXPERT, router), there, rows.to(device)).cpu()
        same = (found == wanted) | (found.isnan() & wanted.isnan())
        equal, total = equal + int(same.sum()), total + same.numel()
        others += [] if bool(same.all()) else [name]
    shown = f"{equal:,} of {total:,} numbers have the CPU's bits"
    return not others, f"{shown}{'; not in ' + ', '.join(others) if others else ''}"


def _made_numbers(bank: Bank, name: str) -> None:
    """Give blocks scales near one whose dtype makes of any bytes numbers of any size."""
    own, (weights,) = ENCODINGS[name], bank.places
    for each in (weights.gate, weights.up, weights.down):
        rows: Tensor = each.rows  # type: ignore[union-attr]
        if own.scale == "E8M0":
            rows.view(len(rows), -1, own.nbytes)[..., 0] = 124
        if own.tail:
            rows[:, -own.tail :] = torch.tensor([3.0]).view(torch.uint8)
