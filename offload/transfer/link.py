"""The link that moves bytes between the host and the compute device: the only module that owns copy threads and events.

A copy waits for the events in `after`, moves, and fires its own event. Two events per staging slot make a schedule:
*full* (the copy into it is done) and *free* (the computation that read it is done).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.metrics import LinkStats
from offload.speed.split import LinkPace
from offload.transfer.pace import Pace, sleep_until

_TYPICAL_RATE = 2.5e10  # bytes a second, of PCIe 4.0, until one is known
_MEASURED_BYTES = 2**24  # copies from which a rate is measured


class Event(Protocol):
    """A point in the work of a device or a copy thread."""

    def wait(self) -> None:
        """Order the device's computation: work issued after this call runs after the event."""
        ...

    def synchronize(self) -> None:
        """Block until the event has happened, so that the host sees the result too."""
        ...


class Link(Protocol):
    """A link to one device. Its two directions are independent, and each keeps its order."""

    @property
    def stats(self) -> LinkStats:
        """A snapshot of the totals since the link was made."""
        ...

    def pace(self, num_bytes: int) -> LinkPace:
        """Seconds until all copies to the device that were asked for are done, and of one of `num_bytes`, by the known
        rate or by that of the copies so far."""
        ...

    def to_device(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event: ...

    def to_host(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event: ...

    def record(self) -> Event:
        """An event that fires when all computation issued so far is done."""
        ...

    def close(self) -> None: ...


class Done:
    """An event that has happened: computation on a CPU is done when its call returns."""

    def wait(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


class CopyEvent:
    """An event that fires when a worker thread has finished a copy; the worker's error is raised in the waiter."""

    def __init__(self) -> None:
        self._fired = threading.Event()
        self.error: BaseException | None = None
        self.end = 0.0  # when it was due, in `time.perf_counter` seconds; it never fires before that

    def fire(self, error: BaseException | None = None) -> None:
        self.error = error
        self._fired.set()

    def wait(self) -> None:
        self._fired.wait()
        if self.error is not None:
            raise RuntimeError("a copy over the link failed") from self.error

    def synchronize(self) -> None:
        self.wait()


@dataclass(frozen=True)
class _Copy:
    dst: Tensor
    src: Tensor
    after: Sequence[Event]
    event: CopyEvent
    submitted: float


class _Lane(threading.Thread):
    """One direction of a link: copies in order, each taking at least bytes / bandwidth seconds.

    A copy begins when it is submitted, the lane is free and its events are due. After a failed copy all later ones
    fail, since callers do not wait for every copy.
    """

    def __init__(self, name: str, bytes_per_second: float | None, delay: Callable[[], float]) -> None:
        super().__init__(name=name, daemon=True)
        self._pace, self._delay = Pace(bytes_per_second), delay
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.asked_bytes = self.num_bytes = 0
        self.busy_seconds = 0.0

    def submit(self, copy: _Copy | None) -> None:
        self.asked_bytes += 0 if copy is None else copy.src.nbytes
        self._queue.put(copy)

    def run(self) -> None:
        while (copy := self._queue.get()) is not None:
            self.carry_out(copy)

    def carry_out(self, copy: _Copy) -> None:
        try:
            if self._error is not None:
                raise self._error
            ready = copy.submitted
            for event in copy.after:
                event.wait()
                if isinstance(event, CopyEvent):
                    ready = max(ready, event.end)
            began = time.perf_counter()
            _move(copy.dst, copy.src)
            moved = time.perf_counter() - began
            start, end = self._pace.schedule(copy.src.nbytes, ready=ready, least=moved, delay=self._delay())
            sleep_until(end)
            copy.event.end = end
            self.num_bytes += copy.src.nbytes
            self.busy_seconds += end - start
            copy.event.fire()
        except BaseException as error:  # raised in the waiter
            self._error = error
            copy.event.fire(error)


class PacedLink:
    """The link on a CPU: a worker thread per direction copies while the main thread computes, at a set bandwidth or,
    with None, unpaced.

    With `overlap=False` each copy is done before the call returns, the baseline for the schedule. `delay` adds seconds
    to a copy, for tests that perturb the schedule.
    """

    def __init__(
        self, bytes_per_second: float | None, *, overlap: bool = True, delay: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._bytes_per_second, self._overlap = bytes_per_second, overlap
        self._in = _Lane("link-to-device", bytes_per_second, delay)
        self._out = _Lane("link-to-host", bytes_per_second, delay)
        if overlap:
            self._in.start()
            self._out.start()

    @property
    def stats(self) -> LinkStats:
        return LinkStats(self._in.num_bytes, self._out.num_bytes, self._in.busy_seconds, self._bytes_per_second)

    def pace(self, num_bytes: int) -> LinkPace:
        return _pace(self.stats, max(self._in.asked_bytes - self._in.num_bytes, 0), num_bytes)

    def to_device(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._submit(self._in, dst, src, after)

    def to_host(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._submit(self._out, dst, src, after)

    def record(self) -> Event:
        return Done()

    def close(self) -> None:
        """Wait for the copies in flight and end the threads."""
        if self._overlap and self._in.is_alive():
            for lane in (self._in, self._out):
                lane.submit(None)
            for lane in (self._in, self._out):
                lane.join()

    def _submit(self, lane: _Lane, dst: Tensor, src: Tensor, after: Sequence[Event]) -> Event:
        copy = _Copy(dst, src, after, CopyEvent(), time.perf_counter())
        if self._overlap:
            if not lane.is_alive():
                raise RuntimeError("the link is closed")
            lane.submit(copy)
        else:
            lane.carry_out(copy)
        return copy.event


class CudaEvent:
    """A point on a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, *, timing: bool = False) -> None:
        self.event, self._device = torch.cuda.Event(enable_timing=timing), stream.device
        self.event.record(stream)

    def wait(self) -> None:
        """Make the device's current stream wait for the event; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaLink:
    """The link to a GPU: a copy stream per direction, beside the stream that computes.

    Copies are issued at once and wait on the device for their events, so the host never waits. Both sides of a copy
    must outlive it, and host memory must be pinned, else CUDA would copy it piece by piece and block. bytes_per_second:
    the known rate of the link, for the statistics.
    """

    def __init__(self, device: torch.device, bytes_per_second: float | None = None) -> None:
        self._device, self._bytes_per_second = device, bytes_per_second
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._num_bytes = {self._in: 0, self._out: 0}
        self._busy_seconds = 0.0
        self._timed: deque[tuple[CudaEvent, CudaEvent]] = deque()  # (start, end) of uncounted copies in
        self._timed_bytes: deque[int] = deque()  # of each of them

    @property
    def stats(self) -> LinkStats:
        """A snapshot of the totals. Copies in flight count with their bytes and without their time."""
        while self._timed and self._timed[0][1].event.query():
            start, end = self._timed.popleft()
            self._timed_bytes.popleft()
            self._busy_seconds += start.event.elapsed_time(end.event) / 1000
        return LinkStats(
            self._num_bytes[self._in], self._num_bytes[self._out], self._busy_seconds, self._bytes_per_second
        )

    def pace(self, num_bytes: int) -> LinkPace:
        stats, under_way = self.stats, sum(self._timed_bytes)
        stats.bytes_to_device -= under_way  # whose seconds are not counted
        return _pace(stats, under_way, num_bytes)

    def to_device(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._in, dst, src, after)

    def to_host(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._out, dst, src, after)

    def record(self) -> Event:
        return CudaEvent(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Wait for the copies in flight."""
        self._in.synchronize()
        self._out.synchronize()

    def _copy(self, stream: torch.cuda.Stream, dst: Tensor, src: Tensor, after: Sequence[Event]) -> Event:
        _check_alike(dst, src)
        timed = stream == self._in
        with torch.cuda.stream(stream):
            for event in after:
                event.wait()
            start = CudaEvent(stream, timing=timed)
            for part, from_part in _pieces(dst, src):
                part.copy_(from_part, non_blocking=True)
            end = CudaEvent(stream, timing=timed)
        if timed:
            self._timed.append((start, end))
            self._timed_bytes.append(src.nbytes)
        self._num_bytes[stream] += src.nbytes
        return end


def _pace(done: LinkStats, under_way: int, num_bytes: int) -> LinkPace:
    rate = done.bytes_per_second
    if done.busy_seconds and done.bytes_to_device >= _MEASURED_BYTES:
        rate = done.bytes_to_device / done.busy_seconds
    rate = rate or _TYPICAL_RATE
    return LinkPace(under_way / rate, num_bytes / rate)


def make_link(device: torch.device, bytes_per_second: float | None = None) -> Link:
    """The link to `device`: a GPU's, whose known rate is `bytes_per_second`, or on a CPU one that is paced to it."""
    return CudaLink(device, bytes_per_second) if device.type == "cuda" else PacedLink(bytes_per_second)


def _pieces(dst: Tensor, src: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Contiguous parts of a copy: torch would copy others to temporaries first, and the host would wait."""
    if dst.is_contiguous() and src.is_contiguous():
        return ((dst, src),)
    return zip(dst.unbind(), src.unbind(), strict=True)


def _check_alike(dst: Tensor, src: Tensor) -> None:
    if dst.dtype != src.dtype or dst.shape != src.shape:
        raise ValueError(f"copy of {src.dtype} {tuple(src.shape)} into {dst.dtype} {tuple(dst.shape)}")


def _move(dst: Tensor, src: Tensor) -> None:
    """Copy on this thread only: torch would split a large copy over the compute threads."""
    _check_alike(dst, src)
    if src.element_size() == 2:  # numpy has no bfloat16
        dst, src = dst.view(torch.int16), src.view(torch.int16)
    dst.numpy()[...] = src.numpy()
