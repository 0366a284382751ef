"""Mixtures of experts by the CPU's kernels (native/experts.h), see `kernels.experts`. A row's bits depend on the row
alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from offload.config.networks import Experts, FeedForward
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.kernels.experts import Bank, ExpertHomes, ExpertWeights, Mixture, Room
from offload.kernels.norms import NormWeights
from offload.kernels.products import Step, address, structure_of, widened_floats
from offload.native import interface as native
from offload.native.interface import DTYPES, Library

MOST_ROWS = 512  # at a time, of a pass
_LINE = 64  # bytes
_COLUMNS = 32  # outputs of a panel, at most
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
        parts = _share_parts(experts.network, own.numel(), experts.count, rows.shape[1], rows.dtype, widens=True)
        with _scratch(parts) as scratch:
            found, of_pairs = _run_share(experts, bank, places, some, own, scratch, fixed, kernels)
        pairs.append(found + MOST_ROWS * len(pairs) * chosen.shape[1])
        made.append(of_pairs)
    return (pairs[0], made[0]) if len(pairs) == 1 else (torch.cat(pairs), torch.cat(made))


def scratch_bytes(experts: Experts, num_rows: int, hidden_size: int, dtype: torch.dtype, *, threads: int = 0) -> int:
    """Bytes of temporary memory for `num_rows` rows of a pass, or of a prefill on so many threads."""
    return _total_bytes(_parts(experts, num_rows, hidden_size, dtype, threads))


def _total_bytes(parts: _Parts) -> int:
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in parts.values())


def _share_parts(network: FeedForward, pairs: int, count: int, row: int, dtype: torch.dtype, *, widens: bool) -> _Parts:
    """The shapes and dtypes of scratch for `pairs` pairs of a row of `row` numbers and one of `count` experts. widens:
    whether products widen rows."""
    lines, size = pairs + min(pairs, count) * (EXPERT_ALIGNMENT - 1), network.size
    floats, integers = torch.float32, torch.int32
    parts: _Parts = {"inner": ((lines, size), dtype), "made": ((lines, row), dtype)}
    if widens:
        widened = (("first", row), ("second", row), ("third", size))
        parts |= {name: ((widened_floats(lines, inputs),), floats) for name, inputs in widened}
    lists = {"line_of": (pairs,), "row_of": (lines,), "expert_of": (lines,), "starts": (2, count)}
    return parts | {name: (shape, integers) for name, shape in lists.items()}


def _parts(experts: Experts, num_rows: int, hidden: int, dtype: torch.dtype, threads: int = 0) -> _Parts:
    """The shapes and dtypes of scratch for `_run`, with what routes rows. threads: of a prefill."""
    row, pairs = experts.row_size(hidden), num_rows * experts.used
    parts = _share_parts(experts.network, pairs, experts.count, row, dtype, widens=not threads)
    if threads:
        parts["laid"] = (num_rows, row), dtype
        parts["decoded"] = (threads, 2, _COLUMNS, max(row, experts.network.size)), dtype
    return parts | {
        "normed": ((num_rows, hidden), torch.float32),
        "scores": ((num_rows, experts.num_scores), torch.float32),
        "chosen": ((num_rows, experts.used), torch.int32),
        "weights": ((pairs,), torch.float32),
    }


@contextmanager
def _scratch(parts: _Parts, room: Room | None = None) -> Iterator[Mapping[str, Tensor]]:
    """Scratch for a call: in `room` if it is lent, else kept for the next call."""
    need, lent = _total_bytes(parts), room is not None and room.is_lent
    if room is not None and lent:
        block = room.take("scratch", (need,), torch.uint8, torch.device("cpu"))
    else:
        block = _spare.pop() if _spare else torch.empty(0, dtype=torch.uint8)
    if len(block) < need:
        block = torch.empty(need, dtype=torch.uint8)
    views, start = {}, 0
    for name, (shape, dtype) in parts.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        views[name] = block[start : start + num_bytes].view(dtype).view(shape)
        start += _padded(num_bytes)
    yield views
    if not lent:
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
    threads, bank = torch.get_num_threads(), homes.bank
    parts = _parts(experts, len(rows), rows.shape[1], rows.dtype, threads if many else 0)
    with _scratch(parts, homes.room if many else None) as scratch:
        gate, down = _steps(experts.network, bank.places[0], read, own_norm, scratch)
        routed = ("normed", "scores", "chosen", "weights", *(("laid", "decoded") if many else ()))
        structure = native.Experts(
            scored=structure_of(replace(gate, x=rows, norm=router.norm or norm), _widened(scratch)[:2]),
            **_share_fields(experts, bank, gate, down, scratch),
            router=address(router.matrix),
            router_bias=address(router.bias),
            router_scale=address(router.scale),
            **{name: scratch[name].data_ptr() for name in routed},
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
        dtype, at, to_lay = DTYPES[rows.dtype], ctypes.byref(structure), len(rows)
        kernels.library.route(dtype, at, len(rows), threads)
        for batch in homes.batches(scratch["chosen"]):
            if batch.bank is not bank:
                bank = batch.bank
                steps = _steps(experts.network, bank.places[0], read, own_norm, scratch)
                for name, value in _share_fields(experts, bank, *steps, scratch).items():
                    setattr(structure, name, value)
            structure.bank_place = batch.places.data_ptr()
            if many:
                kernels.library.run_many_experts(dtype, at, to_lay, threads)
                to_lay = 0
            else:
                kernels.library.run_experts(dtype, at, threads)
        kernels.library.sum_experts(dtype, at, len(rows), threads)


def _run_share(
    experts: Experts,
    bank: Bank,
    places: Tensor,
    rows: Tensor,
    chosen: Tensor,
    scratch: Mapping[str, Tensor],
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
    scratch: Mapping[str, Tensor],
    fixed: bool = False,
) -> tuple[Step, Step]:
    """The products of an expert over rows `read`: with gate and up, and with down."""
    inner, made = scratch["inner"], scratch["made"]
    gate = Step(read, first.up, first.gate_up_bias, inner, norm, "activate", activation=network.activation, fixed=fixed)
    if first.gate is not None:
        gate = replace(gate, weight=first.gate, up=first.up, ending="gate")
    return gate, Step(inner, first.down, first.down_bias, made, fixed=fixed)


def _share_fields(
    experts: Experts, bank: Bank, gate: Step, down: Step, scratch: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The fields of native.Experts for what experts make of their rows. scratch: of `_share_parts`."""
    first, second, third = _widened(scratch)
    return {
        "gate_up": structure_of(gate, (first, second)),
        "down": structure_of(down, (third, third)),
        "step": bank.step,
        "count": experts.count,
        "lines": len(scratch["made"]),
        **{name: scratch[name].data_ptr() for name in ("line_of", "row_of", "expert_of", "starts")},
    }


def _widened(scratch: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Scratch for widened rows of gate, of up and of down; any where nothing is widened."""
    return [scratch.get(name, scratch["made"]) for name in ("first", "second", "third")]
