"""Attention of new rows to tokens of which some are in 4 bits, and the others exact, the new ones among these."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from offload.formats.quantised_kv import GROUP, KVCodes
from offload.kernels.device import DeviceKernels
from offload.kernels.rope import Scoring
from offload.kernels.rows import rounded_up
from offload.kernels.runs import Rows, Run, attended
from offload.kv.places import QKV, Places, joined
from offload.plan.fixed_bytes import KV_ROWS

EXACT = GROUP  # first tokens of a sequence, which attention needs most: they stay as they are


class QuantisedAttention:
    """One layer at a time. scorings: of each layer, tables rounded to `dtype`. reads: see `FullCache`, of codes; ():
    each layer has its own. places: of the rows, of the caller's.
    reach: the most tokens in codes that the forward attends to; on a GPU their number is in its memory, and passes of
    equal reach may be one graph."""

    def __init__(
        self,
        kernels: DeviceKernels,
        scorings: Sequence[Scoring],
        dtype: torch.dtype,
        places: Places,
        reads: Sequence[int] = (),
    ) -> None:
        self._attention, self._scorings, self._places = kernels.attention(dtype=dtype), scorings, places
        self._reads = reads or range(len(scorings))
        self.reach = 0

    @property
    def graph_key(self) -> Hashable:
        """A part of `Cache.graph_key`: the places, and the reach."""
        return self._places.number, self.reach

    def begin(self, position: int, row: int, num_rows: int, num_coded: int, codes: KVCodes) -> None:
        """A forward of `num_rows` rows starts: the position of the first and its row among the exact ones; it attends
        to the first `num_coded` tokens of `codes`."""
        self._places.set(position, row, num_rows, num_coded=num_coded)
        self._codes = codes
        groups, most = num_coded // GROUP, codes.blocks.shape[2]
        self.reach = (rounded_up(groups, most) if self._places.in_memory else groups) * GROUP

    def attend(self, layer: int, taken: int, qkv: QKV, exact: Tensor, into: Sequence[Tensor]) -> Tensor:
        """Write rows to those of the exact ones `into`, [2, H_kv, rows, D] each, that are theirs -> their attention
        over the layer's own, `exact`, up to theirs and over the coded tokens, [T, H * D].

        taken: rows of the forward before these. qkv: as of `Cache.attend`.
        """
        coded = [Run(self._codes.blocks[self._reads[layer]], self.reach)] if self.reach else []
        blocks = self._places.blocks(taken, qkv, self._scorings[layer], most=KV_ROWS)
        return joined([self._attend(rows, exact, coded, into) for rows in blocks])

    def _attend(self, rows: Rows, exact: Tensor, coded: Sequence[Run], into: Sequence[Tensor]) -> Tensor:
        """A graph is used when there are more exact rows; a GPU hides what is after a row's own."""
        num_exact = rows.index + len(rows.q) if rows.places is None else exact.shape[2]
        runs = [Run(exact, num_exact), *coded]
        return attended(self._attention, rows, runs, into=0, beside=[Run(held, num_exact) for held in into])
