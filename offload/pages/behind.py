"""Packing of pages on a thread of its own, behind what the device computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from offload.pages.table import Page
from offload.transfer.link import Event


class PackingThread:
    """A thread that packs one batch of pages at a time. It enters nothing anywhere: who takes its result does."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pages: tuple[Page, ...] = ()
        self._sizes: Future[Tensor] | None = None
        self._after: Sequence[Event] = ()

    @property
    def pages(self) -> frozenset[Page]:
        """The pages that it packs, or has packed since the last `take`."""
        return frozenset(self._pages)

    @property
    def is_done(self) -> bool:
        return self._sizes is None or self._sizes.done()

    def begin(self, pages: Sequence[Page], after: Sequence[Event], pack: Callable[[], Tensor]) -> None:
        """Begin to pack `pages`, once all of `after` have happened; pack: gives the bytes of each. The last batch was
        taken."""
        assert self._sizes is None
        self._executor = self._executor or ThreadPoolExecutor(1, "packing")
        self._after = after
        self._pages, self._sizes = tuple(pages), self._executor.submit(_packed, after, pack)

    def take(self) -> tuple[Sequence[Page], Tensor, Sequence[Event]]:
        """Wait for the batch -> (its pages, the bytes of each, what happened before). Raises what packing raised; then
        the pages are as they were."""
        assert self._sizes is not None
        pages, sizes, after = self._pages, self._sizes, self._after
        self._pages, self._sizes, self._after = (), None, ()
        return pages, sizes.result(), after

    def close(self) -> None:
        """Wait for the batch, which nobody takes, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown()
        self._executor, self._pages, self._sizes = None, (), None


def _packed(after: Sequence[Event], pack: Callable[[], Tensor]) -> Tensor:
    for event in after:
        event.synchronize()
    return pack()
