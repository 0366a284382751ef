"""A GPU's own kernels, in Triton: which of them this process may use, or the reason for none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from offload.kernels.native import OFF, VARIABLE, wanted
from offload.plan.machine import installed_version
from offload.plan.sizing import WIDEST_GPU_HEAD

_NEWEST_WITHOUT = (7, 5)  # compute capability: bf16 products and copies past the registers came after it
_NARROWEST_HEAD = 16


@dataclass(frozen=True)
class GpuKernels:
    """Triton's version, with which the kernels are compiled when they are first launched; else the reason for none."""

    triton: str = ""
    reason: str = ""

    @property
    def usable(self) -> bool:
        return not self.reason


@cache
def gpu_kernels(device: torch.device) -> GpuKernels:
    """What this process may use on `device`. Errors: UsageError if TRIFORCE_KERNELS is neither on nor off."""
    if not wanted(VARIABLE):
        return GpuKernels(reason=OFF)
    if device.type != "cuda":
        return GpuKernels(reason=f"they are for CUDA devices, not for {device.type}")
    if torch.version.cuda is None:
        return GpuKernels(reason="torch was built without CUDA")
    if (version := installed_version("triton")) is None:
        return GpuKernels(reason="triton is not installed; pip install triton")
    if torch.cuda.get_device_capability(device) <= _NEWEST_WITHOUT:
        return GpuKernels(reason="they need a GPU of compute capability 8.0 or later")
    return GpuKernels(version)


def fitting(device: torch.device, head_dim: int) -> GpuKernels:
    """What a model with such heads may use on `device`."""
    if not _NARROWEST_HEAD <= head_dim <= WIDEST_GPU_HEAD or head_dim % 16:
        return GpuKernels(reason=f"they know heads of 16, 32, ... 256 numbers, not of {head_dim}")
    return gpu_kernels(device)
