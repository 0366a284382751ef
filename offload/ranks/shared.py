"""Memory that the ranks of one machine share, in which each shows the others what it has computed.

Every rank has two slots and a count of the pieces that it has shown. It shows piece n in slot n mod 2, and then waits
until all others have shown theirs; who has shown piece n + 1 has read all of piece n, so its slots may be written
again. Nothing but counts is waited for, and no lock is held: a rank that dies leaves nothing in disorder.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from offload.native.interface import DTYPES

SLOT_BYTES = 1 << 18  # what a core's own cache holds beside what is read
_COUNT_BYTES = 64  # a cache line
_LOOK_NANOSECONDS = 100_000_000  # how often a rank that waits looks whether the others are still there


def create(size: int) -> int:
    """A file of memory for so many ranks. It has no name, so nobody has it but who is given it. Linux."""
    file = os.memfd_create("sums")
    os.truncate(file, _num_bytes(size))
    return file


def _num_bytes(size: int) -> int:
    return mmap.PAGESIZE * -(-size * _COUNT_BYTES // mmap.PAGESIZE) + 2 * size * SLOT_BYTES


class SharedMemory:
    """As rank `rank` of `size` sees it. Every rank makes the same calls in the same order, of contiguous tensors of the
    same shapes on the CPU.

    library: the kernels. check: called now and then by who waits; raises what has become of the others.
    """

    def __init__(self, file: int, rank: int, size: int, library: ctypes.CDLL, check: Callable[[], None]) -> None:
        self.rank, self.size, self._library, self._check = rank, size, library, check
        self._memory = torch.frombuffer(mmap.mmap(file, _num_bytes(size)), dtype=torch.uint8)
        start = self._memory.data_ptr()
        self._counts = [start + each * _COUNT_BYTES for each in range(size)]
        self._shown = ctypes.c_uint64.from_address(self._counts[rank])
        slots = start + len(self._memory) - 2 * size * SLOT_BYTES
        self._slots = [
            (ctypes.c_size_t * size)(*(slots + (2 * each + parity) * SLOT_BYTES for each in range(size)))
            for parity in range(2)
        ]  # their addresses, by number of the piece and rank
        self._due = 0  # what the count is after the call that is under way

    def total(self, part: Tensor) -> Tensor:
        """part -> the sum over all ranks, the same bits on each, in place of it. Numbers are added in fp32 in the order
        of the ranks, and rounded once."""
        dtype, item, to = DTYPES[part.dtype], part.itemsize, part.data_ptr()
        for start, num_bytes, slots in self._pieces(part):
            self._library.add_parts(dtype, slots, self.size, to + start, num_bytes // item)
        return part

    def gather(self, part: Tensor) -> list[Tensor]:
        """part -> the parts of all ranks on rank 0, nothing on the others."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        for start, num_bytes, slots in self._pieces(part):
            for to, slot in zip(parts, slots, strict=False):
                ctypes.memmove(to.data_ptr() + start, slot, num_bytes)
        return parts

    def scatter(self, parts: Sequence[Tensor], own: Tensor) -> None:
        """`own` is filled with this rank's of the `parts` on rank 0."""
        for rank in range(self.size):
            for start, num_bytes, slots in self._pieces(parts[rank] if parts else own):
                if rank == self.rank:
                    ctypes.memmove(own.data_ptr() + start, slots[0], num_bytes)

    def finish(self) -> None:
        """Let the others have all pieces of a call that was broken off here, whatever is in them."""
        self._wait()
        while self._shown.value < self._due:
            self._show()

    def _pieces(self, shown: Tensor) -> Iterator[tuple[int, int, ctypes.Array[ctypes.c_size_t]]]:
        """Show the others a tensor. Yields, as soon as all have shown theirs and until the next is asked for, where a
        piece begins, its bytes, and the addresses at which all ranks' are."""
        source, whole = shown.data_ptr(), shown.nbytes
        starts = range(0, whole, SLOT_BYTES)
        self._due += len(starts)
        for start in starts:
            slots, num_bytes = self._slots[self._shown.value % 2], min(SLOT_BYTES, whole - start)
            ctypes.memmove(slots[self.rank], source + start, num_bytes)
            self._show()
            yield start, num_bytes, slots

    def _show(self) -> None:
        self._library.post(self._counts[self.rank], self._shown.value + 1)
        self._wait()

    def _wait(self) -> None:
        """Until all have shown as many pieces as this rank."""
        for count in self._counts:
            while not self._library.await_count(count, self._shown.value, _LOOK_NANOSECONDS):
                self._check()
