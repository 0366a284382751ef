"""The arena: device memory that users need at different times: a prefill and the retrieval cache, or a prefill and
slots for experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from offload.transfer.memory import Memory

_ALIGNMENT = 256  # bytes


class Lender(Protocol):
    """The owner of a piece of an arena, who has it whenever no turn needs it."""

    def lend(self, num_bytes: int) -> None:
        """Give up the first `num_bytes` of the piece until `take_back`, at least. Computation issued from now on finds
        no copy to or from them in flight."""
        ...

    def take_back(self) -> None:
        """Have the whole piece again, with any content. Computation issued before may still use it."""
        ...


L = TypeVar("L", bound=Lender)


class Arena:
    """One block of `num_bytes`, allocated from its beginning; requests that do not fit are allocated from `memory`,
    until the next user's turn. A turn is the time in which one user has the arena.

    Lenders own pieces at its end, the first of them the last piece. They keep what a turn does not take.

    Device work that was issued before a turn runs before the work of its user. Copies over a link are ordered by their
    events: a user's `give_up` returns when no copy of its bytes is in flight, or computation waits for each.
    """

    def __init__(self, memory: Memory, num_bytes: int = 0, *, purpose: str = "arena") -> None:
        self._memory, self._purpose = memory, purpose
        self._block = memory.allocate((num_bytes,), torch.uint8, tier="device", purpose=purpose)
        self._used = 0
        self._more: list[Tensor] = []
        self._give_up: Callable[[], None] | None = None  # of the current user
        self._lenders = list[tuple[int, Lender]]()  # each with the beginning of its piece, the last piece first

    def own(self, shape: tuple[int, ...], lender: Callable[[Tensor], L]) -> L:
        """A lender, made with its piece, uint8 of `shape`: the bytes before those of the lender before it."""
        stop = self._lenders[-1][0] if self._lenders else self._block.nbytes
        if (start := stop - math.prod(shape)) < 0:
            raise ValueError(f"a piece of {math.prod(shape)} bytes does not fit into the {stop} that nobody owns")
        made = lender(self._block[start:stop].view(shape))
        self._lenders.append((start, made))
        return made

    def begin(self, give_up: Callable[[], None]) -> None:
        """Begin the caller's turn: the previous user gives up all bytes, and the caller owns them until `give_up` is
        called."""
        self.end()
        self._give_up = give_up

    def end(self) -> None:
        """End the turn, if there is one: its user gives up all bytes, and lenders have theirs again."""
        try:
            if self._give_up is not None:
                self._give_up()
        finally:
            self._drop()

    @torch.inference_mode(False)  # see `Memory.allocate`
    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor, see `Memory.allocate`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > self._block.nbytes:
            self._more.append(self._memory.allocate(shape, dtype, tier="device", purpose=self._purpose))
            return self._more[-1]
        self._borrow(self._used + num_bytes)
        taken = self._block[self._used : self._used + num_bytes].view(dtype).view(shape)
        self._used = min(self._used + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT, self._block.nbytes)
        return taken.zero_()

    def put_back(self, taken: Tensor) -> None:
        """Return `taken`, which the caller no longer needs."""
        kept = [block for block in self._more if block is not taken]
        if len(kept) < len(self._more):
            self._memory.released(taken, tier="device", purpose=self._purpose)
        self._more = kept

    def release(self) -> None:
        """Free the arena, which is not used again."""
        self._drop()
        self._memory.released(self._block, tier="device", purpose=self._purpose)

    def _drop(self) -> None:
        for block in self._more:
            self._memory.released(block, tier="device", purpose=self._purpose)
        self._more.clear()
        self._used, self._give_up = 0, None
        for _, lender in self._lenders:
            lender.take_back()

    def _borrow(self, stop: int) -> None:
        """Have lenders give up what they own of the first `stop` bytes."""
        for start, lender in self._lenders:
            if start < stop:
                lender.lend(stop - start)
