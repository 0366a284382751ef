"""Host blocks that a thread allocates and pins in advance: pinning 100 GB takes seconds to minutes, in which a
checkpoint can be read."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from offload.interrupts import poll

_LOOK_SECONDS = 0.1


class Prepinned:
    """Blocks of `sizes` bytes, made by `make` on a thread in this order, and held until they are taken.

    An error of `make` ends the thread. It is raised by every `take` of a block that was not made.
    """

    def __init__(self, sizes: Sequence[int], make: Callable[[int], Tensor]) -> None:
        self._sizes, self._make = sizes, make
        self._expected = Counter(sizes)  # blocks by bytes that were not requested yet
        self._made: dict[int, list[Tensor]] = defaultdict(list)
        self._done = 0  # bytes made
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pin", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        """Bytes of the blocks that are made but not taken yet."""
        with self._changed:
            return sum(num_bytes * len(blocks) for num_bytes, blocks in self._made.items())

    def take(self, num_bytes: int) -> Tensor | None:
        """A block of that size, as soon as it is made; None if no further block of this size is expected."""
        with self._changed:
            if self._closed or not self._expected[num_bytes]:
                return None
            self._expected[num_bytes] -= 1
            while not self._made[num_bytes]:
                if self._error is not None:
                    raise self._error
                poll()
                self._changed.wait(_LOOK_SECONDS)
            return self._made[num_bytes].pop()

    def wait(self, on_bytes: Callable[[int, int], None]) -> None:
        """Wait until all blocks are made, or one failed. `on_bytes(done, total)` is called meanwhile, but not if there
        is nothing to wait for."""
        total, waited = sum(self._sizes), False
        while self._thread.is_alive() and self._done < total:
            waited = True
            on_bytes(self._done, total)
            self._thread.join(_LOOK_SECONDS)
        if waited and self._done == total:
            on_bytes(total, total)

    def close(self) -> None:
        """End the thread, which finishes at most one block, and drop blocks that were not taken. Idempotent."""
        self._closed = True
        self._thread.join()
        self._made.clear()

    def _run(self) -> None:
        try:
            for num_bytes in self._sizes:
                if self._closed:
                    return
                block = self._make(num_bytes)
                with self._changed:
                    self._made[num_bytes].append(block)
                    self._done += num_bytes
                    self._changed.notify_all()
                del block
        except BaseException as error:  # raised where the memory is taken
            with self._changed:
                self._error = error
                self._changed.notify_all()
