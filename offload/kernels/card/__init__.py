"""A card's own kernels, in Triton: which of them this process may use, or the reason for none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from offload.kernels.native import OFF, VARIABLE, wanted
from offload.plan.machine import installed_version
from offload.plan.sizing import WIDEST_CARD_HEAD

_NEWEST_WITHOUT = (7, 5)  # compute capability: bf16 products and copies past the registers came after it
_NARROWEST_HEAD = 16


@dataclass(frozen=True)
class Card:
    """Triton's version, with which the kernels are compiled when they are first launched; else the reason for none."""

    triton: str = ""
    reason: str = ""

    @property
    def usable(self) -> bool:
        return not self.reason


@cache
def card(device: torch.device) -> Card:
    """What this process may use on `device`. Errors: UsageError if TRIFORCE_KERNELS is neither on nor off."""
    if not wanted(VARIABLE):
        return Card(reason=OFF)
    if device.type != "cuda":
        return Card(reason=f"they are for CUDA devices, not for {device.type}")
    if torch.version.cuda is None:
        return Card(reason="torch was built without CUDA")
    if (version := installed_version("triton")) is None:
        return Card(reason="triton is not installed; pip install triton")
    if torch.cuda.get_device_capability(device) <= _NEWEST_WITHOUT:
        return Card(reason="they need a GPU of compute capability 8.0 or later")
    return Card(version)


def fitting(device: torch.device, head_dim: int) -> Card:
    """What a model with such heads may use on `device`."""
    if not _NARROWEST_HEAD <= head_dim <= WIDEST_CARD_HEAD or head_dim % 16:
        return Card(reason=f"they know heads of 16, 32, ... 256 numbers, not of {head_dim}")
    return card(device)
