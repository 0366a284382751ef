"""Passes as CUDA graphs: a launch in place of many, where all that a pass uses stays where it is on the card."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.errors import TriforceError

VARIABLE = "TRIFORCE_GRAPHS"

Compute = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Recorded:
    """The graph, its tokens int64 [T], and what it makes of them."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    out: Tensor


class Graphs:
    """Of one level's passes, by number of rows."""

    def __init__(self) -> None:
        self._memory: Hashable = None  # what they were recorded with
        self._seen: set[int] = set()
        self._recorded: dict[int, _Recorded] = {}
        self._pool: Any = None

    def run(self, memory: Hashable, tokens: Tensor, compute: Compute) -> Tensor:
        """`compute(tokens)`, launched one by one the first time, which compiles kernels, and as a graph from then on.

        memory: of the caches that it uses; where it changes, graphs are recorded anew. `compute` must not wait for the
        card, and may differ from call to call in what is in memory only. Raises TriforceError where the card does not
        record it, with the remedy.
        """
        if memory != self._memory:
            self._memory = memory
            self.forget()
        rows = len(tokens)
        if rows not in self._seen:
            self._seen.add(rows)
            return compute(tokens)
        if rows not in self._recorded:
            self._recorded[rows] = self._record(tokens.clone(), compute)
        found = self._recorded[rows]
        found.tokens.copy_(tokens)
        found.graph.replay()
        return found.out.clone()  # the next replay writes to it

    def forget(self) -> None:
        """The next pass of each number of rows is launched one by one again."""
        self._seen.clear()
        self._recorded.clear()

    def _record(self, tokens: Tensor, compute: Compute) -> _Recorded:
        """Graphs share memory for what they make on the way: they run one after the other."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                return _Recorded(graph, tokens, compute(tokens))
        except RuntimeError as error:
            said = str(error).strip().partition("\n")[0]
            raise TriforceError(
                f"the card does not record a pass as a graph ({said}); {VARIABLE}=off in the environment launches its "
                "kernels one by one"
            ) from error
