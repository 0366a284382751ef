"""The places of new rows, in the device's memory: a pass that runs as a graph finds them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.kernels.rope import Scoring, rotate, rotate_queries


class RowPlaces:
    """positions: of rows in the sequence; slots: of a buffer that they go to; int64 [T] each.

    Whatever is made of them is made once, in the first layer that asks, for all.
    """

    def __init__(self, positions: Tensor, slots: Tensor) -> None:
        self.positions, self.slots = positions, slots
        self._made: dict[tuple[str, int], Tensor] = {}

    def keys(self, k: Tensor, scoring: Scoring) -> Tensor:
        """k [T, H_kv, D], rotated and weighed. scoring: of all positions, kept by the caller."""
        table = self._rows("cos", scoring.rope.cos), self._rows("sin", scoring.rope.sin)
        return scoring.weighed_keys(rotate(k, *table))

    def queries(self, q: Tensor, scoring: Scoring, last: int | None = None) -> Tensor:
        """q [T, H, D], rotated to the positions, none after `last`, and weighed."""
        rope = scoring.rope
        table = self._rows("cos", rope.cos, last), self._rows("sin", rope.sin, last)
        growth = None if rope.growth is None else self._rows("growth", rope.growth, last)
        return scoring.weighed_queries(rotate_queries(q, table, growth))

    def _rows(self, name: str, table: Tensor, last: int | None = None) -> Tensor:
        """Rows of a table [positions, ...]."""
        at = self.positions if last is None else self._once("up to", last, lambda: self.positions.clamp(max=last))
        return self._once(f"{name} {last}", id(table), lambda: table.index_select(0, at))

    def up_to_own(self, group: int) -> Tensor:
        """[group * T]: the number of slots up to each row's own, for folded rows of `group` heads."""
        return self._once("own", group, lambda: (self.slots + 1).repeat(group))

    def before(self, count: int) -> Tensor:
        """[count]: slots up to that of the last row, which is the last one; 0 for those before the first."""
        steps = torch.arange(1 - count, 1, device=self.slots.device)
        return self._once("before", count, lambda: (steps + self.slots[-1]).clamp_(min=0))

    def write(self, rows: Sequence[Tensor], held: Tensor) -> None:
        """Keys and values [T, H_kv, D] into the slots of `held` [2, H_kv, S, D]."""
        for half, new in zip(held, rows, strict=True):
            half.index_copy_(1, self.slots, new.transpose(0, 1))

    def _once(self, name: str, number: int, make: Callable[[], Tensor]) -> Tensor:
        if (name, number) not in self._made:
            self._made[name, number] = make()
        return self._made[name, number]
