"""A GPU's kernels: Triton programs, which are compiled at their first launch."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import torch
from torch import Tensor

from offload.formats import packed_gpu, quantised, quantised_kv_gpu, residuals_gpu, stored_gpu
from offload.formats.layout import ALL_TOKENS, Packing, PageShape
from offload.formats.quantised import Codes
from offload.formats.quantised_kv import KVCodes, Order
from offload.formats.stored import StoredMatrix
from offload.kernels.device import DeviceKernels
from offload.kernels.gpu import copies, quantised_products, stored_products
from offload.kernels.gpu.attention import GpuAttention
from offload.kernels.gpu.prefill import PAGE_STEP, TritonTiles
from offload.kernels.gpu.tiling import SPAN
from offload.kernels.prefill import PrefillAttention
from offload.kernels.runs import MASS_DTYPE, RunAttention


@dataclass(frozen=True)
class GpuKernels(DeviceKernels):
    """`DeviceKernels` of a GPU."""

    whose: str = "GPU"
    order: ClassVar[Order] = "matrices"
    reads_host: ClassVar[bool] = True

    def attention(self, *, dtype: torch.dtype, page: int | None = None, chunk: int | None = None) -> RunAttention:
        span = SPAN if page is None else gcd(SPAN, page)
        return GpuAttention(dtype=dtype, span=span, chunk=chunk, mass_dtype=MASS_DTYPE)

    def prefill(self, page: int) -> PrefillAttention | None:
        return None if page % PAGE_STEP else TritonTiles()

    def multiply(self, x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
        return quantised_products.product(x, codes, bias)

    def multiply_stored(self, x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
        if len(x) > stored_products.MOST_ROWS or x.dtype.itemsize != 2:
            return super().multiply_stored(x, stored, bias)
        return stored_products.product(x, stored, bias)

    def decode_stored(self, stored: StoredMatrix, dtype: torch.dtype) -> Tensor:
        out = torch.empty(stored.shape, dtype=dtype, device=stored.rows.device)
        stored_gpu.decode(stored, out)
        return out

    def quantise(self, weight: Tensor, into: Codes) -> None:
        quantised.encode_in_parts(weight, into)

    def quantise_kv(self, rows: Tensor, into: KVCodes, wanted: Tensor | None = None) -> None:
        quantised_kv_gpu.encode(rows, into, wanted)

    def unpack_numbers(self, content: Tensor, starts: Tensor, out: Tensor, packing: Packing) -> None:
        packed_gpu.unpack_numbers(content, starts, out, packing)

    def unpack_tile(self, tile: Tensor, slot: Tensor, flags: Tensor, starts: Tensor, packing: Packing) -> None:
        packed_gpu.unpack_tile(tile, slot, flags, starts, packing)

    def restore(self, content: Tensor, escapes: int, codes: Codes, out: Tensor) -> None:
        residuals_gpu.restore(content, escapes, codes, out)

    def restore_tile(
        self, tile: Tensor, slot: Tensor, flags: Tensor, starts: Tensor, codes: Tensor, first_group: int,
        shape: PageShape,
    ) -> None:  # fmt: skip
        residuals_gpu.restore_tile(tile, slot, flags, starts, codes, first_group, shape)

    def copy_chunks(
        self, homes: Tensor, wanted: Tensor, held: Tensor, *, chunk: int, page: int, tile: int, slot: int = 0,
        tokens: range = ALL_TOKENS,
    ) -> None:  # fmt: skip
        copies.chunks(homes, wanted, held, chunk=chunk, page=page, tile=tile, slot=slot, tokens=tokens)

    def copy_packed_chunks(
        self, blocks: Tensor, flags: Tensor, wanted: Tensor, held: Tensor, packing: Packing, *, chunk: int, page: int,
        slot: int = 0, tokens: range = ALL_TOKENS,
    ) -> None:  # fmt: skip
        packed_gpu.packed_chunks(blocks, flags, wanted, held, packing, chunk=chunk, page=page, slot=slot, tokens=tokens)

    def copy_rows(self, address: Tensor, tokens: Tensor, out: Tensor) -> None:
        copies.table_rows(address, tokens, out)
