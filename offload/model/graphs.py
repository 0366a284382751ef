"""Passes as CUDA graphs: one launch in place of many, where all tensors of a pass stay at fixed addresses on the GPU.

A graph may include computations after the pass, such as a draw from its logits. Where the host has work in the middle
of a pass (`native.host_work`), as for experts that cross the link, the pass is several graphs with that work between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from offload.errors import TriforceError
from offload.native.host_work import Work, noted

VARIABLE = "TRIFORCE_GRAPHS"
MOST_GRAPHS = 64  # of a level: more than a request uses
MOST_BYTES = 2**26  # of their outputs, probabilities and logits

Tensors = tuple[Tensor, ...]
Compute = Callable[..., list[Tensors]]
Kind = tuple[Hashable, tuple[torch.Size, ...]]  # what the pass is, and the shapes of its inputs


class GraphPool:
    """The GPU memory of graphs' intermediates, which a model's graphs share, since they run one after the other."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def take(self, graph: torch.cuda.CUDAGraph) -> Any:
        """The pool's handle for a graph to be recorded. Without graphs a pool is gone, so that its handle is new."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._handle


class _Pieces:
    """A recorded pass: graphs, and the host's work after each but the last."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._works: list[Work] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, kernels are recorded and not run."""
        with ExitStack() as under_way:

            def cut(work: Work) -> None:
                under_way.close()
                self._works.append(work)
                under_way.enter_context(self._recorded())

            under_way.enter_context(self._recorded())
            with noted(cut):
                yield

    def replay(self) -> None:
        for graph, work in zip_longest(self._graphs, self._works):
            graph.replay()
            if work is not None:
                work()

    def _recorded(self) -> AbstractContextManager[None]:
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        recorded: AbstractContextManager[None] = torch.cuda.graph(
            graph, pool=self._pool.take(graph), capture_error_mode="thread_local"
        )
        return recorded


@dataclass(frozen=True)
class _Recorded:
    """A recorded pass, its input tensors and its output tensors, of each pass. kind: what it was recorded for, whose
    computations own tensors that the graphs read; an equal one may be kept elsewhere and own others."""

    pieces: _Pieces
    given: Tensors
    made: list[Tensors]
    kind: Kind

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs, which no other graph may overwrite."""
        return sum(tensor.nbytes for made in self.made for tensor in made)


class Graphs:
    """The graphs of one level's passes, by kind: those that were used last, as far as MOST_GRAPHS and MOST_BYTES go."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._kinds: OrderedDict[Kind, _Recorded | int] = OrderedDict()  # a number: of uses so far, one by one
        self.first_passes = 0  # passes that were launched one by one or recorded
        self.has_room = True  # until the GPU has no memory for a graph; from then on there are none

    def run(
        self, key: Hashable, given: Sequence[Tensor], compute: Compute, *, patience: int = 1
    ) -> list[Tensors] | None:
        """The results of `compute(*given)`, of each pass: kernel by kernel `patience` times, the first of which
        compiles kernels, later as a graph. None where the GPU has no memory for it: `compute` may have begun then.

        key: calls with equal keys, and given tensors of equal shapes, differ in nothing but the contents of memory.
        given: the tokens and all other tensors whose values may change. `compute` must not wait for the GPU but in
        `host_work.between`. Raises TriforceError, with the remedy, where the GPU does not record it.
        """
        kind = key, tuple(tensor.shape for tensor in given)
        found = self._kinds.get(kind, 0)
        self.first_passes += isinstance(found, int)
        if isinstance(found, int) and found >= patience:
            if (recorded := self._record(kind, given, compute)) is None:
                return None
            self._add(kind, found := recorded)
        if isinstance(found, int):
            made = compute(*given)
            self._add(kind, found + 1)  # after the call: an interrupted pass has not compiled all of its kernels
            return made
        self._kinds.move_to_end(kind)
        for ours, theirs in zip(found.given, given, strict=True):
            ours.copy_(theirs)
        found.pieces.replay()
        return [tuple(tensor.clone() for tensor in made) for made in found.made]  # the next replay overwrites them

    def forget(self) -> None:
        """Drop all graphs: the next pass of each kind launches its kernels one by one."""
        self._kinds.clear()

    def _add(self, kind: Kind, found: _Recorded | int) -> None:
        """Enter a recorded pass, or a number of uses, for `kind`, which is used now. The kinds that were used longest
        ago make room."""
        self._kinds[kind] = found
        self._kinds.move_to_end(kind)
        while len(self._kinds) > 1 and (len(self._kinds) > MOST_GRAPHS or self._nbytes > MOST_BYTES):
            self._kinds.popitem(last=False)

    @property
    def _nbytes(self) -> int:
        return sum(found.nbytes for found in self._kinds.values() if isinstance(found, _Recorded))

    def _record(self, kind: Kind, inputs: Sequence[Tensor], compute: Compute) -> _Recorded | None:
        """Record a pass. None, and no graph from now on, where the GPU has no memory for it."""
        pieces = _Pieces(self._pool)
        try:
            given = tuple(tensor.clone() for tensor in inputs)
            with pieces.recording():
                return _Recorded(pieces, given, compute(*given), kind)
        except RuntimeError as error:
            if _is_of_memory(error):
                self.forget()
                self.has_room = False
                return None
            said = str(error).strip().partition("\n")[0]
            raise TriforceError(
                f"the GPU does not record a pass as a graph ({said}); {VARIABLE}=off in the environment launches its "
                "kernels one by one"
            ) from error


def _is_of_memory(error: RuntimeError) -> bool:
    """Whether the GPU had too little memory: also for what is not torch's own, as a graph itself is."""
    out = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    return out or isinstance(error.__context__, torch.OutOfMemoryError)
