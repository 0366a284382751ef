"""CUDA graphs of a GPU on paper, in place of torch.cuda's: kernels are recorded, and a replay computes them again. No
tests in here.

A graph knows tensors and numbers as they were when it was recorded. On a real GPU nothing is computed while it is, so
what was written meanwhile is put back afterwards. Graphs that are recorded one after the other, with nothing launched
in between, are pieces of a pass: the memory of one is there for the next ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paper.clocks import Block

if TYPE_CHECKING:
    from paper.gpu import PaperGpu

Access = tuple["weakref.ref[Block]", Tensor, bool, str]  # the memory, the values, whether it is written, by what


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, gpu: PaperGpu) -> None:
        self._gpu = gpu
        self._accesses: list[Access] = []
        self._reached: list[tuple[Tensor, bool, str]] = []  # memory of the host, whether it is written, by what
        self._computed: list[Callable[[], object]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._own: set[int] = set()  # ids of blocks that were allocated while it and those before it were recorded
        self._is_recorded = False

    def follows(self, before: Graph | None) -> None:
        """It is recorded right after another."""
        if before is not None:
            self._own = before._own

    def allocated(self, block: Block) -> None:
        self._own.add(id(block))

    def launched(self, name: str, tensors: Sequence[Any], written: Collection[int]) -> None:
        """A kernel on tensors of the GPU. written: ids of those that it writes."""
        for each in tensors:
            is_own = id(each.block) in self._own
            self._accesses.append((weakref.ref(each.block), each.raw, id(each) in written, "" if is_own else name))

    def reaches(self, host: Tensor, *, write: bool, name: str) -> None:
        """A kernel reads or writes pinned memory of the host."""
        self._reached.append((host, write, name))

    def writes(self, raw: Tensor) -> None:
        """It is about to be written by what is recorded."""
        self._before.append((raw, raw.clone()))

    def computed(self, compute: Callable[[], Any], out: Sequence[Tensor]) -> None:
        """`compute` gave `out`: tensors of its own, or those that it wrote to."""
        self._computed.append(lambda: _again(compute, out))

    def finish(self) -> None:
        for raw, values in reversed(self._before):
            raw.copy_(values)
        self._before.clear()
        self._is_recorded = True

    def replay(self) -> None:
        """One launch, on the current stream."""
        if not self._is_recorded:
            self._gpu.problem("a graph is replayed that was not recorded")
        self._gpu.recorded_last = None
        actor = self._gpu.stream.actor
        actor.learn(self._gpu.host.clock)
        actor.step()
        self._gpu.launches["graph"] += 1
        for reference, raw, write, name in self._accesses:
            if (block := reference()) is not None:
                self._gpu.access(block, raw, actor, write=write, what=f"{name} in a graph")
            elif name:
                self._gpu.problem(f"{name} in a graph uses memory that was given back")
        for host, write, name in self._reached:
            self._gpu.access_host(host, actor, write=write, what=f"{name} in a graph")
        for compute in self._computed:
            compute()


def _again(compute: Callable[[], Any], out: Sequence[Tensor]) -> None:
    made = compute()
    new_ones = [each for each in (made if isinstance(made, (list, tuple)) else (made,)) if isinstance(each, Tensor)]
    for old, new in zip(out, new_ones, strict=True):
        if new is not old:
            old.copy_(new)


class Pools:
    """Pools of graphs' memory. torch's allocator asserts that a pool which was used before has a graph still."""

    def __init__(self) -> None:
        self._graphs: list[weakref.WeakSet[Graph]] = []
        self._used: set[int] = set()

    def new(self) -> int:
        """`torch.cuda.graph_pool_handle`."""
        self._graphs.append(weakref.WeakSet())
        return len(self._graphs)

    def use(self, gpu: PaperGpu, graph: Graph, handle: int) -> None:
        graphs = self._graphs[handle - 1]
        if not graphs and handle in self._used:
            gpu.problem("a pool of graphs is used again after its last graph")
        self._used.add(handle)
        graphs.add(graph)


@contextmanager
def recording(gpu: PaperGpu, graph: Graph, *, pool: int, **_: object) -> Iterator[None]:
    """`torch.cuda.graph`, which waits for the GPU first."""
    gpu.pools.use(gpu, graph, pool)
    gpu.synchronize()
    graph.follows(gpu.recorded_last)
    gpu.recording = gpu.recorded_last = graph
    gpu.num_graphs += 1
    try:
        with torch.inference_mode():
            yield
    finally:
        gpu.recording = None
        graph.finish()
