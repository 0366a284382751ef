"""Mixtures of experts by the CPU's kernels (native/experts.h), see `kernels.experts`. A row's bits depend on the row
alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

MOST_ROWS = 512  # at a time, of a pass
_LINE = 64  # bytes
_COLUMNS = 32  # outputs of a panel, at most
_ROUTED = ("normed", "scores", "line_of", "row_of", "expert_of", "starts", "chosen", "weights")
_Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]  # the shape and dtype of each piece of scratch, in their order
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
        _run(mixture, homes, some, read, other, to, kernels)
    return out


def run_many(
    mixture: Mixture,
    homes: ExpertHomes,
    rows: Tensor,
    beside: Tensor | None = None,
    real: Tensor | None = None,
    latents: Tensor | None = None,
    *,
    kernels: Library,
) -> Tensor:
    """The mixture over a prefill's rows, all at once, by products of many rows (native/panels.h): an expert's numbers
    are made once for all of its rows, and rounded to the dtype. Temporary memory: `scratch_bytes` of the rows."""
    assert real is None
    out = torch.empty_like(rows if latents is None else latents)
    _run(mixture, homes, rows, latents, beside, out, kernels, many=True)
    return out


def scratch_bytes(experts: Experts, num_rows: int, hidden_size: int, dtype: torch.dtype, *, threads: int = 0) -> int:
    """Bytes of temporary memory for `num_rows` rows of a pass, or of a prefill on so many threads."""
    return _total_bytes(_parts(experts, num_rows, hidden_size, dtype, threads))


def _total_bytes(parts: _Parts) -> int:
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in parts.values())


def _parts(experts: Experts, num_rows: int, hidden: int, dtype: torch.dtype, threads: int = 0) -> _Parts:
    """The shapes and dtypes of scratch. threads: of a prefill."""
    size, row, pairs = experts.network.size, experts.row_size(hidden), num_rows * experts.used
    lines = pairs + min(pairs, experts.count) * (EXPERT_ALIGNMENT - 1)
    floats, integers = torch.float32, torch.int32
    parts: _Parts = {"inner": ((lines, size), dtype), "made": ((lines, row), dtype)}
    if threads:
        parts["laid"] = (num_rows, row), dtype
        parts["decoded"] = (threads, 2, _COLUMNS, max(row, size)), dtype
    else:
        widened = (("first", row), ("second", row), ("third", size))
        parts |= {name: ((widened_floats(lines, inputs),), floats) for name, inputs in widened}
    return parts | {
        "normed": ((num_rows, hidden), floats),
        "scores": ((num_rows, experts.num_scores), floats),
        "line_of": ((pairs,), integers),
        "row_of": ((lines,), integers),
        "expert_of": ((lines,), integers),
        "starts": ((2, experts.count), integers),
        "chosen": ((num_rows, experts.used), integers),
        "weights": ((pairs,), floats),
    }


@contextmanager
def _scratch(parts: _Parts) -> Iterator[Mapping[str, Tensor]]:
    """Scratch for a call. It is kept for the next one."""
    need = _total_bytes(parts)
    block = _spare.pop() if _spare else torch.empty(0, dtype=torch.uint8)
    if len(block) < need:
        block = torch.empty(need, dtype=torch.uint8)
    views, start = {}, 0
    for name, (shape, dtype) in parts.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        views[name] = block[start : start + num_bytes].view(dtype).view(shape)
        start += _padded(num_bytes)
    yield views
    _spare[:] = [block]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _run(
    mixture: Mixture,
    homes: ExpertHomes,
    rows: Tensor,
    latents: Tensor | None,
    beside: Tensor | None,
    out: Tensor,
    kernels: Library,
    *,
    many: bool = False,
) -> None:
    experts, router, norm = mixture.experts, mixture.router, mixture.norm
    read, own_norm = (rows, norm) if latents is None else (latents, None)
    assert rows.shape[1] % EXPERT_ALIGNMENT == read.shape[1] % EXPERT_ALIGNMENT == 0
    assert read.is_contiguous()
    assert rows.is_contiguous()
    assert router.matrix.is_contiguous()
    assert router.matrix.dtype == torch.float32
    assert beside is None or beside.is_contiguous()
    threads = torch.get_num_threads()
    parts = _parts(experts, len(rows), rows.shape[1], rows.dtype, threads if many else 0)
    with _scratch(parts) as scratch:
        inner, made = scratch["inner"], scratch["made"]
        first, second, third = (scratch.get(name, made) for name in ("first", "second", "third"))

        def products_in(bank: Bank) -> tuple[Step, native.Product, native.Product]:
            own = bank.places[0]
            gate = Step(read, own.up, own.gate_up_bias, inner, own_norm, "activate", activation=activation)
            if own.gate is not None:
                gate = replace(gate, weight=own.gate, up=own.up, ending="gate")
            down = structure_of(Step(inner, own.down, own.down_bias, made), (third, third))
            return gate, structure_of(gate, (first, second)), down

        bank, activation = homes.bank, experts.network.activation
        gate, *products = products_in(bank)
        structure = native.Experts(
            structure_of(replace(gate, x=rows, norm=router.norm or norm), (first, second)),
            *products,
            None,
            *(address(each) for each in (router.matrix, router.bias, router.scale)),
            *(scratch[name].data_ptr() for name in _ROUTED),
            address(beside),
            out.data_ptr(),
            *(address(scratch.get(name)) for name in ("laid", "decoded")),
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
        dtype, at, to_lay = DTYPES[rows.dtype], ctypes.byref(structure), len(rows)
        kernels.library.route(dtype, at, len(rows), threads)
        for batch in homes.batches(scratch["chosen"]):
            if batch.bank is not bank:
                bank = batch.bank
                _, structure.gate_up, structure.down = products_in(bank)
                structure.step = bank.step
            structure.bank_place = batch.places.data_ptr()
            if many:
                kernels.library.run_many_experts(dtype, at, to_lay, threads)
                to_lay = 0
            else:
                kernels.library.run_experts(dtype, at, threads)
        kernels.library.sum_experts(dtype, at, len(rows), threads)
