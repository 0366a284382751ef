"""Passes as CUDA graphs: one launch in place of many, where all tensors of a pass stay at fixed addresses on the GPU.

A graph may include computations after the pass, such as a draw from its logits.
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
Kind = tuple[Hashable, tuple[torch.Size, ...]]  # the computation after the pass, and the shapes of the inputs


@dataclass(frozen=True)
class _Recorded:
    """A recorded graph, its input tensors and its output tensors."""

    graph: torch.cuda.CUDAGraph
    given: Tensors
    made: Tensors


class Graphs:
    """The graphs of one level's passes, by kind."""

    def __init__(self) -> None:
        self._memory: Hashable = None  # of the caches that the graphs use
        self._follows: Hashable = None  # the computation after the pass that graphs are kept for
        self._seen: set[Kind] = set()
        self._recorded: dict[Kind, _Recorded] = {}
        self._pool: Any = None
        self.first_passes = 0  # passes that were launched one by one or recorded

    def run(self, memory: Hashable, given: Sequence[Tensor], compute: Compute, *, follows: Hashable = None) -> Tensors:
        """The result of `compute(*given)`: kernel by kernel the first time, which compiles kernels, later as a graph.

        memory: identifies the caches' memory; when it changes, graphs are recorded anew. given: the tokens and all
        other tensors whose values may change; other shapes are another graph. follows: identifies the computation after
        the pass, None if there is none; graphs of only one such computation are kept. `compute` must not wait for the
        GPU, and calls of one kind may differ only in the contents of memory. Raises TriforceError, with the remedy,
        where the GPU does not record it.
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
            self._seen.add(key)  # after the call: an interrupted pass has not compiled all of its kernels
            return made
        if key not in self._recorded:
            self._recorded[key] = self._record(tuple(tensor.clone() for tensor in given), compute)
        found = self._recorded[key]
        for ours, theirs in zip(found.given, given, strict=True):
            ours.copy_(theirs)
        found.graph.replay()
        return tuple(tensor.clone() for tensor in found.made)  # the next replay overwrites `made`

    def forget(self) -> None:
        """Drop all graphs: the next pass of each kind launches its kernels one by one."""
        self._seen.clear()
        self._recorded.clear()

    def _forget_followed(self) -> None:
        """Drop the graphs with a computation after the pass: they hold memory, and no other request may use them."""
        self._seen = {key for key in self._seen if key[0] is None}
        self._recorded = {key: graph for key, graph in self._recorded.items() if key[0] is None}

    def _record(self, given: Tensors, compute: Compute) -> _Recorded:
        """Record a graph. All graphs share one pool for intermediates, since they run one after the other."""
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
