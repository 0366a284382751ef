"""Attention of new rows over spans of keys and values in a GPU's memory, and the merge of the spans.

Every span is attended to by itself. The spans of a run are folded into a running result one after the other, by the
launch of the next run. So a row's bits depend on the order of its spans, which is the order of the runs, but not on how
spans are divided into runs, nor on other rows. A span's steps and its blocks of rows do not depend on the number of
rows, and tokens that a row does not attend to add exact zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.formats.quantised_kv import GROUP
from offload.kernels.attention import Part
from offload.kernels.gpu import chosen_programs, kv_programs, programs
from offload.kernels.gpu.rotation import rotated
from offload.kernels.gpu.tiling import ROWS, STAGES, UNROLL, Tiling
from offload.kernels.runs import Chosen, Rows, Run
from offload.native.launch import launch

_COLUMNS = 256  # columns of masses that a program joins


@dataclass(frozen=True)
class _Partials:
    """The partial results of one run's spans: output and log-sum-exp."""

    out: Tensor
    sums: Tensor


class GpuAttention:
    """`RunAttention` on a GPU: a launch that rotates and writes rows, one for each run, and one or two to merge. Runs
    are folded in the order in which they are given; their tokens after the last row do not count. Scratch memory, from
    `begin` to `merge`: the partial results of two runs, since one is folded while the next is computed, and the running
    result. It is released after each pass, since a graph has its own memory."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        span: int,
        chunk: int | None = None,
        mass_dtype: torch.dtype = torch.float32,
    ) -> None:
        """span: tokens of a span, a power of two. chunk: tokens of a chunk. mass_dtype: dtype of the masses that
        `merge` returns."""
        self.span, self._dtype, self._mass_dtype = span, dtype, mass_dtype
        self._chunk = chunk or 0
        self._num_runs = self._num_left = 0  # number of runs so far, and of spans of the last one
        self._slot = 0  # number of spans of all runs so far
        self._rows: Rows | None = None

    def begin(self, rows: Rows, counts: Sequence[int], *, masses: bool = False, lasts: Sequence[int] = ()) -> None:
        """See `RunAttention`. Queries are rotated by the first launch that needs them."""
        (num_rows, num_heads, dim), self._num_kv_heads = rows.q.shape, rows.k.shape[1]
        self._tiling = Tiling(dim, self._dtype.itemsize, rows.scoring.joined)
        self._part = gcd(self._chunk, min(self._tiling.step, self.span)) if masses else 0
        self._folded, self._group = num_rows * num_heads // self._num_kv_heads, num_heads // self._num_kv_heads
        self._num_spans = sum(-(-tokens // self.span) for tokens in counts)
        self._columns = self._num_spans * self.span // self._part if self._part else 0
        self._places = rows.in_memory()
        self._running, self._masses = self._floats(dim), self._floats(self._columns)
        self._tops, self._totals = self._floats(1), self._floats(1)
        self._partials = _Partials(*[self._totals] * 2)  # a placeholder: no run yet
        stop = rows.position + num_rows
        self._lasts = [None if last >= stop else last for last in lasts or (stop,)]
        self._queries: list[Tensor] = []
        self._num_runs = self._num_left = self._slot = 0
        self._rows = rows

    def append_rows(self, run: Run) -> None:
        """See `RunAttention`. Also rotates the queries, if this is the first launch."""
        assert self._rows is not None
        made = rotated(self._rows, self._places, [] if self._queries else self._lasts, run)
        self._queries = self._queries or made

    def attend(self, run: Run) -> None:
        """See `RunAttention`. Also folds the spans of the previous run."""
        if not run.tokens:
            return
        assert self._rows is not None
        self._queries = self._queries or rotated(self._rows, self._places, self._lasts)
        dim, num_spans = self._tiling.head_dim, -(-run.tokens // self.span)
        earlier = self._partials
        own = self._partials = _Partials(self._floats(num_spans * dim), self._floats(num_spans))
        results = own.out, own.sums, earlier.out, earlier.sums, self._running, self._tops, self._totals
        grid = (num_spans + (self._num_left > 0), self._num_kv_heads, -(-self._folded // ROWS))
        if run.coded:
            self._attend_codes(run, grid, results)
        else:
            self._attend_exact(run, grid, results)
        self._num_runs, self._num_left, self._slot = self._num_runs + 1, num_spans, self._slot + num_spans

    def _attend_exact(self, run: Run, grid: tuple[int, ...], results: Sequence[Tensor]) -> None:
        assert self._rows is not None
        pages, queries, page = run.pages, self._queries[run.query], run.pages.shape[3]
        assert pages.stride(4) == 1
        assert pages.shape[1] == 1 or page % self.span == 0
        column = self._slot * self.span // self._part if self._part else 0
        launch(
            programs.attend_spans,
            grid,
            (
                queries, self._places.slots, pages[0], pages[1], *results, self._masses,
                queries.stride(0), pages.stride(1), pages.stride(2), pages.stride(3),
                run.first, run.tokens, pages.shape[1], column, self._columns, self._folded, *self._earlier,
            ),
            WINDOW=self._rows.window if run.windowed else 0,
            RING=run.ring,
            SPANS_OF_PAGE=-(-page // self.span),
            STEP=min(self._tiling.step, self.span),
            CHUNK=self._part,
            JOINED=self._tiling.joined,
            HELD_PADDED=self._tiling.held_padded,
            WIDEN=not pages.is_cuda,
            maxnreg=self._tiling.most_registers,
            **self._constants,
        )  # fmt: skip

    def _attend_codes(self, run: Run, grid: tuple[int, ...], results: Sequence[Tensor]) -> None:
        """Attend to a run of codes, in order "matrices"."""
        blocks, queries, bounds = run.held, self._queries[0], self._places.bounds
        assert run.tokens % GROUP == 0
        assert not self._tiling.joined, "GPUs have no codes of such rows"
        assert self.span % (self._tiling.blocks * GROUP) == 0
        assert not self._part
        launch(
            kv_programs.attend_codes,
            grid,
            (
                queries, blocks, blocks.view(torch.int32), blocks if bounds is None else bounds, *results,
                queries.stride(0), blocks.stride(0), run.tokens, self._folded, *self._earlier,
            ),
            COUNTED=bounds is not None,
            BLOCKS=self._tiling.blocks,
            PART=self._tiling.part,
            WIDEN=not blocks.is_cuda,
            maxnreg=self._tiling.most_coded_registers,
            **self._constants,
        )  # fmt: skip

    @property
    def _earlier(self) -> tuple[int, int, float]:
        """(spans of the previous run, whether there are runs before it, scale of scores)."""
        assert self._rows is not None
        scale = self._rows.scoring.scale or self._tiling.head_dim**-0.5
        return self._num_left, int(self._num_runs > 1), scale

    @property
    def _constants(self) -> dict[str, object]:
        """The common constants of the attention programs."""
        assert self._rows is not None
        tiling = self._tiling
        return {
            "CAP": self._rows.scoring.cap or 0.0,
            "SPAN": self.span, "GROUP": self._group, "DIM": tiling.head_dim, "DIM_PADDED": tiling.padded, "ROWS": ROWS,
            "num_warps": tiling.warps, "num_stages": STAGES,
        }  # fmt: skip

    def attend_chosen(self, runs: Sequence[Run], chosen: Chosen) -> None:
        """See `RunAttention`, of one run, and rows of keys and values that are not joined. By one launch: its number of
        programs follows from the number of rows and from the most tokens that a row attends to."""
        assert self._rows is not None
        assert len(runs) == 1, "a GPU's chosen blocks are of one run"
        assert self._part == self._tiling.joined == 0
        self._queries = self._queries or rotated(self._rows, self._places, self._lasts)
        pages, queries, dim = runs[0].pages, self._queries[0], self._tiling.head_dim
        assert pages.stride(4) == 1
        assert pages.shape[3] % chosen.size == self.span % chosen.size == 0
        own = self._partials = _Partials(self._floats(self._num_spans * dim), self._floats(self._num_spans))
        launch(
            chosen_programs.attend_chosen,
            (self._num_spans, self._num_kv_heads, len(queries) * -(-self._group // ROWS)),
            (
                queries, chosen.blocks, chosen.tokens, pages[0], pages[1], own.out, own.sums,
                queries.stride(0), pages.stride(1), pages.stride(2), pages.stride(3), chosen.blocks.shape[1],
                self._folded, self._earlier[2],
            ),
            SIZE=chosen.size,
            PAGE=pages.shape[3],
            STEP=min(self._tiling.step, self.span),
            WIDEN=not pages.is_cuda,
            maxnreg=self._tiling.most_registers,
            **self._constants,
        )  # fmt: skip
        self._num_runs, self._num_left = 1, self._num_spans

    def merge(self) -> tuple[Tensor, Tensor | None]:
        """See `RunAttention`. Masses are in `mass_dtype`."""
        masses = self._masses
        out, logs = self._merged(self._dtype)
        if not self._part:
            return out.flatten(1), None
        mass = logs.new_empty(len(out), self._num_kv_heads, self._columns, dtype=self._mass_dtype)
        launch(
            programs.join_masses,
            (len(out), self._num_kv_heads, -(-self._columns // _COLUMNS)),
            (masses, logs, mass, self._columns, self._folded),
            GROUP=self._group, COLUMNS=_COLUMNS,
        )  # fmt: skip
        return out.flatten(1), self._whole_chunks(mass)

    def part(self) -> Part:
        masses = self._masses
        out, logs = self._merged(torch.float32)
        lse = self._by_rows(logs[..., None])
        if not self._part:
            return Part(out, lse.squeeze(-1))
        mass = (self._by_rows(masses.view(*logs.shape, self._columns)) - lse).exp_()
        return Part(out, lse.squeeze(-1), self._whole_chunks(mass))

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], log-sum-exp [H_kv, R] fp32) of all runs; releases the scratch memory."""
        assert self._rows is not None
        out = torch.empty(self._rows.q.shape, dtype=dtype, device=self._places.slots.device)
        logs, last = self._totals.new_empty(self._num_kv_heads, self._folded), self._partials
        sinks = self._rows.scoring.sink_logits
        launch(
            programs.merge_spans,
            (self._num_kv_heads, -(-self._folded // ROWS), -(-self._tiling.head_dim // self._tiling.merged)),
            (
                last.out, last.sums, self._running, self._tops, self._totals, out, logs,
                logs if sinks is None else sinks, self._num_left, self._folded, int(self._num_runs > 1),
            ),
            SINKS=sinks is not None, GROUP=self._group, DIM=out.shape[2], NUMBERS=self._tiling.merged, ROWS=ROWS,
            UNROLL=UNROLL,
        )  # fmt: skip
        self._rows = None
        del self._partials, self._running, self._tops, self._totals, self._masses, self._queries
        return out, logs

    def _by_rows(self, folded: Tensor) -> Tensor:
        """Folded rows by query rows: [H_kv, T * G, N] -> [T, H, N]."""
        return folded.view(len(folded), -1, self._group, folded.shape[2]).transpose(0, 1).flatten(1, 2)

    def _floats(self, number: int) -> Tensor:
        """Uninitialised fp32 memory for `number` numbers per folded row and KV head."""
        return torch.empty(number * self._folded * self._num_kv_heads, device=self._places.slots.device)

    def _whole_chunks(self, mass: Tensor) -> Tensor:
        """Masses of parts summed to chunks: [..., parts] -> [..., chunks]; the last chunk may have fewer parts."""
        parts = self._chunk // self._part
        return mass if parts == 1 else pad(mass, (0, -mass.shape[-1] % parts)).unflatten(-1, (-1, parts)).sum(-1)
