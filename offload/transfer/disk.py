"""Threads that read parts of files while others compute, as experts or rows of tables are wanted."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.errors import ModelError
from offload.metrics import DiskStats
from offload.transfer.direct_file import ALIGNMENT, DirectFile
from offload.transfer.link import Event
from offload.transfer.pace import Pace, sleep_until

NUM_THREADS = 4  # a solid-state disk reaches its rate with a few reads in flight
PIECE_BYTES = 1 << 20  # of a read


class Reader:
    """A thread's reader, with a buffer of its own."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._buffer, self._bytes = memoryview(b""), torch.empty(0, dtype=torch.uint8)

    def rows(self, file: DirectFile, start: int, count: int, row_bytes: int) -> Iterator[tuple[int, Tensor]]:
        """Read `count` rows from byte `start` on -> (number of the first one, rows uint8 [n, row_bytes]), some at a
        time, in a buffer that the next ones overwrite."""
        step = max(PIECE_BYTES // row_bytes, 1)
        self._grow(min(step, count) * row_bytes)
        for first in range(0, count, step):
            some = min(step, count - first)
            begin = start + first * row_bytes
            at = self._disk.paced(file, begin, begin + some * row_bytes, self._buffer)
            yield first, self._bytes[at : at + some * row_bytes].view(some, row_bytes)

    def scattered(self, file: DirectFile, starts: Iterable[int], row_bytes: int, places: Iterable[memoryview]) -> None:
        """Read rows that begin at the bytes `starts` to their places, `row_bytes` bytes each."""
        self._grow(row_bytes)
        for start, place in zip(starts, places, strict=True):
            at = self._disk.paced(file, start, start + row_bytes, self._buffer)
            place[:] = self._buffer[at : at + row_bytes]

    def _grow(self, num_bytes: int) -> None:
        if len(self._buffer) < num_bytes + 2 * ALIGNMENT:
            pages = mmap.mmap(-1, max(num_bytes, PIECE_BYTES) + 2 * ALIGNMENT)
            self._buffer, self._bytes = memoryview(pages), torch.frombuffer(pages, dtype=torch.uint8)


class ReadEvent:
    """An event that fires when a thread has finished its reading; the thread's error is raised in the waiter."""

    def __init__(self) -> None:
        self._fired = threading.Event()
        self._error: Exception | None = None

    def fire(self, error: Exception | None = None) -> None:
        self._error = error
        self._fired.set()

    def wait(self) -> None:
        self._fired.wait()
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        self.wait()


@dataclass(frozen=True)
class _Work:
    read: Callable[[Reader], int]
    alone: bool
    event: ReadEvent


class Disk:
    """Threads that read files, begun when first needed. What is asked for first is begun first. files: closed when the
    threads have ended.

    bytes_per_second: a set rate, for tests and measurements; None: the disk's own. delay: adds seconds to a read.
    """

    def __init__(
        self,
        bytes_per_second: float | None = None,
        *,
        num_threads: int = NUM_THREADS,
        delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._pace, self._delay, self._num_threads = Pace(bytes_per_second), delay, num_threads
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock, self._one = threading.Lock(), threading.Lock()
        self._in_flight, self._counted_at = 0, 0.0
        self._stats, self._closed = DiskStats(), False
        self.files = ExitStack()

    @property
    def stats(self) -> DiskStats:
        """A snapshot of the totals of finished reads."""
        with self._lock:
            return self._stats

    def begin(self, read: Callable[[Reader], int], *, alone: bool = False) -> Event:
        """Begin to read on a thread. read: returns the bytes that it read. alone: not beside others that are to be
        alone."""
        assert not self._closed
        if not self._threads:
            every = range(self._num_threads)
            self._threads = [threading.Thread(target=self._run, name="disk", daemon=True) for _ in every]
            for thread in self._threads:
                thread.start()
        work = _Work(read, alone, ReadEvent())
        self._queue.put(work)
        return work.event

    def paced(self, file: DirectFile, start: int, stop: int, buffer: memoryview) -> int:
        """See `DirectFile.read`. It takes as long as the set rate says."""
        began = time.perf_counter()
        at = file.read(start, stop, buffer)
        with self._lock:
            _, end = self._pace.schedule(stop - start, ready=began, least=0.0)
        sleep_until(end + self._delay())
        return at

    def close(self) -> None:
        """Drop what has not begun, and end the threads. Idempotent."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self.files.close()

    def _run(self) -> None:
        reader = Reader(self)
        while (work := self._queue.get()) is not None:
            work.event.fire(self._done(work, reader))

    def _done(self, work: _Work, reader: Reader) -> Exception | None:
        """Do the work -> its error."""
        self._count(in_flight=1)
        try:
            if self._closed:
                raise ModelError("the model was closed before its files were read")
            with self._one if work.alone else nullcontext():
                num_bytes = work.read(reader)
            self._count(reads=1, num_bytes=num_bytes)
        except Exception as error:  # raised in the waiter
            return error
        finally:
            self._count(in_flight=-1)
        return None

    def _count(self, *, in_flight: int = 0, reads: int = 0, num_bytes: int = 0) -> None:
        """Count finished reads, and the time with at least one in flight."""
        with self._lock:
            now = time.perf_counter()
            busy = now - self._counted_at if self._in_flight else 0.0
            self._in_flight, self._counted_at = self._in_flight + in_flight, now
            self._stats += DiskStats(reads, num_bytes, busy)
