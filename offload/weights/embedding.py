"""The embedding: a row of a table for each token, from the device's memory or the host's.

A pass reads a few rows of it, so where memory of a GPU is short the table is on the host and keeps room free there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offload.kernels import choice
from offload.transfer.memory import kernels_read_host, sent


@dataclass(frozen=True)
class Embedding:
    """table: [V, hidden], on the device or on the host."""

    table: Tensor
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def waits(self) -> bool:
        """Whether the host looks which rows are wanted, and waits for them: the table is not on the device, and no
        kernel of the device reads it."""
        return self._address is None and self.table.device != self.device

    def rows(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """tokens int64 [T] on the device -> [T, hidden] there, in `out` where that is given."""
        if self.table.device == self.device:
            return torch.index_select(self.table, 0, tokens, out=out)
        if out is None:
            out = torch.empty((len(tokens), self.table.shape[1]), dtype=self.dtype, device=self.device)
        if self._address is None:
            return out.copy_(self.table[tokens.cpu()])
        choice.gpu_kernels(self.device).copy_rows(self._address, tokens, out)
        return out

    @cached_property
    def _address(self) -> Tensor | None:
        """Of the table on the host, int64 [1] on the device, for a kernel that reads it there; None without one."""
        if (
            self.table.device == self.device
            or not choice.gpu_kernels(self.device).usable
            or not kernels_read_host(self.device)
        ):
            return None
        return sent(torch.tensor([self.table.data_ptr()]), self.device)
