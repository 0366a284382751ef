"""Mixtures of experts by torch's operators (docs/design.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.config.block import Experts, FeedForward
from offload.formats.stored import StoredMatrix
from offload.kernels.activation import activated, gated
from offload.kernels.norms import NormWeights

Matrix = Tensor | StoredMatrix
Multiply = Callable[[Tensor, Matrix], Tensor]


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a layer's experts. router: [experts, hidden] fp32. up, gate: [experts * size, hidden], one expert
    after the other; gate is None in networks without one. down: [experts * hidden, size]."""

    router: Tensor
    gate: Matrix | None
    up: Matrix
    down: Matrix


class RunExperts(Protocol):
    """A mixture of experts over rows [T, hidden], after `norm`: their output [T, hidden]. A row's experts are chosen in
    fp32, what each makes of it is rounded to the dtype, and their weighted sum is rounded once, in the order in which
    they were chosen."""

    def __call__(
        self, network: FeedForward, weights: ExpertWeights, norm: NormWeights | None, rows: Tensor
    ) -> Tensor: ...


def chosen(experts: Experts, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of rows with scores [T, experts] fp32, int64 [T, used], the largest score first and the first expert
    of equal ones; and their weights, fp32 [T, used]."""
    found = scores.sort(dim=1, descending=True, stable=True)[1][:, : experts.used]
    powers = (scores - scores.amax(1, keepdim=True)).exp()
    weights = powers.gather(1, found)
    return found, weights / (weights if experts.renormalised else powers).sum(1, keepdim=True)


def run_experts(
    network: FeedForward,
    weights: ExpertWeights,
    norm: NormWeights | None,
    rows: Tensor,
    *,
    multiply: Multiply,
    blocks: Sequence[int] | None = None,
) -> Tensor:
    """See `RunExperts`. multiply: a product with a matrix, transposed. blocks: rows of the successive blocks, equal
    ones, in which every product runs, so that a row's bits do not depend on T; None: all rows of an expert at once."""
    assert network.experts is not None
    rows = rows if norm is None else norm(rows)
    parts = [rows] if blocks is None else rows.split(list(blocks))
    scores = torch.cat([part.float() @ weights.router.T for part in parts])
    found, shares = chosen(network.experts, scores)
    made = rows.new_empty(*found.shape, rows.shape[1])
    for expert in found.unique().tolist():
        row, place = (found == expert).nonzero(as_tuple=True)
        through = partial(_through, network, *_of_expert(weights, network.size, rows.shape[1], expert), multiply)
        made[row, place] = through(rows[row]) if blocks is None else _in_blocks(through, rows[row], blocks[0])
    return (made.float() * shares.unsqueeze(2)).sum(1).to(rows.dtype)


def _of_expert(weights: ExpertWeights, size: int, hidden: int, expert: int) -> tuple[Matrix | None, Matrix, Matrix]:
    """An expert's gate, up and down."""
    own = slice(expert * size, (expert + 1) * size)
    gate = None if weights.gate is None else weights.gate[own]
    return gate, weights.up[own], weights.down[expert * hidden : (expert + 1) * hidden]


def _through(
    network: FeedForward, gate: Matrix | None, up: Matrix, down: Matrix, multiply: Multiply, rows: Tensor
) -> Tensor:
    """What one network makes of rows [n, hidden]."""
    if gate is None:
        return multiply(activated(multiply(rows, up), network.activation), down)
    return multiply(gated(torch.cat([multiply(rows, gate), multiply(rows, up)], 1), network.activation), down)


def _in_blocks(operator: Callable[[Tensor], Tensor], rows: Tensor, block: int) -> Tensor:
    filled = pad(rows, (0, 0, 0, -len(rows) % block))
    return torch.cat([operator(part) for part in filled.split(block)])[: len(rows)]
