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


class HostRows:
    """The rows of a pass on the host, with the experts that each of them has chosen, for those experts that the CPU
    runs. They are copied at once, before the device is given other work, and the copy waits for the device."""

    def __init__(self, rows: Tensor, chosen: Tensor) -> None:
        """rows: [T, inputs], normed, or latents. chosen: integers [T, used]; the experts' number stands for none."""
        self._rows, self.chosen = rows.to(_HOST).contiguous(), chosen.to(_HOST, torch.int32).contiguous()

    def run(self, experts: Experts, batch: Batch, made: Tensor) -> None:
        """Fill the rows of `made`, [T * used, outputs] on the device, of the pairs whose experts are in a batch in host
        memory; in fixed point where they have integers."""
        own = kernels()
        assert isinstance(own, CpuKernels), "a plan has the CPU run experts only where it has kernels"
        pairs, found = run_share(experts, batch.bank, batch.places, self._rows, self.chosen, kernels=own)
        made.index_copy_(0, pairs.to(made.device), found.to(made.device))
