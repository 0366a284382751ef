"""Mixtures of experts by the CPU's kernels (native/experts.h), see `kernels.experts`. A row's bits depend on the row
alone."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from offload.config.networks import Experts, FeedForward
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.kernels.experts import Bank, ExpertHomes, ExpertWeights, Mixture
from offload.kernels.experts_scratch import Parts, borrowed, parts_of, share_parts, total_bytes, views_of, widened_of
from offload.kernels.norms import NormWeights
from offload.kernels.products import Step, address, structure_of
from offload.native import interface as native
from offload.native.interface import DTYPES, Library

MOST_ROWS = 512  # at a time, of a pass


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
        MixtureCalls(kernels, mixture, homes, some, to, beside=other, latents=read).run(len(some))
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
    MixtureCalls(kernels, mixture, homes, rows, out, beside=beside, latents=latents, many=True).run(len(rows))
    return out


def run_share(
    experts: Experts, bank: Bank, places: Tensor, rows: Tensor, chosen: Tensor, *, kernels: Library
) -> tuple[Tensor, Tensor]:
    """A share of a layer's experts, run for a device that routes rows, runs the other experts and sums.

    bank: in the host's memory. places: of each of the layer's experts in the bank, int32 [experts], -1: it is not in
    this share. rows: [T, inputs], contiguous, normed, or latents. chosen: the experts of each row, int32 [T, used],
    contiguous; the number of all experts stands for none. Where the experts have integers
    (`ExpertWeights.has_integers`), a row's bits are the same on every machine.

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
        parts = share_parts(experts.network, own.numel(), experts.count, rows.shape[1], rows.dtype, widens=True)
        with borrowed(total_bytes(parts)) as block:
            found, of_pairs = _run_share(experts, bank, places, some, own, views_of(parts, block), kernels)
        pairs.append(found + MOST_ROWS * len(pairs) * chosen.shape[1])
        made.append(of_pairs)
    return (pairs[0], made[0]) if len(pairs) == 1 else (torch.cat(pairs), torch.cat(made))


class MixtureCalls:
    """A mixture over the first rows of tensors that stay where they are: prepared once for each number of rows."""

    def __init__(
        self,
        kernels: Library,
        mixture: Mixture,
        homes: ExpertHomes,
        rows: Tensor,
        out: Tensor,
        *,
        beside: Tensor | None = None,
        latents: Tensor | None = None,
        many: bool = False,
    ) -> None:
        """rows, out, beside, latents: see `RunExperts`, [n, ...] contiguous; out may be latents. many: of a prefill."""
        self._mixture, self._homes, self._rows, self._out, self._beside = mixture, homes, rows, out, beside
        self._library, self._many = kernels.library, many
        self._read, self._own_norm = (rows, mixture.norm) if latents is None else (latents, None)
        self._prepared: dict[int, _Call] = {}
        self._address = 0  # of the scratch that they use
        assert rows.shape[1] % EXPERT_ALIGNMENT == self._read.shape[1] % EXPERT_ALIGNMENT == 0
        assert all(each.is_contiguous() for each in (rows, self._read, out, mixture.router.matrix))
        assert mixture.router.matrix.dtype == torch.float32
        assert beside is None or beside.is_contiguous()

    def run(self, num_rows: int) -> None:
        """Fill the first `num_rows` rows of `out`. Temporary memory: `scratch_bytes`."""
        threads, library, dtype = torch.get_num_threads(), self._library, DTYPES[self._rows.dtype]
        known = self._prepared.get(num_rows)
        parts = self._parts(num_rows, threads) if known is None else known.parts
        need = total_bytes(parts) if known is None else known.num_bytes
        with borrowed(need, self._homes.room if self._many else None) as block:
            if block.data_ptr() != self._address:
                self._address, known = block.data_ptr(), None
                self._prepared.clear()
            if known is None:
                known = self._prepared[num_rows] = self._prepare(parts, block)
            at, to_lay = ctypes.byref(known.structure), num_rows
            if known.is_whole:
                library.run_mixture(dtype, at, num_rows, threads)
                return
            library.route(dtype, at, num_rows, threads)
            for batch in self._homes.batches(known.scratch["chosen"]):
                if batch.bank is not known.bank:
                    self._change_bank(known, batch.bank)
                known.structure.bank_place = batch.places.data_ptr()
                if self._many:
                    library.run_many_experts(dtype, at, to_lay, threads)
                    to_lay = 0
                else:
                    library.run_experts(dtype, at, threads)
            library.sum_experts(dtype, at, num_rows, threads)

    def _parts(self, num_rows: int, threads: int) -> Parts:
        hidden, dtype = self._rows.shape[1], self._rows.dtype
        return parts_of(self._mixture.experts, num_rows, hidden, dtype, threads if self._many else 0)

    def _prepare(self, parts: Parts, block: Tensor) -> _Call:
        mixture, bank, scratch = self._mixture, self._homes.bank, views_of(parts, block)
        whole = None if self._many else self._homes.whole
        experts, router = mixture.experts, mixture.router
        gate, down = _steps(experts.network, bank.places[0], self._read, self._own_norm, scratch)
        routed = ("normed", "scores", "chosen", "weights", *(("laid", "decoded") if self._many else ()))
        structure = native.Experts(
            scored=structure_of(replace(gate, x=self._rows, norm=router.norm or mixture.norm), widened_of(scratch)[:2]),
            **_share_fields(experts, bank, gate, down, scratch),
            router=address(router.matrix),
            router_bias=address(router.bias),
            router_scale=address(router.scale),
            **{name: scratch[name].data_ptr() for name in routed},
            bank_place=None if whole is None else whole.places.data_ptr(),
            beside=address(self._beside),
            out=self._out.data_ptr(),
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
        return _Call(parts, total_bytes(parts), structure, scratch, bank, whole is not None)

    def _change_bank(self, call: _Call, bank: Bank) -> None:
        experts, call.bank = self._mixture.experts, bank
        steps = _steps(experts.network, bank.places[0], self._read, self._own_norm, call.scratch)
        for name, value in _share_fields(experts, bank, *steps, call.scratch).items():
            setattr(call.structure, name, value)


@dataclass
class _Call:
    """A prepared call. num_bytes: of scratch. bank: that the structure has. is_whole: whether all experts are always
    in it."""

    parts: Parts
    num_bytes: int
    structure: native.Experts
    scratch: Mapping[str, Tensor]
    bank: Bank
    is_whole: bool


def _run_share(
    experts: Experts,
    bank: Bank,
    places: Tensor,
    rows: Tensor,
    chosen: Tensor,
    scratch: Mapping[str, Tensor],
    kernels: Library,
) -> tuple[Tensor, Tensor]:
    """See `run_share`; of at most MOST_ROWS rows."""
    gate, down = _steps(experts.network, bank.places[0], rows, None, scratch, fixed=True)
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
    *,
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
    """The fields of native.Experts for what experts make of their rows. scratch: of `share_parts`."""
    first, second, third = widened_of(scratch)
    return {
        "gate_up": structure_of(gate, (first, second)),
        "down": structure_of(down, (third, third)),
        "step": bank.step,
        "count": experts.count,
        "lines": len(scratch["made"]),
        **{name: scratch[name].data_ptr() for name in ("line_of", "row_of", "expert_of", "starts")},
    }
