"""The table of a GPU's kernels: Triton programs, which are compiled at their first launch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload.config.mixers import DeltaRule, DilatedConvolution, Mamba2, ShortConvolution
from offload.formats import packed_gpu, quantised, quantised_kv_gpu, residuals_gpu, stored_gpu
from offload.formats.stored import StoredMatrix
from offload.kernels.device import Copies, DeviceKernels
from offload.kernels.gpu import (
    activation,
    block_slots,
    choosing,
    convolution,
    copies,
    delta,
    experts,
    quantised_products,
    stored_products,
    streams,
)
from offload.kernels.gpu.attention import GpuAttention
from offload.kernels.gpu.halves import LatentTiles
from offload.kernels.gpu.prefill import TritonTiles
from offload.kernels.gpu.prefill_block import PAGE_STEP
from offload.kernels.gpu.tiling import SPAN
from offload.kernels.operators import OperatorAttention
from offload.kernels.prefill import PrefillAttention
from offload.kernels.runs import MASS_DTYPE, RunAttention


def _attention(*, dtype: torch.dtype, page: int | None = None, chunk: int | None = None) -> RunAttention:
    span = SPAN if page is None else gcd(SPAN, page)
    return GpuAttention(dtype=dtype, span=span, chunk=chunk, mass_dtype=MASS_DTYPE)


def _joined_attention(*, dtype: torch.dtype, page: int | None = None, chunk: int | None = None) -> RunAttention:
    if dtype.itemsize > 2:  # whose rows do not fit into shared memory
        return OperatorAttention(dtype=dtype, chunk=chunk)
    return _attention(dtype=dtype, page=page, chunk=chunk)


def _prefill(page: int) -> PrefillAttention | None:
    return None if page % PAGE_STEP else TritonTiles()


def _joined_prefill(page: int) -> PrefillAttention | None:
    return None if page % PAGE_STEP else LatentTiles()


def _multiply_stored(x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
    if len(x) > stored_products.MOST_ROWS or x.dtype.itemsize != 2:
        return linear(x, _decode_stored(stored, x.dtype), bias)
    return stored_products.product(x, stored, bias)


def _decode_stored(stored: StoredMatrix, dtype: torch.dtype) -> Tensor:
    out = torch.empty(stored.shape, dtype=dtype, device=stored.rows.device)
    stored_gpu.decode(stored, out)
    return out


COPIES = Copies(
    chunks=copies.chunks,
    packed_chunks=packed_gpu.packed_chunks,
    new_rows=copies.new_rows,
    rows=copies.table_rows,
    quantise_kv=quantised_kv_gpu.encode,
)
GPU_KERNELS = DeviceKernels(
    whose="GPU",
    order="matrices",
    attention=_attention,
    choose=choosing.choose,
    take_slots=block_slots.take_slots,
    prefill=_prefill,
    multiply=quantised_products.product,
    multiply_stored=_multiply_stored,
    gated=activation.gated,
    streams=streams.BY_TRITON,
    recurrences={
        DeltaRule: delta.run_states,
        Mamba2: delta.run_states,
        ShortConvolution: convolution.convolution,
        DilatedConvolution: convolution.convolution,
    },
    experts=experts.run_experts,
    prefill_experts=partial(experts.run_experts, in_prefill=True),
    decode_stored=_decode_stored,
    quantise=quantised.encode_in_parts,
    quantise_kv=quantised_kv_gpu.encode,
    unpack_numbers=packed_gpu.unpack_numbers,
    unpack_tile=packed_gpu.unpack_tile,
    restore=residuals_gpu.restore,
    restore_tile=residuals_gpu.restore_tile,
    copies=COPIES,
)
# Of rows that are both key and value (`Scoring.joined`): the host fetches.
JOINED_KERNELS = replace(GPU_KERNELS, attention=_joined_attention, prefill=_joined_prefill, copies=None)
