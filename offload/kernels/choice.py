"""Which kernels of its own a device has in this process, or the reason for none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from offload.config.model import ModelConfig
from offload.formats.layout import WIDEST_GPU_HEAD
from offload.kernels import cpu
from offload.kernels.cpu import OFF, VARIABLE, wanted
from offload.kernels.device import DeviceKernels
from offload.kernels.gpu.flash import PAGE_STEP, WIDEST_HEAD, FlashTiles, flash
from offload.kernels.prefill import PrefillAttention
from offload.machine import installed_version

_NEWEST_WITHOUT = (7, 5)  # compute capability: bf16 products and copies past the registers came after it
_NARROWEST_HEAD = 16


@cache
def gpu_kernels(device: torch.device) -> DeviceKernels:
    """The kernels that this process may use on `device`, a GPU. Errors: UsageError if TRIFORCE_KERNELS is neither on
    nor off."""
    if not wanted(VARIABLE):
        return DeviceKernels(reason=OFF, whose="GPU")
    if device.type != "cuda":
        return DeviceKernels(reason=f"they are for CUDA devices, not for {device.type}", whose="GPU")
    if torch.version.cuda is None:
        return DeviceKernels(reason="torch was built without CUDA", whose="GPU")
    if installed_version("triton") is None:
        return DeviceKernels(reason="triton is not installed; pip install triton", whose="GPU")
    if torch.cuda.get_device_capability(device) <= _NEWEST_WITHOUT:
        return DeviceKernels(reason="they need a GPU of compute capability 8.0 or later", whose="GPU")
    from offload.kernels.gpu.kernels import GPU_KERNELS  # it imports Triton, which not every machine has

    return GPU_KERNELS


def fitting(device: torch.device, head_dim: int, products: Sequence[tuple[int, int, bool]]) -> DeviceKernels:
    """The kernels of `device` for a model with heads of `head_dim` numbers and with `products`, see `cpu.fitting`."""
    if device.type == "cpu":
        return cpu.fitting(device, head_dim, products)
    if not _NARROWEST_HEAD <= head_dim <= WIDEST_GPU_HEAD or head_dim % 16:
        return DeviceKernels(reason=f"they know heads of 16, 32, ... 256 numbers, not of {head_dim}", whose="GPU")
    return gpu_kernels(device)


def of_model(device: torch.device, config: ModelConfig) -> DeviceKernels:
    """The kernels of `device` for a model, whose layers may have heads of several sizes: none if one size has none."""
    if device.type == "cpu":
        return cpu.of_model(device, config)
    found = [fitting(device, head_dim, config.all_products) for head_dim in config.head_dims]
    return next((each for each in found if not each.usable), found[0])


def prefill_attention(device: torch.device, head_dim: int, *, page: int, windows: bool) -> PrefillAttention | None:
    """The attention of a prefill in 16 bits on `device` over pages of `page` tokens: flash-attn's, else Triton's. None:
    torch's operators attend. windows: whether layers have a window; then flash-attn is not used."""
    call = None if windows else flash(device).call
    if call is not None and head_dim <= WIDEST_HEAD and head_dim % 8 == 0 and page % PAGE_STEP == 0:
        return FlashTiles(call)
    return fitting(device, head_dim, ()).prefill(page)
