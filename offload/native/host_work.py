"""Work of the host in the middle of a pass on a GPU: done at once, or, where the pass is recorded as graphs, in each
replay between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], object]
_recorders: list[Callable[[Work], None]] = []


def between(work: Work) -> None:
    """Have the host do `work`, which may wait for the GPU and launch kernels. Tensors that it holds stay where they are
    as long as there is a graph of the pass."""
    if _recorders:
        _recorders[-1](work)
    else:
        work()


@contextmanager
def noted(recorder: Callable[[Work], None]) -> Iterator[None]:
    """Within, `recorder` takes the work in place of the host."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()
