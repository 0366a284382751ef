"""Mixtures of experts by the CPU's kernels (native/experts.h), see `kernels.experts`. A row's bits depend on the row
alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from offload.config.networks import Experts, FeedForward
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.kernels.experts import Bank, ExpertHomes, ExpertWeights, Mixture
from offload.kernels.norms import NormWeights
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
        with _scratch(_parts(mixture.experts, len(some), rows.shape[1], rows.dtype)) as scratch:
            _run(mixture, homes, some, read, other, to, scratch, kernels)
    return out


def run_share(
    experts: Experts, bank: Bank, places: Tensor, rows: Tensor, chosen: Tensor, *, fixed: bool, kernels: Library
) -> tuple[Tensor, Tensor]:
    """A share of a layer's experts, run for a device that routes rows, runs the other experts and sums.

    bank: in the host's memory. places: of each of the layer's experts in the bank, int32 [experts], -1: it is not in
    this share. rows: [T, inputs], contiguous, normed, or latents. chosen: the experts of each row, int32 [T, used],
    contiguous; the number of all experts stands for none. fixed: in fixed point, where the experts have integers
    (`ExpertWeights.has_integers`); a row's bits are then the same on every machine.

    Returns pairs, int64 [n], numbers t * used + u of those in the share, by expert and then by row within every
    MOST_ROWS rows; and what the expert makes of the row, [n, inputs] of the dtype. Temporary memory: less than
    `scratch_bytes` of at most MOST_ROWS rows.
    """
    assert rows.is_contiguous()
    assert chosen.is_contiguous()
    assert chosen.dtype == places.dtype == torch.int32
    assert len(places) == experts.count
    assert rows.shape[1] % EXPERT_ALIGNMENT == 0
    pairs, made = list[Tensor](), list[Tensor]()
    for some, own in zip(rows.split(MOST_ROWS), chosen.split(MOST_ROWS), strict=True):
        parts = _share_parts(experts.network, own.numel(), experts.count, rows.shape[1], rows.dtype)
        with _scratch(parts) as scratch:
            found, of_pairs = _run_share(experts, bank, places, some, own, scratch, fixed, kernels)
        pairs.append(found + MOST_ROWS * len(pairs) * chosen.shape[1])
        made.append(of_pairs)
    return (pairs[0], made[0]) if len(pairs) == 1 else (torch.cat(pairs), torch.cat(made))


def scratch_bytes(experts: Experts, num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of temporary memory for `num_rows` rows."""
    return _total_bytes(_parts(experts, num_rows, hidden_size, dtype))


@contextmanager
def _scratch(parts: _Parts) -> Iterator[list[Tensor]]:
    """Scratch of these parts, kept for the next call."""
    need = _total_bytes(parts)
    memory = _spare.pop() if _spare else torch.empty(0, dtype=torch.uint8)
    if len(memory) < need:
        memory = torch.empty(need, dtype=torch.uint8)
    yield list(_views(memory, parts))
    _spare[:] = [memory]


def _total_bytes(parts: _Parts) -> int:
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in parts)


def _share_parts(network: FeedForward, pairs: int, count: int, row: int, dtype: torch.dtype) -> _Parts:
    """The shapes and dtypes of scratch for `pairs` pairs of a row of `row` numbers and one of `count` experts: the rows
    within and those made, both widened, and three lists of lines."""
    lines, size = pairs + min(pairs, count) * (EXPERT_ALIGNMENT - 1), network.size
    floats, integers = torch.float32, torch.int32
    return [
        ((lines, size), dtype), ((lines, row), dtype),
        *(((widened_floats(lines, inputs),), floats) for inputs in (row, row, size)),
        ((pairs,), integers), ((lines,), integers), ((lines,), integers), ((2, count), integers),
    ]  # fmt: skip


def _parts(experts: Experts, num_rows: int, hidden: int, dtype: torch.dtype) -> _Parts:
    """The scratch of `_share_parts`, and rows that are scored, scores, chosen experts and their weights, for
    `_run`."""
    pairs, floats = num_rows * experts.used, torch.float32
    return [
        *_share_parts(experts.network, pairs, experts.count, experts.row_size(hidden), dtype),
        ((num_rows, hidden), floats), ((num_rows, experts.num_scores), floats), ((pairs,), torch.int32),
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
    *of_share, normed, scores, chosen, weights = scratch
    bank = homes.bank
    gate, down = _steps(experts.network, bank.places[0], read, own_norm, of_share)
    structure = native.Experts(
        scored=structure_of(replace(gate, x=rows, norm=router.norm or norm), of_share[2:4]),
        **_share_fields(experts, bank, gate, down, of_share),
        router=address(router.matrix),
        router_bias=address(router.bias),
        router_scale=address(router.scale),
        normed=normed.data_ptr(),
        scores=scores.data_ptr(),
        chosen=chosen.data_ptr(),
        weights=weights.data_ptr(),
        beside=address(beside),
        out=out.data_ptr(),
        used=experts.used,
        num_scores=experts.num_scores,
        renormalised=experts.renormalised,
        sigmoid=experts.scoring == "sigmoid",
        biased=experts.bias == "scores",
        needs_softmax=experts.needs_softmax,
        ranks_scores=experts.ranks_scores,
        groups=experts.groups,
        groups_used=experts.groups_used,
        group_best=experts.group_best,
        floored=experts.floored,
        rounds_scores=experts.rounded != "none",
        rounds_shares=experts.rounded == "shares",
        score_scale=experts.score_scale,
        score_cap=experts.score_cap or 0.0,
        **dict(zip(("factor", "sum_factor", "both_factor"), experts.factors, strict=True)),
        eps=experts.eps,
    )
    dtype, at, threads = DTYPES[rows.dtype], ctypes.byref(structure), torch.get_num_threads()
    kernels.library.route(dtype, at, len(rows), threads)
    found = chosen.view(len(rows), experts.used)
    for batch in homes.batches(found):
        if batch.bank is not bank:
            bank = batch.bank
            steps = _steps(experts.network, bank.places[0], read, own_norm, of_share)
            for name, value in _share_fields(experts, bank, *steps, of_share).items():
                setattr(structure, name, value)
        structure.bank_place = batch.places.data_ptr()
        kernels.library.run_experts(dtype, at, threads)
    kernels.library.sum_experts(dtype, at, len(rows), threads)


def _run_share(
    experts: Experts,
    bank: Bank,
    places: Tensor,
    rows: Tensor,
    chosen: Tensor,
    scratch: list[Tensor],
    fixed: bool,
    kernels: Library,
) -> tuple[Tensor, Tensor]:
    """See `run_share`; of at most MOST_ROWS rows."""
    assert not fixed or bank.places[0].has_integers
    gate, down = _steps(experts.network, bank.places[0], rows, None, scratch, fixed)
    structure = native.Experts(
        **_share_fields(experts, bank, gate, down, scratch),
        bank_place=places.data_ptr(),
        chosen=chosen.data_ptr(),
        used=chosen.shape[1],
    )
    dtype, at, threads = DTYPES[rows.dtype], ctypes.byref(structure), torch.get_num_threads()
    pairs = torch.empty(kernels.library.arrange_share(at, len(rows)), dtype=torch.int64)
    made = rows.new_empty(len(pairs), rows.shape[1])
    if len(pairs):
        structure.out = made.data_ptr()
        kernels.library.run_experts(dtype, at, threads)
        kernels.library.gather_share(dtype, at, len(rows), pairs.data_ptr(), threads)
    return pairs, made


def _steps(
    network: FeedForward,
    first: ExpertWeights,
    read: Tensor,
    norm: NormWeights | None,
    scratch: list[Tensor],
    fixed: bool = False,
) -> tuple[Step, Step]:
    """The products of an expert over rows `read`: with gate and up, and with down."""
    inner, made = scratch[:2]
    gate = Step(read, first.up, first.gate_up_bias, inner, norm, "activate", activation=network.activation, fixed=fixed)
    if first.gate is not None:
        gate = replace(gate, weight=first.gate, up=first.up, ending="gate")
    return gate, Step(inner, first.down, first.down_bias, made, fixed=fixed)


def _share_fields(experts: Experts, bank: Bank, gate: Step, down: Step, scratch: list[Tensor]) -> dict[str, Any]:
    """The fields of native.Experts for what experts make of their rows. scratch: of `_share_parts`."""
    _, made, first_widened, second_widened, inner_widened, *lists = scratch
    names = "line_of", "row_of", "expert_of", "starts"
    return {
        "gate_up": structure_of(gate, (first_widened, second_widened)),
        "down": structure_of(down, (inner_widened, inner_widened)),
        "step": bank.step,
        "count": experts.count,
        "lines": len(made),
        **{name: each.data_ptr() for name, each in zip(names, lists, strict=True)},
    }
