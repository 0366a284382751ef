"""Attention of new rows over spans of keys and values in a card's memory, and the merge of the spans.

As in `offload.kernels.spans`, every span is attended to by itself, whenever its keys are at hand; at the end a row's
spans are merged, first to last. A span's steps, its blocks of rows and the order of the merge do not depend on the
number of rows, and what a row does not see adds exact zeros: its bits depend on the keys that it sees alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.errors import TriforceError
from offload.kernels.card import programs
from offload.kernels.native import VARIABLE
from offload.kernels.rope import RopeTable, rotate
from offload.kernels.spans import Rows

SPAN = 512  # tokens at most: one program's, and of one partial result
ROWS = 16  # of a block: the least that tensor cores take
STAGES = 2
_STAGE_BYTES = 32 * 2**10  # of keys and values at a time: two stages fit into every card's shared memory
_SLOTS, _COLUMNS = 16, 256  # that the merges take at a time


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut for heads of `head_dim` in a dtype of `itemsize` bytes. step: keys at a time."""

    head_dim: int
    itemsize: int

    @property
    def padded(self) -> int:
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def step(self) -> int:
        return min(64, _STAGE_BYTES // (2 * self.padded * self.itemsize))

    @property
    def warps(self) -> int:
        """fp32 products take no tensor cores, and more registers than four warps have."""
        return 4 if self.itemsize == 2 else 8


@dataclass(frozen=True)
class Run:
    """Spans of one tensor. pages [2, P, H_kv, S, D]; see `one_run` of the processor's for the rest."""

    pages: Tensor
    first: int
    tokens: int
    slot: int
    query: int
    windowed: bool


class CardAttention:
    """See `SpanAttention`: the same in a launch for each run and two or three to merge."""

    def __init__(self, rope: RopeTable, *, dtype: torch.dtype, span: int, chunk: int | None = None) -> None:
        """rope: rounded to `dtype`, on the card. span: tokens of a span, a power of two. chunk: tokens of a chunk."""
        self.span, self._rope, self._dtype = span, rope, dtype
        self._chunk = chunk or 0
        self._partials = self._sums = self._masses = torch.empty(0)
        self._rows: Rows | None = None

    def run(self, tensor: Tensor, *, first: int, tokens: int, slot: int, query: int = 0, windowed: bool = False) -> Run:
        """Tensor [2, P, H_kv, S, D] or, as one page, [2, H_kv, S, D]: as `one_run` of the processor's."""
        return Run(tensor if tensor.dim() == 5 else tensor[:, None], first, tokens, slot, query, windowed)

    def begin(self, rows: Rows, num_slots: int, *, masses: bool = False, lasts: Sequence[int] = ()) -> None:
        """Rotate the queries and keys. See `SpanAttention.begin`."""
        (num_rows, num_heads, dim), self._num_kv_heads = rows.q.shape, rows.k.shape[1]
        self._tiling = Tiling(dim, self._dtype.itemsize)
        self._part = gcd(self._chunk, min(self._tiling.step, self.span)) if masses else 0
        self._folded, self._group = num_rows * num_heads // self._num_kv_heads, num_heads // self._num_kv_heads
        self._num_slots, self._columns = num_slots, num_slots * self.span // self._part if self._part else 0
        folded = num_rows * num_heads
        self._partials = _at_least(self._partials, num_slots * folded * dim, rows.q.device)
        self._sums = _at_least(self._sums, num_slots * folded, rows.q.device)
        self._masses = _at_least(self._masses, self._columns * folded, rows.q.device)
        stop = rows.position + num_rows
        self._queries = [rotate(rows.q, *self._table(rows, last)) for last in lasts or (stop,)]
        self._keys = rotate(rows.k, *self._table(rows, stop))
        self._rows = rows

    def take_in(self, run: Run) -> None:
        """Write the rows' keys, rotated, and values to those of the run's places that are theirs."""
        assert self._rows is not None
        page, index, stop = run.pages.shape[3], self._rows.index, self._rows.index + len(self._keys)
        position, end = max(index, run.first), min(stop, run.first + run.pages.shape[1] * page)
        while position < end:
            number, offset = divmod(position - run.first, page)
            count = min(page - offset, end - position)
            new = slice(position - index, position - index + count)
            for half, rows in enumerate((self._keys, self._rows.v)):
                run.pages[half, number, :, offset : offset + count] = rows[new].transpose(0, 1)
            position += count

    def attend(self, run: Run) -> None:
        """Attend to the run's spans. Each slot comes once between `begin` and `merge`."""
        assert self._rows is not None
        tiling, pages = self._tiling, run.pages
        if not run.tokens:
            return
        assert pages.stride(4) == 1
        page = pages.shape[3]
        assert pages.shape[1] == 1 or page % self.span == 0
        grid = (-(-run.tokens // self.span), self._num_kv_heads, -(-self._folded // ROWS))
        launch(
            programs.attend_spans,
            grid,
            (
                self._queries[run.query], pages[0], pages[1], self._partials, self._sums, self._masses,
                pages.stride(1), pages.stride(2), pages.stride(3),
                run.first, run.tokens, self._rows.index, run.slot, self._columns, self._folded, tiling.head_dim**-0.5,
            ),
            WINDOW=self._rows.window if run.windowed else 0,
            SPANS_OF_PAGE=-(-page // self.span),
            SPAN=self.span,
            GROUP=self._group,
            DIM=tiling.head_dim,
            DIM_PADDED=tiling.padded,
            ROWS=ROWS,
            STEP=min(tiling.step, self.span),
            CHUNK=self._part,
            WIDEN=not pages.is_cuda,
            num_warps=tiling.warps,
            num_stages=STAGES,
        )  # fmt: skip

    def merge(self) -> tuple[Tensor, Tensor | None]:
        """See `SpanAttention.merge`."""
        assert self._rows is not None
        num_rows, num_heads, dim = self._rows.q.shape
        out = self._queries[0].new_empty(num_rows, num_heads * dim)
        totals = self._sums.new_empty(self._num_kv_heads, self._folded)
        launch(
            programs.merge_spans,
            (self._folded, self._num_kv_heads),
            (self._partials, self._sums, out, totals, self._num_slots, self._folded),
            GROUP=self._group, DIM=dim, DIM_PADDED=self._tiling.padded, SLOTS=_SLOTS,
        )  # fmt: skip
        self._rows = None
        if not self._part:
            return out, None
        mass = totals.new_empty(num_rows, self._num_kv_heads, self._columns)
        launch(
            programs.join_masses,
            (num_rows, self._num_kv_heads, -(-self._columns // _COLUMNS)),
            (self._masses, totals, mass, self._columns, self._folded),
            GROUP=self._group, COLUMNS=_COLUMNS,
        )  # fmt: skip
        return out, self._whole_chunks(mass)

    def _table(self, rows: Rows, last: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the rows' positions, none after `last`."""
        stop = rows.position + len(rows.q)
        cos, sin = self._rope.rows(min(rows.position, last), min(stop, last + 1))
        if missing := len(rows.q) - len(cos):
            cos, sin = (torch.cat([table, table[-1:].expand(missing, -1)]) for table in (cos, sin))
        return cos, sin

    def _whole_chunks(self, mass: Tensor) -> Tensor:
        """[..., parts of chunks] -> [..., chunks]; the last one may be of a few parts only."""
        parts = self._chunk // self._part
        return mass if parts == 1 else pad(mass, (0, -mass.shape[-1] % parts)).unflatten(-1, (-1, parts)).sum(-1)


def launch(program: Any, grid: tuple[int, ...], arguments: Sequence[object], **constants: object) -> None:
    """Run a Triton program on the current device; the first launch of its kind compiles it.

    Errors: TriforceError, with the remedy, where it cannot be compiled or started."""
    start: Callable[..., object] = program[grid]
    try:
        start(*arguments, **constants)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise TriforceError(
            f"the card's kernel {program.__name__} does not run here ({type(error).__name__}: {said}); "
            f"{VARIABLE}=off in the environment runs torch's operators instead"
        ) from error


def _at_least(scratch: Tensor, num_floats: int, device: torch.device) -> Tensor:
    """`scratch`, or a larger one on `device`: with half as much again, for a sequence that grows."""
    return scratch if scratch.numel() >= num_floats else torch.empty(num_floats * 3 // 2, device=device)
