"""The rows of latent attention before and after a cache attends, in the order of its heads' numbers: each half of the
numbers with positions stands before a half of the others, so that caches rotate and store them as those of any head."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.mixers import Latent


def in_halves(rotated: Tensor, others: Tensor) -> Tensor:
    """Numbers with positions [..., R] and without [..., N] -> [..., R + N], as a cache takes them."""
    return torch.cat([each.unflatten(-1, (2, -1)) for each in (rotated, others)], -1).flatten(-2)


def values_of(attended: Tensor, latent: Latent) -> Tensor:
    """Attended rows [T, H * (R + N)] -> their numbers without positions [T, H, 2, N / 2], a view."""
    halves: Tensor = attended.unflatten(1, (-1, 2, (latent.rank + latent.rotated) // 2))
    values: Tensor = halves[..., latent.rotated // 2 :]
    return values
