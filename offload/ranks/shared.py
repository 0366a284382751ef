"""Shared memory in which the ranks of one machine exchange what they have computed.

Every rank has two slots and a count of the pieces that it has written. It writes piece n to slot n mod 2, and then
waits until all others have written theirs. A rank that has written piece n + 1 has read all of piece n, so the slots of
piece n may be overwritten. Ranks wait for counts alone and hold no lock, so a rank that dies leaves no state behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from offload.native.interface import DTYPES

SLOT_BYTES = 1 << 18  # fits a core's own cache beside the data that is read
_COUNT_BYTES = 64  # a cache line
_LOOK_NANOSECONDS = 100_000_000  # interval at which a waiting rank checks that the others are alive


def create(size: int) -> int:
    """A file of memory for `size` ranks. It has no name: only processes that inherit it can open it. Linux only."""
    file = os.memfd_create("sums")
    os.truncate(file, _num_bytes(size))
    return file


def _num_bytes(size: int) -> int:
    return mmap.PAGESIZE * -(-size * _COUNT_BYTES // mmap.PAGESIZE) + 2 * size * SLOT_BYTES


class SharedMemory:
    """The shared memory, as rank `rank` of `size` uses it. Every rank makes the same calls in the same order, with
    contiguous tensors of the same shapes on the CPU.

    library: the CPU's kernels. check: called at intervals while a rank waits; raises where another rank is lost.
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
        ]  # the slots' addresses, by parity of the piece and rank
        self._due = 0  # the count after the call in progress

    def total(self, part: Tensor) -> Tensor:
        """part -> the sum over all ranks, in place, with the same bits on every rank. Numbers are added in fp32 in the
        order of the ranks, and rounded once."""
        dtype, item, to = DTYPES[part.dtype], part.itemsize, part.data_ptr()
        for start, num_bytes, slots in self._pieces(part):
            self._library.add_parts(dtype, slots, self.size, to + start, num_bytes // item)
        return part

    def gather(self, part: Tensor) -> list[Tensor]:
        """part -> the parts of all ranks on rank 0, an empty list on the others."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        for start, num_bytes, slots in self._pieces(part):
            for to, slot in zip(parts, slots, strict=False):
                ctypes.memmove(to.data_ptr() + start, slot, num_bytes)
        return parts

    def scatter(self, parts: Sequence[Tensor], own: Tensor) -> None:
        """Fill `own` with this rank's part of rank 0's `parts`."""
        for rank in range(self.size):
            for start, num_bytes, slots in self._pieces(parts[rank] if parts else own):
                if rank == self.rank:
                    ctypes.memmove(own.data_ptr() + start, slots[0], num_bytes)

    def finish(self) -> None:
        """Count the remaining pieces of a call that was broken off here, with arbitrary contents, so that the other
        ranks do not wait for them."""
        self._wait()
        while self._shown.value < self._due:
            self._show()

    def _pieces(self, shown: Tensor) -> Iterator[tuple[int, int, ctypes.Array[ctypes.c_size_t]]]:
        """Exchange a tensor in pieces. Yields, once all ranks have written theirs, a piece's first byte, its number of
        bytes, and the addresses of all ranks' pieces, which are valid until the next piece is asked for."""
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
        """Wait until all ranks have written as many pieces as this one."""
        for count in self._counts:
            while not self._library.await_count(count, self._shown.value, _LOOK_NANOSECONDS):
                self._check()
