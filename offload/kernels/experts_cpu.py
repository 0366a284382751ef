"""Mixtures of experts by the CPU's kernels (native/experts.h), see `kernels.experts`. A row's bits depend on the row
alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from offload.config.networks import Experts
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.kernels.experts import Bank, ExpertHomes, Mixture
from offload.kernels.products import Step, address, structure_of, widened_floats
from offload.native import interface as native
from offload.native.interface import DTYPES, Library

MOST_ROWS = 512  # at a time
_LINE = 64  # bytes
_Parts = list[tuple[tuple[int, ...], torch.dtype]]  # the shape and dtype of each piece of scratch
_spare: list[Tensor] = []  # scratch, kept for the next call, which takes it out meanwhile


def run_experts(
    mixture: Mixture,
    homes: ExpertHomes,
    rows: Tensor,
    beside: Tensor | None = None,
    real: Tensor | None = None,
    latents: Tensor | None = None,
    *,
    kernels: Library,
) -> Tensor:
    """See `kernels.experts.RunExperts`. rows, latents, matrices and `beside` are contiguous. Temporary memory:
    `scratch_bytes` of at most MOST_ROWS rows."""
    if real is not None:
        out = torch.zeros_like(rows if latents is None else latents)
        others, kept = (None if each is None else each[real] for each in (beside, latents))
        out[real] = run_experts(mixture, homes, rows[real], others, latents=kept, kernels=kernels)
        return out
    out = torch.empty_like(rows if latents is None else latents)
    besides, reads = (repeat(None) if each is None else each.split(MOST_ROWS) for each in (beside, latents))
    for some, other, read, to in zip(rows.split(MOST_ROWS), besides, reads, out.split(MOST_ROWS), strict=False):
        parts = _parts(mixture.experts, len(some), rows.shape[1], rows.dtype)
        need = _total_bytes(parts)
        scratch = _spare.pop() if _spare else torch.empty(0, dtype=torch.uint8)
        if len(scratch) < need:
            scratch = torch.empty(need, dtype=torch.uint8)
        _run(mixture, homes, some, read, other, to, list(_views(scratch, parts)), kernels)
        _spare[:] = [scratch]
    return out


def scratch_bytes(experts: Experts, num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of temporary memory for `num_rows` rows."""
    return _total_bytes(_parts(experts, num_rows, hidden_size, dtype))


def _total_bytes(parts: _Parts) -> int:
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in parts)


def _parts(experts: Experts, num_rows: int, hidden: int, dtype: torch.dtype) -> _Parts:
    """The shapes and dtypes of scratch, ordered as `_run` takes them."""
    size, row, pairs = experts.network.size, experts.row_size(hidden), num_rows * experts.used
    lines = pairs + min(pairs, experts.count) * (EXPERT_ALIGNMENT - 1)
    floats, integers = torch.float32, torch.int32
    return [
        ((lines, size), dtype), ((lines, row), dtype),
        *(((widened_floats(lines, inputs),), floats) for inputs in (row, row, size)),
        ((num_rows, hidden), floats), ((num_rows, experts.num_scores), floats), ((pairs,), integers),
        ((lines,), integers), ((lines,), integers), ((2, experts.count), integers), ((pairs,), integers),
        ((pairs,), floats),
    ]  # fmt: skip


def _views(scratch: Tensor, parts: _Parts) -> Iterator[Tensor]:
    start = 0
    for shape, dtype in parts:
        num_bytes = math.prod(shape) * dtype.itemsize
        yield scratch[start : start + num_bytes].view(dtype).view(shape)
        start += _padded(num_bytes)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _run(
    mixture: Mixture,
    homes: ExpertHomes,
    rows: Tensor,
    latents: Tensor | None,
    beside: Tensor | None,
    out: Tensor,
    scratch: list[Tensor],
    kernels: Library,
) -> None:
    experts, router, norm = mixture.experts, mixture.router, mixture.norm
    read, own_norm = (rows, norm) if latents is None else (latents, None)
    assert rows.shape[1] % EXPERT_ALIGNMENT == read.shape[1] % EXPERT_ALIGNMENT == 0
    assert read.is_contiguous()
    assert rows.is_contiguous()
    assert router.matrix.is_contiguous()
    assert router.matrix.dtype == torch.float32
    assert beside is None or beside.is_contiguous()
    inner, made, first_widened, second_widened, inner_widened, *others = scratch

    def products_in(bank: Bank) -> tuple[Step, native.Product, native.Product]:
        first = bank.places[0]
        gate = Step(read, first.up, first.gate_up_bias, inner, own_norm, "activate", activation=activation)
        if first.gate is not None:
            gate = replace(gate, weight=first.gate, up=first.up, ending="gate")
        down = structure_of(Step(inner, first.down, first.down_bias, made), (inner_widened, inner_widened))
        return gate, structure_of(gate, (first_widened, second_widened)), down

    bank, activation = homes.bank, experts.network.activation
    gate, *products = products_in(bank)
    structure = native.Experts(
        structure_of(replace(gate, x=rows, norm=router.norm or norm), (first_widened, second_widened)),
        *products,
        None,
        *(address(each) for each in (router.matrix, router.bias, router.scale)),
        *(each.data_ptr() for each in others),
        address(beside),
        out.data_ptr(),
        bank.step,
        experts.count,
        experts.num_scores,
        experts.used,
        len(made),
        experts.renormalised,
        experts.scoring == "sigmoid",
        experts.bias == "scores",
        experts.needs_softmax,
        experts.ranks_scores,
        experts.groups,
        experts.groups_used,
        experts.group_best,
        experts.floored,
        experts.rounded != "none",
        experts.rounded == "shares",
        experts.score_scale,
        experts.score_cap or 0.0,
        *experts.factors,
        experts.eps,
    )
    dtype, at, threads = DTYPES[rows.dtype], ctypes.byref(structure), torch.get_num_threads()
    kernels.library.route(dtype, at, len(rows), threads)
    found = others[-2].view(len(rows), experts.used)
    for batch in homes.batches(found):
        if batch.bank is not bank:
            bank = batch.bank
            _, structure.gate_up, structure.down = products_in(bank)
            structure.step = bank.step
        structure.bank_place = batch.places.data_ptr()
        kernels.library.run_experts(dtype, at, threads)
    kernels.library.sum_experts(dtype, at, len(rows), threads)
