"""Where every long-lived byte comes from: the only module that allocates host and device blocks and that pins."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

Tier = Literal["host", "device"]


class Memory:
    """Allocates zeroed blocks on the compute device or on the host and keeps a ledger of bytes by tier and purpose.

    On a machine without a GPU both tiers are the same memory; the ledger still tells them apart. Host blocks are pinned
    where the device is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ledger: Counter[tuple[Tier, str]] = Counter()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, tier: Tier, purpose: str) -> Tensor:
        """A zeroed tensor: bytes that no row was written to must be finite, attention multiplies them by zero."""
        if tier == "device":
            block = torch.zeros(shape, dtype=dtype, device=self.device)
        else:
            block = torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        self._ledger[tier, purpose] += block.nbytes
        return block

    def released(self, block: Tensor, *, tier: Tier, purpose: str) -> None:
        """The owner of `block` drops it."""
        self._ledger[tier, purpose] -= block.nbytes

    def allocated(self) -> dict[Tier, dict[str, int]]:
        """Bytes in use now, by tier and purpose."""
        tiers: dict[Tier, dict[str, int]] = {"host": {}, "device": {}}
        for (tier, purpose), num_bytes in self._ledger.items():
            if num_bytes:
                tiers[tier][purpose] = num_bytes
        return tiers
