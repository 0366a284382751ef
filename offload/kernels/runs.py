"""Attention of a forward's few rows over runs of keys and values: what all caches ask for and every device does.

Three classes compute it: `kernels.spans` by the CPU's kernels, `kernels.gpu.attention` by Triton's, and
`kernels.operators` by torch's operators where neither runs. A row's bits depend on the keys that it sees and on the
order of the runs, and neither on the rows beside it nor on their number. A layer's sink logits (`Scoring`) are in all
results once, however many runs there are: in out, lse and masses.
Letters: T rows, H query heads, H_kv KV heads, D head dimension, P pages of S tokens, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from offload.kernels.attention import Part
from offload.kernels.places import RowPlaces
from offload.kernels.rope import Scoring

MASS_DTYPE = torch.bfloat16  # that a GPU keeps masses in, row by row: they only rank chunks


@dataclass(frozen=True)
class Rows:
    """New rows of a forward in a layer: q [T, H, D], k and v [T, H_kv, D], not rotated, each row contiguous. scoring:
    of the layer, its table rounded to the rows' dtype. position: of the first one in that table; index: of the first
    one among the runs' positions. window: tokens that rows see of windowed runs. places: both in the memory of a GPU,
    `slots` for the index. moving: the index may be another one, less too, when the pass runs again as a graph."""

    q: Tensor
    k: Tensor
    v: Tensor
    scoring: Scoring
    position: int
    index: int
    window: int = 0
    places: RowPlaces | None = None
    moving: bool = False

    def in_memory(self) -> RowPlaces:
        """The rows' places in the memory of their device, made where the caller keeps none."""
        if self.places is not None:
            return self.places
        steps = torch.arange(len(self.q), device=self.q.device)
        return RowPlaces(steps + self.position, steps + self.index)


@dataclass(frozen=True)
class Run:
    """Keys and values of consecutive tokens in one tensor.

    held: [2, P, H_kv, S, D] or, as one page, [2, H_kv, S, D], keys then values, contiguous in the last two dimensions;
    or uint8 [H_kv, groups, bytes], a layer's codes (`KVCodes`), which all rows see whole and no rows are written to.
    It holds positions `first` and on, of which `tokens` count, whole groups of codes. query: which of its queries a row
    has for it. windowed: rows see what is in their window only. ring: the pages are a ring, in which page n of the
    sequence has place n % P; `tokens` count from the page on with which the first row's window begins. GPUs know rings.
    """

    held: Tensor
    tokens: int
    first: int = 0
    query: int = 0
    windowed: bool = False
    ring: bool = False

    @property
    def coded(self) -> bool:
        return self.held.dim() == 3

    @property
    def pages(self) -> Tensor:
        """[2, P, H_kv, S, D] of a run that is not coded."""
        return self.held if self.held.dim() == 5 else self.held[:, None]


@dataclass(frozen=True)
class Chosen:
    """The blocks of consecutive tokens that each row attends to.

    blocks: int32 [T, n] contiguous, in the order of the sums over them, ascending where they are a cache's, and places
    that are not used at the end (-1): block b has the tokens b * size to (b + 1) * size - 1 of the runs that it is
    attended over. tokens: int32 [T]: how many tokens a row attends to: all of its blocks', the last of which may be
    incomplete (its first tokens alone). size: tokens of a block, a divisor of a page's and of a span's. pages: of a
    tile, and tokens of a page: the form in which torch's operators attend to them, by which their sums round; None:
    that of the runs.
    """

    blocks: Tensor
    tokens: Tensor
    size: int
    pages: tuple[int, int] | None = None

    def of_rows(self, rows: slice) -> Chosen:
        """The blocks of some rows."""
        return replace(self, blocks=self.blocks[rows].contiguous(), tokens=self.tokens[rows].contiguous())


class RunAttention(Protocol):
    """One layer at a time: `begin`; for each run `append_rows`, if the rows go there, and `attend`; then `merge` or
    `part`."""

    def begin(self, rows: Rows, counts: Sequence[int], *, masses: bool = False, lasts: Sequence[int] = ()) -> None:
        """Rotate the queries. counts: tokens of each run to come. masses: `merge` returns them, of runs that are not
        coded. lasts: for each query that a row has, the position that it is rotated to at most; (): one query, at the
        row's own."""
        ...

    def append_rows(self, run: Run) -> None:
        """Write the rows' keys, rotated, and values to those of the run's places that are theirs."""
        ...

    def attend(self, run: Run) -> None:
        """Attend to the run's tokens."""
        ...

    def attend_chosen(self, runs: Sequence[Run], chosen: Chosen) -> None:
        """Attend to each row's chosen tokens of `runs`: tiles of equal sizes, but that the last may have fewer pages,
        one after the other, not windowed and not coded. In place of all calls of `attend`, with counts of one number:
        the most tokens that a row attends to. No masses. The result is that of `attend` to a run of the same tokens."""
        ...

    def merge(self) -> tuple[Tensor, Tensor | None]:
        """(out [T, H * D], mass [T, H_kv, C] or None): each row's softmax mass per chunk of the runs, one after the
        other, summed over its query group; fp32, on a GPU MASS_DTYPE."""
        ...

    def part(self) -> Part:
        """In place of `merge`, the same before it is rounded and summed: out [T, H, D], lse [T, H], mass [T, H, C] or
        None, all fp32. A row that sees no key has an out of 0, and an lse of -inf or its sink logit."""
        ...


def attended(
    attention: RunAttention,
    rows: Rows,
    runs: Sequence[Run],
    *,
    into: int = 1,
    lasts: Sequence[int] = (),
    beside: Sequence[Run] = (),
) -> Tensor:
    """Attention [T, H * D] of `rows` over `runs`, to the first `into` of which they are written, and to all of
    `beside`. lasts: see `begin`."""
    attention.begin(rows, [run.tokens for run in runs], lasts=lasts)
    for run in beside:
        attention.append_rows(run)
    for number, run in enumerate(runs):
        if number < into:
            attention.append_rows(run)
        attention.attend(run)
    return attention.merge()[0]
