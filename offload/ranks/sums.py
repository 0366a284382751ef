"""Sums over ranks of their partial results for the same rows: through shared memory between CPUs of one machine,
otherwise over torch.distributed, with NCCL on GPUs and gloo on CPUs.

Every rank gathers all parts and adds them in fp32 in the order of the ranks. So all ranks have the same bits, and a
row's bits do not depend on the rows beside it. With a library's all-reduce they would: it cuts a tensor into pieces and
sums each in another order.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from offload.errors import RankFailed, UsageError
from offload.interrupts import poll
from offload.kernels.cpu import CpuKernels, kernels
from offload.model.sums import Due
from offload.ranks.shared import SharedMemory

_LOOK = timedelta(seconds=0.5)  # interval at which a waiting rank checks that the others are alive
_WHY_SECONDS = 3.0  # in which the watch finds and names a rank that ended
_FOR_EVER = timedelta(days=1)  # the watch detects hung ranks, not this timeout: processes may be stopped (Ctrl-Z)


class Sums:
    """The sums of one rank of `size`. Over torch.distributed there is one per process, which has one default group.

    check: called at intervals while this rank waits; raises where another rank is lost. go: called before each part of
    a forward: rank 0 tells the others that it takes part in all of the part's sums, even after an error; the others
    wait for that. memory: the file of the ranks' shared memory, which this object takes over; used on CPUs that have
    kernels. seconds: spent in sums since the process began, with the wait for slower ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        *,
        check: Callable[[], None],
        go: Callable[[], None],
        memory: int | None = None,
    ) -> None:
        self.rank, self.size, self._device, self._check, self._go = rank, size, device, check, go
        self._shared = None if memory is None else _shared(memory, rank, size, device, check)
        self._due: deque[Due] = deque()
        self._running: dist.Work | None = None
        self._template: Tensor | None = None
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0
        self._connected = self._out_of_step = False

    def connect(self, store: Callable[[], Store]) -> None:
        """Join the other ranks' process group; every rank calls this. store: makes the store that all ranks use. Raises
        UsageError if this process is in a group already."""
        if self._shared is not None:
            return
        if dist.is_initialized():
            raise UsageError("this process is one of several ranks already; close that engine before it loads another")
        on_gpu = self._device.type == "cuda"
        failed: list[BaseException] = []

        def meet() -> None:
            try:
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                    store=store(),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=_FOR_EVER,
                    device_id=self._device if on_gpu else None,
                )
            except BaseException as error:  # raised again on the thread that waits
                failed.append(error)

        meeting = threading.Thread(target=meet, daemon=True)  # it would wait for ever for a rank that died
        meeting.start()
        while meeting.is_alive():
            meeting.join(_LOOK.total_seconds())
            self._check()
            poll()
        if failed:
            self._hear_why()
            raise failed[0]
        self._connected = True

    @contextmanager
    def due(self, sums: Sequence[Due], like: Tensor) -> Iterator[None]:
        """Expect `sums` in the body, see `model.sums`.

        If the body raises, this rank takes part in the remaining sums with zeros, since the others wait for it. The
        results of their forward are then dropped.
        """
        if self._out_of_step:
            raise RankFailed("a forward was broken off before all ranks had ended it; start again")
        self._due, self._template = deque(sums), like
        self._go()
        try:
            yield
        except BaseException:
            self._out_of_step = True
            self._take_part()
            self._out_of_step = False
            raise
        if self._due:
            raise RuntimeError(f"{len(self._due)} sums over the ranks were due and not made")

    def total(self, part: Tensor) -> Tensor:
        """part [n, hidden] of this rank -> the sum over all ranks, the same bits on each. `part` may be overwritten."""
        due = self._due.popleft()
        if part.shape != due[:2]:
            raise RuntimeError(f"a sum of {tuple(part.shape)} where {due[:2]} is due")
        if self._shared is not None:
            began = time.perf_counter()
            total = self._shared.total(part.contiguous())
            self._seconds += time.perf_counter() - began
            return total
        parts = self._gather(part)
        if self.size == 2:  # one addition rounds once
            return parts[0].add_(parts[1])
        added = parts[0].float()
        for other in parts[1:]:
            added += other
        return added.to(part.dtype)

    @property
    def seconds(self) -> float:
        while self._timed and self._timed[0][1].query():
            start, end = self._timed.popleft()
            self._seconds += start.elapsed_time(end) / 1000
        return self._seconds

    def gather(self, part: Tensor) -> list[Tensor]:
        """part, on the CPU and of one shape on all ranks -> all ranks' parts on rank 0, an empty list on the others."""
        if self._shared is not None:
            return self._shared.gather(part)
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        self._wait(dist.gather(part, parts or None, async_op=True))
        return parts

    def scatter(self, parts: Sequence[Tensor], own: Tensor) -> None:
        """Fill `own` with this rank's part of rank 0's `parts`."""
        if self._shared is not None:
            self._shared.scatter(parts, own)
        else:
            self._wait(dist.scatter(own, list(parts) or None, async_op=True))

    def abort(self) -> None:
        """Abort NCCL's kernels, which would wait for a dead rank for ever. Called on any thread. gloo notices by itself
        that a process has ended."""
        if self._device.type == "cuda" and dist.is_initialized():
            assert dist.group.WORLD is not None
            dist.group.WORLD.abort()

    def close(self) -> None:
        if self._connected:
            self._connected = False
            dist.destroy_process_group()

    def _gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        if part.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            dist.all_gather(parts, part.contiguous())
            end.record()
            self._timed.append((start, end))
            return parts
        began = time.perf_counter()
        self._wait(dist.all_gather(parts, part.contiguous(), async_op=True))
        self._seconds += time.perf_counter() - began
        return parts

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective operation on a CPU, checking that the other ranks are alive."""
        self._running = work
        while not work.is_completed():
            try:
                work.wait(_LOOK)
            except RuntimeError:  # not complete yet, or failed, which the last `wait` raises
                self._check()
        try:
            work.wait()
        except RuntimeError:
            self._hear_why()
            raise
        self._running = None

    def _hear_why(self) -> None:
        """Find out why a connection failed, most likely since a rank has ended. Raises that as soon as it is known. A
        rank other than 0 waits to be ended, since its own error would hide the cause."""
        latest = time.monotonic() + _WHY_SECONDS
        while time.monotonic() < latest:
            self._check()
            time.sleep(_LOOK.total_seconds() / 10)

    def _take_part(self) -> None:
        assert self._template is not None
        if self._shared is not None:  # an exchange may have been interrupted
            self._shared.finish()
        if self._running is not None:
            self._wait(self._running)
        while self._due:
            due = self._due[0]
            self.total(self._template.new_zeros(due[:2], dtype=due.dtype))


def _shared(file: int, rank: int, size: int, device: torch.device, check: Callable[[], None]) -> SharedMemory | None:
    try:
        found = kernels()
        library = found.library if device.type == "cpu" and isinstance(found, CpuKernels) else None
        return SharedMemory(file, rank, size, library, check) if library is not None else None
    finally:
        os.close(file)
