"""The embedding: a row of a table for each token, from the device's memory or the host's.

A pass reads only a few rows, so if a GPU's memory is short, the table is on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offload.formats.stored import StoredMatrix
from offload.kernels import choice
from offload.transfer.memory import kernels_read_host, sent
from offload.weights.linear import numbers


@dataclass(frozen=True)
class Embedding:
    """The embedding of tokens. table: [V, hidden], on the device or on the host, as numbers of `dtype` or in the
    checkpoint's encoding."""

    table: Tensor | StoredMatrix
    device: torch.device
    dtype: torch.dtype

    @property
    def waits(self) -> bool:
        """Whether the host has to wait for the token ids and gather the rows: the table is not on the device, and no
        kernel of the device can read it."""
        return self._address is None and self._place != self.device

    @property
    def _place(self) -> torch.device:
        return self.table.rows.device if isinstance(self.table, StoredMatrix) else self.table.device

    def rows(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """The embedding rows: tokens int64 [T] on the device -> [T, hidden] on the device, in `out` if that is
        given."""
        if isinstance(self.table, StoredMatrix):
            chosen = self.table.rows[tokens.to(self._place)].to(self.device)
            found = numbers(StoredMatrix(chosen, self.table.encoding), self.dtype)
            return found if out is None else out.copy_(found)
        if self.table.device == self.device:
            return torch.index_select(self.table, 0, tokens, out=out)
        if out is None:
            out = torch.empty((len(tokens), self.table.shape[1]), dtype=self.dtype, device=self.device)
        if self._address is None or (copies := choice.gpu_kernels(self.device).copies) is None:
            return out.copy_(self.table[tokens.cpu()])
        copies.rows(self._address, tokens, out)
        return out

    @cached_property
    def _address(self) -> Tensor | None:
        """The address of the table on the host, int64 [1] on the device, for a kernel that reads it there; None without
        such a kernel."""
        if (
            isinstance(self.table, StoredMatrix)
            or self.table.device == self.device
            or choice.gpu_kernels(self.device).copies is None
            or not kernels_read_host(self.device)
        ):
            return None
        return sent(torch.tensor([self.table.data_ptr()]), self.device)
