"""Attention of new rows over spans of keys and values in the CPU's memory, by its kernels, and their merge.

Every span is attended to by itself, whenever its keys are at hand; at the end a row's spans are merged, first to last.
So a row's bits depend on the keys that it sees alone. Letters are those of kernels/attention: T rows, G query heads for
each KV head, D head dimension.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, log

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.formats.quantised_kv import KVCodes
from offload.kernels.attention import Part
from offload.kernels.places import RowPlaces
from offload.kernels.rope import Scoring
from offload.native.interface import DTYPES, Attention, Library, Rotation, Run

SPAN = 128  # tokens, where pages allow: what a thread takes at a time
_FLOATS = 2  # of a partial result, beside its sum of values: the largest score and the sum of weights


def one_run(
    tensor: Tensor, *, first: int, tokens: int, slot: int, span: int, query: int = 0, windowed: bool = False
) -> ctypes.Array[Run]:
    """A run of one tensor: [2, P, H_kv, S, D] or, as one page, [2, H_kv, S, D], keys and values, contiguous in the last
    two dimensions. It holds positions `first` and on, of which `tokens` count. slot: the number of its first span.
    query: which query a row has for it. windowed: rows see what is in their window only."""
    keys, item = tensor.data_ptr(), tensor.itemsize
    page, num_pages = tensor.shape[-2], tensor.shape[1] if tensor.dim() == 5 else 1
    page_stride = tensor.stride(1) if tensor.dim() == 5 else 0
    return (Run * 1)(
        Run(
            keys, keys + tensor.stride(0) * item, tensor.stride(-3), page_stride, first, tokens, num_pages * page, page,
            span, slot, query, windowed, False,
        )
    )  # fmt: skip


def coded_run(codes: KVCodes, layer: int, *, tokens: int, slot: int, span: int) -> ctypes.Array[Run]:
    """A run of the first `tokens` tokens of a layer's codes, whole groups. All rows see all of them; no masses are kept
    of them, and no rows taken in."""
    blocks = codes.blocks[layer]
    return (Run * 1)(Run(blocks.data_ptr(), None, blocks.stride(0), 0, 0, tokens, 0, 0, span, slot, 0, False, True))


@dataclass(frozen=True)
class Rows:
    """New rows of a forward in a layer: q [T, H, D], k and v [T, H_kv, D], not rotated, each row contiguous. scoring:
    of the layer, its table rounded to the rows' dtype. position: of the first one in that table; index: of the first
    one among the runs' positions. window: tokens that rows see of windowed runs. places: both in the memory of a GPU,
    `slots` for the index."""

    q: Tensor
    k: Tensor
    v: Tensor
    scoring: Scoring
    position: int
    index: int
    window: int = 0
    places: RowPlaces | None = None


class SpanAttention:
    """One attention at a time: `begin`, `append_rows` and `attend` as tiles come, then `merge`. Keeps its scratch."""

    def __init__(self, kernels: Library, *, dtype: torch.dtype, span: int, chunk: int | None = None) -> None:
        """span: tokens of the runs' spans; chunk: tokens of a chunk."""
        self._library, self._dtype, self.span = kernels.library, dtype, span
        self._code = DTYPES[dtype]
        self._chunk, self._part = (
            chunk or 0,
            gcd(chunk or 0, span),
        )  # masses are summed by parts, then joined
        self._queries = self._partials = self._masses = self._scratch = torch.empty(0)
        self._attention, self._rotation = Attention(), Rotation()
        self._rows: Rows | None = None

    def begin(self, rows: Rows, num_slots: int, *, masses: bool = False, lasts: Sequence[int] = ()) -> None:
        """Rotate the queries. num_slots: spans of all runs to come. masses: `merge` returns them. lasts: for each query
        that a row has, the position that it is rotated to at most; (): one query, at the row's own."""
        (num_rows, num_heads, dim), num_kv_heads = rows.q.shape, rows.k.shape[1]
        library, a, lasts = self._library, self._attention, lasts or (rows.position + num_rows,)
        room = library.widened_room(self._code, dim) + _FLOATS
        folded = num_heads * num_rows
        chunks = self.span // self._part if masses and self._chunk else 0
        self._queries = _at_least(self._queries, len(lasts) * folded * dim)
        self._partials = _at_least(self._partials, num_slots * folded * room)
        self._masses = _at_least(self._masses, num_slots * folded * chunks)
        self._per_thread = library.scratch_room(dim, folded // num_kv_heads, self.span)
        self._scratch = _at_least(self._scratch, torch.get_num_threads() * self._per_thread)
        a.queries, a.partials = self._queries.data_ptr(), self._partials.data_ptr()
        a.masses = self._masses.data_ptr() if chunks else None
        a.rows, a.group, a.kv_heads, a.head_dim = num_rows, num_heads // num_kv_heads, num_kv_heads, dim
        a.position, a.window, a.slots = rows.index, rows.window, num_slots
        a.chunk, a.chunks, a.out_stride = self._part, chunks, num_heads * dim
        a.scale, a.cap, rope = rows.scoring.scale or 0.0, rows.scoring.cap or 0.0, rows.scoring.rope
        r = self._rotation
        r.q, r.k, r.v = rows.q.data_ptr(), None, rows.v.data_ptr()
        r.cos, r.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
        r.growth = None if rope.growth is None else rope.growth.data_ptr()
        weights = rows.scoring.weights
        r.q_weight, r.k_weight = (None, None) if weights is None else (each.data_ptr() for each in weights)
        r.q_stride, r.k_stride, r.v_stride = rows.q.stride(0), rows.k.stride(0), rows.v.stride(0)
        r.rows, r.group, r.kv_heads, r.head_dim = a.rows, a.group, a.kv_heads, dim
        r.position, r.index, r.count = rows.position, rows.index, 0
        for number, last in enumerate(lasts):
            r.queries, r.last = self._queries.data_ptr() + number * folded * dim * 4, last
            library.append_rows(self._code, ctypes.byref(r))
        r.queries, r.k, r.last = None, rows.k.data_ptr(), rows.position + num_rows
        self._rows = rows

    def exact_run(
        self, tensor: Tensor, *, first: int, tokens: int, slot: int, query: int = 0, windowed: bool = False
    ) -> ctypes.Array[Run]:
        """See `one_run`."""
        return one_run(tensor, first=first, tokens=tokens, slot=slot, span=self.span, query=query, windowed=windowed)

    def coded_run(self, codes: KVCodes, layer: int, *, tokens: int, slot: int) -> ctypes.Array[Run]:
        """See `coded_run`."""
        return coded_run(codes, layer, tokens=tokens, slot=slot, span=self.span)

    def append_rows(self, runs: ctypes.Array[Run], count: int = 1) -> None:
        """Write the rows' keys, rotated, and values to those of the first `count` runs that have room for them."""
        self._rotation.runs, self._rotation.count = ctypes.addressof(runs), count
        self._library.append_rows(self._code, ctypes.byref(self._rotation))

    def attend(self, runs: ctypes.Array[Run], count: int = 1) -> None:
        """Attend to the first `count` runs. Each slot comes once between `begin` and `merge`."""
        self._library.attend_runs(
            self._code, ctypes.byref(self._attention), runs, count, self._scratch.data_ptr(), self._per_thread,
            torch.get_num_threads(),
        )  # fmt: skip

    def merge(self) -> tuple[Tensor, Tensor | None]:
        """(out [T, H * D], mass [T, H_kv, C] fp32 or None): each row's softmax mass per chunk, summed over its query
        group, for all slots' chunks."""
        a = self._attention
        return self._merged(torch.empty(a.rows, a.out_stride, dtype=self._dtype), a.kv_heads)

    def part(self) -> Part:
        """In place of `merge`, what is to be joined with attention over other keys: out [T, H, D], lse [T, H], mass
        [T, H, C] or None, all fp32."""
        a = self._attention
        num_heads = a.kv_heads * a.group
        sums = torch.empty(a.rows, num_heads, 2)
        a.sums = sums.data_ptr()
        out, mass = self._merged(torch.empty(a.rows, a.out_stride), num_heads)
        a.sums = None
        top, total = sums.unbind(-1)
        return Part(out.unflatten(1, (num_heads, -1)), top * log(2) + total.log(), mass)

    def _merged(self, out: Tensor, num_heads: int) -> tuple[Tensor, Tensor | None]:
        """The spans' merge into `out`, and masses of so many heads."""
        assert self._rows is not None
        a = self._attention
        mass = torch.empty(a.rows, num_heads, a.slots * a.chunks) if a.chunks else None
        a.out, a.mass = out.data_ptr(), None if mass is None else mass.data_ptr()
        self._library.merge_runs(self._code, ctypes.byref(a), torch.get_num_threads())
        self._rows = None
        return out, None if mass is None else self._joined(mass)

    def _joined(self, mass: Tensor) -> Tensor:
        """[..., parts of chunks] -> [..., chunks]; the last one may be of a few parts only."""
        parts = self._chunk // self._part
        return mass if parts == 1 else pad(mass, (0, -mass.shape[-1] % parts)).unflatten(-1, (-1, parts)).sum(-1)


def _at_least(scratch: Tensor, num_floats: int) -> Tensor:
    """`scratch`, or a larger one: with half as much again, so that a growing sequence does not allocate each time."""
    return scratch if scratch.numel() >= num_floats else torch.empty(num_floats * 3 // 2)
