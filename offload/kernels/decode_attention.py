"""The choice of who attends for few rows: the CPU's kernels, a GPU's, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.kernels.attention import Part
from offload.kernels.gpu import GpuKernels
from offload.kernels.gpu.tiling import SPAN as GPU_SPAN
from offload.kernels.kv_codes import KVCodes
from offload.kernels.native import Kernels
from offload.kernels.rope import RopeTable
from offload.kernels.spans import SPAN, Rows, SpanAttention

MASS_DTYPE = torch.bfloat16  # that a GPU keeps masses in, row by row: they only rank chunks


class DecodeAttention(Protocol):
    """One attention at a time: `begin`, `append_rows` and `attend` as tiles come, then `merge` or `part`.
    See `SpanAttention`.

    span: tokens of a span; a run's first slot is the number of spans before it.
    """

    @property
    def span(self) -> int: ...

    def run(
        self, tensor: Tensor, *, first: int, tokens: int, slot: int, query: int = 0, windowed: bool = False
    ) -> Any: ...

    def coded_run(self, codes: KVCodes, layer: int, *, tokens: int, slot: int) -> Any: ...

    def begin(self, rows: Rows, num_slots: int, *, masses: bool = False, lasts: Sequence[int] = ()) -> None: ...

    def append_rows(self, run: Any) -> None: ...

    def attend(self, run: Any) -> None: ...

    def merge(self) -> tuple[Tensor, Tensor | None]: ...

    def part(self) -> Part: ...


def decode_attention(
    kernels: Kernels | GpuKernels,
    rope: RopeTable,
    *,
    dtype: torch.dtype,
    page: int | None = None,
    chunk: int | None = None,
) -> DecodeAttention | None:
    """Attention by these kernels over pages of `page` tokens, None: over single pages of any length. None where there
    are no kernels: torch's operators attend then. rope: rounded to `dtype`. chunk: tokens that a mass is of."""
    if isinstance(kernels, GpuKernels):
        if not kernels.usable:
            return None
        from offload.kernels.gpu.attention import GpuAttention  # it imports Triton, which not every machine has

        span = GPU_SPAN if page is None else gcd(GPU_SPAN, page)
        return GpuAttention(rope, dtype=dtype, span=span, chunk=chunk, mass_dtype=MASS_DTYPE)
    if kernels.library is None:
        return None
    return SpanAttention(kernels, rope, dtype=dtype, span=SPAN if page is None else gcd(SPAN, page), chunk=chunk)
