"""Passes as CUDA graphs: a launch in place of many, where all that a pass uses stays where it is on the GPU.

What follows a pass may be part of its graph, such as a draw from its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.errors import TriforceError

VARIABLE = "TRIFORCE_GRAPHS"

Tensors = tuple[Tensor, ...]
Compute = Callable[..., Tensors]
Kind = tuple[Hashable, tuple[torch.Size, ...]]  # what follows the pass, and the shapes of what is given


@dataclass(frozen=True)
class _Recorded:
    """The graph, what is given to it, and what it makes of that."""

    graph: torch.cuda.CUDAGraph
    given: Tensors
    made: Tensors


class Graphs:
    """Of one level's passes, by their kinds and what follows them."""

    def __init__(self) -> None:
        self._memory: Hashable = None  # what they were recorded with
        self._follows: Hashable = None  # likewise
        self._seen: set[Kind] = set()
        self._recorded: dict[Kind, _Recorded] = {}
        self._pool: Any = None
        self.first_passes = 0  # that were launched one by one or recorded

    def run(self, memory: Hashable, given: Sequence[Tensor], compute: Compute, *, follows: Hashable = None) -> Tensors:
        """`compute(*given)`, launched one by one the first time, which compiles kernels, and later as a graph.

        memory: of the caches that it uses; where it changes, graphs are recorded anew. given: tokens, and what else may
        differ in its values; other shapes are another graph. follows: what `compute` does after the pass, None for
        nothing; graphs of one such thing are kept. `compute` must not wait for the GPU, and may differ between calls of
        such a kind in what is in memory only. Raises TriforceError where the GPU does not record it, with the remedy.
        """
        if memory != self._memory:
            self.forget()
            self._memory = memory
        if follows is not None and follows != self._follows:
            self._forget_followed()
            self._follows = follows
        key = follows, tuple(tensor.shape for tensor in given)
        self.first_passes += key not in self._recorded
        if key not in self._seen:
            made = compute(*given)
            self._seen.add(key)  # not before: a pass that was broken off has not compiled all of its kernels
            return made
        if key not in self._recorded:
            self._recorded[key] = self._record(tuple(tensor.clone() for tensor in given), compute)
        found = self._recorded[key]
        for ours, theirs in zip(found.given, given, strict=True):
            ours.copy_(theirs)
        found.graph.replay()
        return tuple(tensor.clone() for tensor in found.made)  # the next replay writes to them

    def forget(self) -> None:
        """The next pass of each kind is launched one by one again."""
        self._seen.clear()
        self._recorded.clear()

    def _forget_followed(self) -> None:
        """Each would keep memory, and a request's parameters may be those of no other."""
        self._seen = {key for key in self._seen if key[0] is None}
        self._recorded = {key: graph for key, graph in self._recorded.items() if key[0] is None}

    def _record(self, given: Tensors, compute: Compute) -> _Recorded:
        """Graphs share memory for what they make on the way: they run one after the other."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                return _Recorded(graph, given, compute(*given))
        except RuntimeError as error:
            said = str(error).strip().partition("\n")[0]
            raise TriforceError(
                f"the GPU does not record a pass as a graph ({said}); {VARIABLE}=off in the environment launches its "
                "kernels one by one"
            ) from error
