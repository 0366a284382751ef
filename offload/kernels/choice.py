"""Which kernels of its own a device has in this process, or the reason for none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from offload.config.mixers import Attention
from offload.config.model import ModelConfig
from offload.formats.layout import WIDEST_GPU_HALF, WIDEST_GPU_HEAD
from offload.kernels import cpu
from offload.kernels.cpu import OFF, VARIABLE, wanted
from offload.kernels.device import DeviceKernels
from offload.kernels.gpu.flash import PAGE_STEP, WIDEST_HEAD, FlashTiles, flash
from offload.kernels.prefill import PrefillAttention
from offload.machine import installed_version

_NEWEST_WITHOUT = (7, 5)  # compute capability: bf16 products and copies past the registers came after it
_NARROWEST_HEAD = 16
_LATENT_STEP, _WIDEST_RANK = 32, 512  # of latents that a prefill's program attends to, in two halves


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


def fitting(
    device: torch.device, head_dim: int, products: Sequence[tuple[int, int, bool]], *, joined: bool = False
) -> DeviceKernels:
    """The kernels of `device` for a model with heads of `head_dim` numbers and with `products`, see `cpu.fitting`.
    joined: see `Scoring`."""
    if device.type == "cpu":
        return cpu.fitting(device, head_dim, products)
    if joined and head_dim % 32 == 0 and _NARROWEST_HEAD <= head_dim // 2 <= WIDEST_GPU_HALF:
        from offload.kernels.gpu.kernels import JOINED_KERNELS

        return found if not (found := gpu_kernels(device)).usable else JOINED_KERNELS
    if not _NARROWEST_HEAD <= head_dim <= WIDEST_GPU_HEAD or head_dim % 16:
        return DeviceKernels(
            reason=f"they know heads of 16, 32, ... {WIDEST_GPU_HEAD} numbers, not of {head_dim}", whose="GPU"
        )
    return gpu_kernels(device)


def of_attention(
    device: torch.device, attention: Attention, products: Sequence[tuple[int, int, bool]]
) -> DeviceKernels:
    """The kernels of `device` for the attention of some layers, see `fitting`."""
    return fitting(device, attention.head_dim, products, joined=attention.latent is not None)


def of_model(device: torch.device, config: ModelConfig) -> DeviceKernels:
    """The kernels of `device` for a model's layers, but for the attention of a GPU, see `fitting`. A CPU has some for
    all of them or none."""
    return cpu.of_model(device, config) if device.type == "cpu" else gpu_kernels(device)


def all_of_model(device: torch.device, config: ModelConfig) -> DeviceKernels:
    """The kernels of `device` for a model with its attention: none where some layer cannot run on them."""
    attentions = dict.fromkeys(block.attention for block in config.blocks if block.attends)
    found = [of_attention(device, each, config.all_products) for each in attentions]
    return next((each for each in (of_model(device, config), *found) if not each.usable), found[0])


def prefill_attention(
    device: torch.device, attention: Attention, *, page: int, windows: bool
) -> PrefillAttention | None:
    """The attention of a prefill in 16 bits on `device` over pages of `page` tokens: flash-attn's, else Triton's. None:
    torch's operators attend. windows: whether layers have a window; then flash-attn is not used, nor for latents."""
    latent = attention.latent
    if latent is not None and (latent.rank % _LATENT_STEP or latent.rank > _WIDEST_RANK):
        return None
    call = None if windows or latent is not None else flash(device).call
    head_dim = attention.head_dim
    if call is not None and head_dim <= WIDEST_HEAD and head_dim % 8 == 0 and page % PAGE_STEP == 0:
        return FlashTiles(call)
    return of_attention(device, attention, ()).prefill(page)
