"""Attention of new rows over spans of keys and values in the CPU's memory, by its kernels, and their merge.

Every span is attended to by itself, whenever its keys are at hand; at the end a row's spans are merged, first to last.
So a row's bits depend on the keys that it sees alone. Letters are those of kernels/runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import gcd, log

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.attention import Part
from offload.kernels.blocks import described, halves
from offload.kernels.runs import Chosen, Rows, Run
from offload.native import interface
from offload.native.interface import DTYPES, Library

SPAN = 128  # tokens, where pages allow: what a thread takes at a time
JOINED_SPAN = 256  # of rows that all heads share: as many heads' partial results, half as often
_FLOATS = 2  # of a partial result, beside its sum of values: the largest score and the sum of weights


class SpanAttention:
    """`RunAttention` by the CPU's kernels. Keeps its scratch."""

    def __init__(
        self, kernels: Library, *, dtype: torch.dtype, span: int, joined_span: int | None = None,
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        """span: tokens of the runs' spans. joined_span: of those whose rows are both key and value; None: the same.
        chunk: tokens of a chunk."""
        self._library, self._dtype, self.span = kernels.library, dtype, span
        self._spans = span, joined_span or span
        self._code, self._chunk = DTYPES[dtype], chunk or 0
        self._queries = self._partials = self._masses = self._scratch = torch.empty(0)
        self._attention, self._rotation = interface.Attention(), interface.Rotation()
        self._runs = (interface.Run * 1)()
        self._rotation.runs = ctypes.addressof(self._runs)
        self._run: Run | None = None  # that `_runs` has
        self._slot = 0  # spans of the runs before it
        self._sizes: tuple[int, ...] = ()
        self._rows: Rows | None = None
        self._keys = 0  # the address of the rows' keys
        self._found: tuple[Tensor, Tensor | None] | None = None  # by the merge, as `_merged` has it

    def begin(self, rows: Rows, counts: Sequence[int], *, masses: bool = False, lasts: Sequence[int] = ()) -> None:
        a, r, scoring, rope = self._attention, self._rotation, rows.scoring, rows.scoring.rope
        self.span = self._spans[scoring.joined]
        self._part = gcd(self._chunk, self.span)  # masses are summed by parts, then joined
        stop, num_slots = rows.position + len(rows.q), sum(-(-tokens // self.span) for tokens in counts)
        sizes = (*rows.q.shape, rows.k.shape[1], num_slots, len(lasts) or 1, masses, scoring.joined)
        if sizes != self._sizes:
            self._resize(*sizes)
            self._sizes = sizes
        a.position, a.window, a.scale, a.cap = rows.index, rows.window, scoring.scale or 0.0, scoring.cap or 0.0
        a.sink_logits = None if scoring.sink_logits is None else scoring.sink_logits.data_ptr()
        r.q, r.k, r.v = rows.q.data_ptr(), None, rows.v.data_ptr()
        r.cos, r.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
        r.width = rope.cos.shape[1]
        r.growth = None if rope.growth is None else rope.growth.data_ptr()
        r.q_weight, r.k_weight = (None, None) if scoring.weights is None else (w.data_ptr() for w in scoring.weights)
        r.q_stride, r.k_stride, r.v_stride = rows.q.stride(0), rows.k.stride(0), rows.v.stride(0)
        r.position, r.index, r.last = rows.position, rows.index, stop
        self._rows, self._keys, self._slot, self._found = rows, rows.k.data_ptr(), 0, None
        r.queries = a.queries  # rotated with the keys, or before the first run
        for number, last in enumerate(lasts):
            r.queries, r.last = a.queries + number * rows.q.numel() * 4, last
            self._rotate(None)
        r.last = stop

    def _resize(
        self, num_rows: int, num_heads: int, dim: int, num_kv_heads: int, num_slots: int, num_queries: int,
        masses: bool, joined: bool,
    ) -> None:  # fmt: skip
        """Have scratch for so many rows, spans and queries of a row."""
        library, a, r, folded = self._library, self._attention, self._rotation, num_heads * num_rows
        chunks = self.span // self._part if masses and self._chunk else 0
        self._queries = _at_least(self._queries, num_queries * folded * dim)
        halves = 1 + joined
        room = halves * library.widened_room(self._code, dim // halves)
        self._partials = _at_least(self._partials, num_slots * folded * (room + _FLOATS))
        self._masses = _at_least(self._masses, num_slots * folded * chunks)
        self._per_thread = library.scratch_room(self._code, dim, folded // num_kv_heads, self.span, joined)
        a.queries, a.partials = self._queries.data_ptr(), self._partials.data_ptr()
        a.masses = self._masses.data_ptr() if chunks else None
        a.rows, a.group, a.kv_heads, a.head_dim = num_rows, num_heads // num_kv_heads, num_kv_heads, dim
        a.slots, a.chunk, a.chunks, a.out_stride = num_slots, self._part, chunks, num_heads * dim
        r.rows, r.group, r.kv_heads, r.head_dim = a.rows, a.group, a.kv_heads, dim
        a.joined = r.joined = joined

    def append_rows(self, run: Run) -> None:
        self._take(run)
        self._rotate(self._keys)

    def _rotate(self, keys: int | None) -> None:
        """Rotate the queries, if they are still to be, and write the rows' keys and values to the run that `_runs` has,
        unless `keys` is None."""
        r = self._rotation
        r.k, r.count = keys, keys is not None
        self._library.append_rows(self._code, ctypes.byref(r))
        r.queries = None

    def attend(self, run: Run) -> None:
        self._take(run)
        if self._rotation.queries:
            self._rotate(None)
        a, threads = self._attention, torch.get_num_threads()
        self._slot += -(-run.tokens // self.span)
        is_last = self._slot == a.slots
        if is_last:  # then they are merged in the same call
            self._found = self._room_for(self._dtype, a.kv_heads)
        self._scratch = _at_least(self._scratch, threads * self._per_thread)
        self._library.attend_runs(
            self._code,
            ctypes.byref(a),
            self._runs,
            1,
            self._scratch.data_ptr(),
            self._per_thread,
            is_last,
            threads,
        )

    def attend_chosen(self, runs: Sequence[Run], chosen: Chosen) -> None:
        """Memory besides the scratch: the keys and values of a span for each thread."""
        if self._rotation.queries:
            self._rotate(None)
        a, threads, dim = self._attention, torch.get_num_threads(), runs[0].held.shape[-1]
        blocks, tokens, tiles = chosen.blocks, chosen.tokens, described([run.held for run in runs], chosen.size)
        assert tiles.page % self.span == self.span % chosen.size == 0
        assert not a.chunks, "no masses of chosen blocks are kept"
        assert int(tokens.max()) <= a.slots * self.span, "more than `begin` was told of"
        assert blocks.is_contiguous()
        assert blocks.dtype == tokens.dtype == torch.int32
        lists = interface.Chosen(tiles, blocks.data_ptr(), tokens.data_ptr(), blocks.shape[1], self.span)
        room = self._library.chosen_room(self._code, dim * (1 + a.joined), a.group, self.span, a.joined)
        self._scratch = _at_least(self._scratch, threads * room)
        self._library.attend_chosen(
            self._code, ctypes.byref(a), ctypes.byref(lists), self._scratch.data_ptr(), room, threads
        )

    def merge(self) -> tuple[Tensor, Tensor | None]:
        out, mass = self._found or self._merged(self._dtype, self._attention.kv_heads)
        self._rows = self._run = self._found = None
        return out, None if mass is None else self._joined(mass)

    def part(self) -> Part:
        a = self._attention
        num_heads = a.kv_heads * a.group
        sums = torch.empty(a.rows, num_heads, 2)
        a.sums = sums.data_ptr()
        out, mass = self._merged(torch.float32, num_heads)
        a.sums = self._rows = self._run = None
        top, total = sums.unbind(-1)
        mass = None if mass is None else self._joined(mass)
        return Part(out.unflatten(1, (num_heads, -1)), top * log(2) + total.log(), mass)

    def _merged(self, dtype: torch.dtype, num_heads: int) -> tuple[Tensor, Tensor | None]:
        """The spans, merged, [T, H * D], and the masses by part of a chunk of `num_heads` heads, if there are any."""
        assert self._rows is not None
        found = self._room_for(dtype, num_heads)
        self._library.merge_runs(self._code, ctypes.byref(self._attention), torch.get_num_threads())
        return found

    def _room_for(self, dtype: torch.dtype, num_heads: int) -> tuple[Tensor, Tensor | None]:
        """Memory for the same, which the kernels fill."""
        a = self._attention
        out = torch.empty(a.rows, a.out_stride, dtype=dtype)
        mass = torch.empty(a.rows, num_heads, a.slots * a.chunks) if a.chunks else None
        a.out, a.mass = out.data_ptr(), None if mass is None else mass.data_ptr()
        return out, mass

    def _take(self, run: Run) -> None:
        """Have `run` in the form that the kernels take."""
        if run is self._run:
            return
        self._run, held, r = run, run.held, self._runs[0]
        r.tokens, r.span, r.slot, r.coded = run.tokens, self.span, self._slot, run.coded
        if run.coded:
            r.keys, r.head_stride = held.data_ptr(), held.stride(0)
            r.query = r.windowed = r.first = 0
            return
        page, whole = held.shape[-2], held.dim() == 5
        num_pages, page_stride = (held.shape[1], held.stride(1)) if whole else (1, 0)
        r.keys, r.values = halves(held)
        r.head_stride, r.page_stride, r.page, r.room = held.stride(-3), page_stride, page, num_pages * page
        r.first, r.query, r.windowed = run.first, run.query, run.windowed

    def _joined(self, mass: Tensor) -> Tensor:
        """[..., parts of chunks] -> [..., chunks]; the last one may be of a few parts only."""
        parts = self._chunk // self._part
        return mass if parts == 1 else pad(mass, (0, -mass.shape[-1] % parts)).unflatten(-1, (-1, parts)).sum(-1)


def _at_least(scratch: Tensor, num_floats: int) -> Tensor:
    """`scratch`, or a larger one: with half as much again, so that a growing sequence does not allocate each time."""
    return scratch if scratch.numel() >= num_floats else torch.empty(num_floats * 3 // 2)
