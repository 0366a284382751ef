"""Work on a thread of the host, behind what the device computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from offload.transfer.link import Event

_STACK_STEP = 1 << 20  # bytes; systems want multiples of a page
_STARTING = threading.Lock()  # of threads with a stack of their own
Item = TypeVar("Item", bound=Hashable)
Result = TypeVar("Result")


class BackgroundThread(Generic[Item, Result]):
    """A thread that works on one batch of items at a time. What it made changes nothing until somebody takes it.

    name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._items: tuple[Item, ...] = ()
        self._after: Sequence[Event] = ()
        self._made: Future[Result] | None = None

    @property
    def items(self) -> frozenset[Item]:
        """The items that it works on, or has worked on since the last `take`."""
        return frozenset(self._items)

    @property
    def is_done(self) -> bool:
        return self._made is None or self._made.done()

    def begin(self, items: Sequence[Item], after: Sequence[Event], work: Callable[[], Result]) -> None:
        """Begin to work on `items`, once all of `after` have happened. The last batch was taken."""
        assert self._made is None
        self._executor = self._executor or ThreadPoolExecutor(1, self._name)
        self._items, self._after, self._made = tuple(items), after, self._executor.submit(_worked, after, work)

    def take(self) -> tuple[Sequence[Item], Result, Sequence[Event]]:
        """Wait for the batch -> (its items, what was made of them, what happened before). Raises what the work
        raised; there is no batch then, either."""
        assert self._made is not None
        items, made, after = self._items, self._made, self._after
        self._items, self._made, self._after = (), None, ()
        return items, made.result(), after

    def close(self) -> None:
        """Wait for the batch, which nobody takes, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown()
        self._executor, self._items, self._made, self._after = None, (), None, ()


def on_stack(num_bytes: int, work: Callable[[], Result]) -> Result:
    """The result of `work`, done on a thread whose stack has so many bytes. Only those that it uses take memory."""
    with ThreadPoolExecutor(1) as executor:
        with _STARTING:  # the size is the process's
            before = threading.stack_size(-(-num_bytes // _STACK_STEP) * _STACK_STEP)
            try:
                begun = executor.submit(work)  # which starts the thread
            finally:
                threading.stack_size(before)
        return begun.result()


def _worked(after: Sequence[Event], work: Callable[[], Result]) -> Result:
    for event in after:
        event.synchronize()
    return work()
