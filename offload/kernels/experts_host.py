"""Experts that the CPU runs in host memory for another device: rows go to the host, and what the experts make of them
comes back."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.networks import Experts
from offload.kernels.cpu import CpuKernels, kernels
from offload.kernels.experts import Batch
from offload.kernels.experts_cpu import run_share

_HOST = torch.device("cpu")


def run_on_host(experts: Experts, batch: Batch, rows: Tensor, chosen: Tensor, made: Tensor) -> None:
    """Fill the rows of `made`, [T * used, outputs], of the pairs whose experts are in a batch in host memory. rows:
    [T, inputs], normed, or latents. chosen: of each row, integers [T, used]; the experts' number stands for none. All
    but the batch is on the device. In fixed point where the experts have integers. Waits for the device."""
    own, fixed = kernels(), batch.bank.places[0].has_integers
    assert isinstance(own, CpuKernels), "a plan has the CPU run experts only where it has kernels"
    given, wanted = rows.to(_HOST).contiguous(), chosen.to(_HOST, torch.int32).contiguous()
    pairs, found = run_share(experts, batch.bank, batch.places, given, wanted, fixed=fixed, kernels=own)
    made.index_copy_(0, pairs.to(made.device), found.to(made.device))
