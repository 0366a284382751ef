"""What a device's own kernels do for caches and weights, whichever device it is. `kernels.choice` finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload.formats.layout import ALL_TOKENS, Packing, PageShape
from offload.formats.quantised import Codes
from offload.formats.quantised_kv import KVCodes, Order, encode_with_torch
from offload.formats.stored import StoredMatrix
from offload.kernels.operators import OperatorAttention
from offload.kernels.prefill import PrefillAttention
from offload.kernels.runs import RunAttention


class DeviceKernels:
    """Kernels of one device, on which all tensors are. Here: what there is without them.

    usable: whether they run; reason: else, why not, in words for the user. whose: the device's kind, for messages.
    order: of codes of keys and values. reads_host: whether `copy_rows` and copies of chunks are there, which read the
    host's pinned memory themselves.
    """

    usable: ClassVar[bool] = True
    whose: str = "CPU"
    order: ClassVar[Order] = "lanes"
    reads_host: ClassVar[bool] = False
    reason: str = ""

    @property
    def name(self) -> str:
        """Of what runs, with the number of its interface, for measurements."""
        return "torch 2"  # blocks of 16 rows

    def attention(self, *, dtype: torch.dtype, page: int | None = None, chunk: int | None = None) -> RunAttention:
        """Attention of few rows over pages of `page` tokens, None: over single pages of any length. chunk: tokens that
        a mass is of."""
        return OperatorAttention(dtype=dtype, chunk=chunk)

    def prefill(self, page: int) -> PrefillAttention | None:
        """Attention of many rows of 16 bits over pages of `page` tokens. None: torch's operators attend."""
        return None

    def multiply(self, x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
        """x [T, inputs] times the matrix, transposed, plus bias [outputs], in the dtype of x."""
        return linear(x, codes.matrix(x.dtype), bias)

    def multiply_stored(self, x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
        """The same with a matrix as a checkpoint stores it. Temporary memory: its numbers in the dtype of x, unless
        the kernels know how to do without."""
        return linear(x, self.decode_stored(stored, x.dtype), bias)

    def decode_stored(self, stored: StoredMatrix, dtype: torch.dtype) -> Tensor:
        """Its numbers, [outputs, inputs] of `dtype`, in memory of their own."""
        return stored.matrix(dtype)

    def quantise(self, weight: Tensor, into: Codes) -> None:
        """Fill `into` with the codes of weight, [outputs, inputs] contiguous."""
        raise NotImplementedError

    def quantise_kv(self, rows: Tensor, into: KVCodes, wanted: Tensor | None = None) -> None:
        """Fill `into` with the codes of rows, [L, 2, H_kv, tokens, D]. wanted, of a GPU's kernels: int64 [L, H_kv,
        groups], the groups that are negative stay as they are."""
        assert wanted is None
        encode_with_torch(rows, into)

    def unpack_numbers(self, content: Tensor, starts: Tensor, out: Tensor, packing: Packing) -> None:
        """See `formats.packed.unpack_numbers`."""
        raise NotImplementedError

    def unpack_tile(self, tile: Tensor, slot: Tensor, flags: Tensor, starts: Tensor, packing: Packing) -> None:
        """See `formats.packed.unpack_tile`."""
        raise NotImplementedError

    def restore(self, content: Tensor, escapes: int, codes: Codes, out: Tensor) -> None:
        """See `formats.residuals.restore`."""
        raise NotImplementedError

    def restore_tile(
        self, tile: Tensor, slot: Tensor, flags: Tensor, starts: Tensor, codes: Tensor, first_group: int,
        shape: PageShape,
    ) -> None:  # fmt: skip
        """See `formats.residuals.restore_tile`."""
        raise NotImplementedError

    def copy_chunks(
        self, homes: Tensor, wanted: Tensor, held: Tensor, *, chunk: int, page: int, tile: int, slot: int = 0,
        tokens: range = ALL_TOKENS,
    ) -> None:  # fmt: skip
        """See `kernels.gpu.copies.chunks`."""
        raise NotImplementedError

    def copy_packed_chunks(
        self, blocks: Tensor, flags: Tensor, wanted: Tensor, held: Tensor, packing: Packing, *, chunk: int, page: int,
        slot: int = 0, tokens: range = ALL_TOKENS,
    ) -> None:  # fmt: skip
        """See `formats.packed_gpu.packed_chunks`."""
        raise NotImplementedError

    def copy_rows(self, address: Tensor, tokens: Tensor, out: Tensor) -> None:
        """See `kernels.gpu.copies.table_rows`."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoKernels(DeviceKernels):
    """The reason for none. torch's operators run, where they can."""

    reason: str
    whose: str = "CPU"
    usable: ClassVar[bool] = False


NONE = NoKernels("not asked for")
