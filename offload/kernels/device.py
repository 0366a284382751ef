"""The table of a device's kernels: each operation that caches and weights ask of the device their tensors are on.

`cpu.py` and `gpu/kernels.py` fill it, `choice.py` finds the table of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload.config.mixers import DeltaRule, DilatedConvolution, Mamba2, Recurring, ShortConvolution
from offload.config.networks import Activation
from offload.formats.layout import ALL_TOKENS, Packing, PageShape
from offload.formats.quantised import Codes
from offload.formats.quantised_kv import KVCodes, Order, encode_with_torch
from offload.formats.stored import StoredMatrix
from offload.kernels.activation import gated
from offload.kernels.block_slots import TakeSlots, take_slots
from offload.kernels.choosing import choose
from offload.kernels.convolution import dilated_convolution, short_convolution
from offload.kernels.delta import delta_rule
from offload.kernels.experts import RunExperts
from offload.kernels.mamba import mamba2
from offload.kernels.operators import OperatorAttention
from offload.kernels.prefill import PrefillAttention
from offload.kernels.recurrence import RunRecurrence
from offload.kernels.runs import RunAttention
from offload.kernels.streams import BY_TORCH, StreamKernels


class MakeAttention(Protocol):
    """Attention of few rows over pages of `page` tokens, None: over single pages of any length. chunk: tokens that a
    mass is of."""

    def __call__(self, *, dtype: torch.dtype, page: int | None = None, chunk: int | None = None) -> RunAttention: ...


class CopyChunks(Protocol):
    """A copy of chunks from raw tiles to a buffer, see `kernels.gpu.copies.chunks`."""

    def __call__(
        self, homes: Tensor, wanted: Tensor, held: Tensor, *, chunk: int, page: int, tile: int, slot: int = 0,
        tokens: range = ALL_TOKENS,
    ) -> None: ...  # fmt: skip


class CopyPackedChunks(Protocol):
    """A copy of chunks from packed pages to a buffer, see `formats.packed_gpu.packed_chunks`."""

    def __call__(
        self, blocks: Tensor, flags: Tensor, wanted: Tensor, held: Tensor, packing: Packing, *, chunk: int, page: int,
        slot: int = 0, tokens: range = ALL_TOKENS,
    ) -> None: ...  # fmt: skip


class CopyNewRows(Protocol):
    """A copy of new rows home and into a block cache, see `kernels.gpu.copies.new_rows`."""

    def __call__(
        self, rows: Tensor, positions: Tensor, slot_of: Tensor, held: Tensor, homes: Tensor, *, size: int, page: int,
        tile: int,
    ) -> None: ...  # fmt: skip


Gated = Callable[[Tensor, Activation], Tensor]


@dataclass(frozen=True)
class Copies:
    """Copies by a GPU's own kernels, which read and write the host's pinned memory themselves.

    rows: see `kernels.gpu.copies.table_rows`. quantise_kv: of what was copied; see `formats.quantised_kv_gpu.encode`.
    """

    chunks: CopyChunks
    packed_chunks: CopyPackedChunks
    new_rows: CopyNewRows
    rows: Callable[[Tensor, Tensor, Tensor], None]
    quantise_kv: Callable[[Tensor, KVCodes, Tensor], None]


def _operator_attention(*, dtype: torch.dtype, page: int | None = None, chunk: int | None = None) -> RunAttention:
    return OperatorAttention(dtype=dtype, chunk=chunk)


def _no_prefill(page: int) -> None:
    return None


def _multiply(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    return linear(x, codes.matrix(x.dtype), bias)


def _multiply_stored(x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
    if x.device.type != "cpu":
        return linear(x, stored.matrix(x.dtype), bias)
    return linear(x.float(), stored.matrix(torch.float32), None if bias is None else bias.float()).to(x.dtype)


def _refused(*_: object) -> None:
    raise NotImplementedError("this needs a device's own kernels; `usable` says whether they run")


@dataclass(frozen=True, kw_only=True)
class DeviceKernels:
    """Kernels of one device, on which all tensors are. Defaults: torch's operators, or a refusal.

    reason: why the device's own kernels do not run, in words for the user; "" where they do. whose: the device's kind,
    for messages. name: of what runs, with the number of its interface, for measurements. order: of codes of keys and
    values.
    """

    reason: str = ""
    whose: str = "CPU"
    name: str = "torch 2"  # blocks of 16 rows
    order: Order = "lanes"

    attention: MakeAttention = _operator_attention
    # Attention of many rows of 16 bits over pages of so many tokens. None: torch's operators attend.
    prefill: Callable[[int], PrefillAttention | None] = _no_prefill
    # Blocks of tokens by a layer's index: see `kernels.choosing.choose`.
    choose: Callable[[Tensor, Tensor, Tensor, int], Tensor] = choose
    # Of a cache of blocks that rows chose.
    take_slots: TakeSlots = take_slots
    # x [T, inputs] times the matrix, transposed, plus bias [outputs] or None, in the dtype of x.
    multiply: Callable[[Tensor, Codes, Tensor | None], Tensor] = _multiply
    # The same with a matrix as a checkpoint stores it: with its numbers rounded to the dtype of x, or, on a CPU without
    # kernels, in fp32. Temporary memory: its numbers, unless the kernels know how to do without.
    multiply_stored: Callable[[Tensor, StoredMatrix, Tensor | None], Tensor] = _multiply_stored
    # Its numbers, [outputs, inputs] of that dtype, in memory of their own.
    decode_stored: Callable[[StoredMatrix, torch.dtype], Tensor] = StoredMatrix.matrix
    # See `kernels.activation.gated`.
    gated: Gated = gated
    # Of rows of several residual streams.
    streams: StreamKernels = BY_TORCH
    # By the kind of the recurrence: see `kernels.recurrence.RunRecurrence`.
    recurrences: Mapping[type[Recurring], RunRecurrence[Any]] = field(
        default_factory=lambda: {
            DeltaRule: delta_rule,
            Mamba2: mamba2,
            ShortConvolution: short_convolution,
            DilatedConvolution: dilated_convolution,
        }
    )
    # See `kernels.experts.RunExperts`. None: torch's operators run them, in blocks that their caller knows.
    experts: RunExperts | None = None
    # The same for any number of a prefill's rows: bits depend on the row alone, and may be others than in a pass.
    prefill_experts: RunExperts | None = None
    # The codes of a weight, [outputs, inputs] contiguous: see `formats.quantised.encode`.
    quantise: Callable[[Tensor, Codes], None] = _refused
    # See `formats.quantised_kv.encode`, `formats.packed` and `formats.residuals`.
    quantise_kv: Callable[[Tensor, KVCodes], None] = encode_with_torch
    unpack_numbers: Callable[[Tensor, Tensor, Tensor, Packing], None] = _refused
    unpack_tile: Callable[[Tensor, Tensor, Tensor, Tensor, Packing], None] = _refused
    restore: Callable[[Tensor, int, Codes, Tensor], None] = _refused
    restore_tile: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, PageShape], None] = _refused
    copies: Copies | None = None

    @property
    def usable(self) -> bool:
        """Whether the device's own kernels run."""
        return not self.reason


NONE = DeviceKernels(reason="not asked for")
