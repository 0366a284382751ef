"""Attention of new rows to tokens of which some are in 4 bits, and the others exact, the new ones among these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.formats.quantised_kv import GROUP, KVCodes
from offload.kernels.device import DeviceKernels
from offload.kernels.rope import Scoring
from offload.kernels.spans import Rows
from offload.kv.places import Places
from offload.plan.sizing import KV_ROWS

EXACT = GROUP  # first tokens of a sequence, which attention needs most: they stay as they are


class QuantisedAttention:
    """One layer at a time. kernels: that attend; there have to be some. scorings: of each layer, tables rounded to
    `dtype`. places: of the rows, of the caller's."""

    def __init__(self, kernels: DeviceKernels, scorings: Sequence[Scoring], dtype: torch.dtype, places: Places) -> None:
        spans = kernels.attention(dtype=dtype)
        assert spans is not None
        self._spans, self._scorings, self._places = spans, scorings, places

    def begin(self, position: int, row: int, num_rows: int) -> None:
        """A forward of `num_rows` rows starts: the positions of the first and its row among the exact ones."""
        self._first = position, row
        self._places.set(position, row, num_rows)

    def attend(
        self, layer: int, taken: int, qkv: tuple[Tensor, Tensor, Tensor], exact: Tensor, codes: KVCodes, num_coded: int
    ) -> Tensor:
        """Write rows to those of the layer's exact ones, [2, H_kv, rows, D], that are theirs -> their attention over
        these up to their own and over the first `num_coded` tokens in codes, [T, H * D].

        taken: rows of the forward before these. qkv: as of `Cache.attend`.
        """
        attended = []
        for q, k, v in zip(*(x.split(KV_ROWS) for x in qkv), strict=True):  # on a GPU each takes scratch for all spans
            attended.append(self._attend(layer, taken, (q, k, v), exact, codes, num_coded))
            taken += len(q)
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend(
        self, layer: int, taken: int, qkv: tuple[Tensor, Tensor, Tensor], exact: Tensor, codes: KVCodes, num_coded: int
    ) -> Tensor:
        num_rows, spans, (position, row) = len(qkv[0]), self._spans, self._first
        on_gpu = self._places.on_gpu() is not None
        places = self._places.rows(taken, num_rows) if on_gpu else None
        rows = Rows(*qkv, self._scorings[layer], position + taken, row + taken, places=places)
        # A graph is used when there are more; a GPU hides what is after a row's own.
        num_exact = exact.shape[2] if on_gpu else row + taken + num_rows
        slots = -(-num_exact // spans.span)
        run = spans.exact_run(exact, first=0, tokens=num_exact, slot=0)
        spans.begin(rows, slots - (-num_coded // spans.span))
        spans.append_rows(run)
        spans.attend(run)
        if num_coded:
            spans.attend(spans.coded_run(codes, layer, tokens=num_coded, slot=slots))
        return spans.merge()[0]
