"""The arena: device memory that a prefill and the retrieval cache use alternately, since they never need it at the same
time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from offload.transfer.memory import Memory

_PURPOSE = "arena"
_ALIGNMENT = 256  # bytes


class Arena:
    """One block of `num_bytes`, allocated from its beginning; requests that do not fit are allocated from `memory`,
    until the next user's turn. A turn is the time in which one user has the arena.

    Device work that was issued before a turn runs before the work of its user. Copies over a link are ordered by their
    events: a user's `give_up` returns when no copy of its bytes is in flight.
    """

    def __init__(self, memory: Memory, num_bytes: int = 0) -> None:
        self._memory = memory
        self._block = memory.allocate((num_bytes,), torch.uint8, tier="device", purpose=_PURPOSE)
        self._used = 0
        self._more: list[Tensor] = []
        self._give_up: Callable[[], None] | None = None  # of the current user

    def begin(self, give_up: Callable[[], None]) -> None:
        """Begin the caller's turn: the previous user gives up all bytes, and the caller owns them until `give_up` is
        called."""
        if self._give_up is not None:
            self._give_up()
        self._drop()
        self._give_up = give_up

    @torch.inference_mode(False)  # see `Memory.allocate`
    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor, see `Memory.allocate`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > self._block.nbytes:
            self._more.append(self._memory.allocate(shape, dtype, tier="device", purpose=_PURPOSE))
            return self._more[-1]
        taken = self._block[self._used : self._used + num_bytes].view(dtype).view(shape)
        self._used = min(self._used + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT, self._block.nbytes)
        return taken.zero_()

    def put_back(self, taken: Tensor) -> None:
        """Return `taken`, which the caller no longer needs."""
        kept = [block for block in self._more if block is not taken]
        if len(kept) < len(self._more):
            self._memory.released(taken, tier="device", purpose=_PURPOSE)
        self._more = kept

    def release(self) -> None:
        """Free the arena, which is not used again."""
        self._drop()
        self._memory.released(self._block, tier="device", purpose=_PURPOSE)

    def _drop(self) -> None:
        for block in self._more:
            self._memory.released(block, tier="device", purpose=_PURPOSE)
        self._more.clear()
        self._used, self._give_up = 0, None
