"""A link moves bytes between the host and the compute device: the only module that owns copy threads and events.

A copy waits for the events in `after`, moves, and fires its own event. Two events per staging slot make a schedule:
*full* (the copy into it is done) and *free* (the computation that read it is done).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.metrics import LinkStats


class Event(Protocol):
    """Something that will have happened."""

    def wait(self) -> None:
        """Whatever is computed after this call sees what the event stands for."""
        ...


class Link(Protocol):
    """Both directions are independent of each other and keep their own order."""

    @property
    def stats(self) -> LinkStats:
        """Totals since the link was made, a snapshot."""
        ...

    def to_device(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event: ...

    def to_host(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event: ...

    def record(self) -> Event:
        """Fires when all computation issued so far is done."""
        ...

    def close(self) -> None: ...


class Done:
    """An event that has happened: computation on a CPU is done when its call returns."""

    def wait(self) -> None:
        return None


class CopyEvent:
    """Fires when a worker thread finished a copy; raises in the waiter what went wrong in the worker."""

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


@dataclass(frozen=True)
class _Copy:
    dst: Tensor
    src: Tensor
    after: Sequence[Event]
    event: CopyEvent
    submitted: float


class _Lane(threading.Thread):
    """One direction: copies in order, each taking at least bytes / bandwidth seconds.

    Time is kept on a schedule of its own: a copy begins when it was submitted, the lane was free and its events were
    due, so one whose thread overslept fires late and does not slow the ones after it. A copy that failed fails all
    after it: not everybody waits for each of their copies.
    """

    def __init__(self, name: str, bytes_per_second: float | None, delay: Callable[[], float]) -> None:
        super().__init__(name=name, daemon=True)
        self._seconds_per_byte, self._delay = 1 / bytes_per_second if bytes_per_second else 0.0, delay
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._idle_from = 0.0
        self._error: BaseException | None = None
        self.num_bytes = 0
        self.busy_seconds = 0.0

    def submit(self, copy: _Copy | None) -> None:
        self._queue.put(copy)

    def run(self) -> None:
        while (copy := self._queue.get()) is not None:
            self.carry_out(copy)

    def carry_out(self, copy: _Copy) -> None:
        try:
            if self._error is not None:
                raise self._error
            start = max(copy.submitted, self._idle_from)
            for event in copy.after:
                event.wait()
                if isinstance(event, CopyEvent):
                    start = max(start, event.end)
            began = time.perf_counter()
            _move(copy.dst, copy.src)
            moved = time.perf_counter() - began
            end = start + max(copy.src.nbytes * self._seconds_per_byte, moved) + self._delay()
            while (left := end - time.perf_counter()) > 0:
                time.sleep(left)
            self._idle_from = copy.event.end = end
            self.num_bytes += copy.src.nbytes
            self.busy_seconds += end - start
            copy.event.fire()
        except BaseException as error:  # handed to whoever waits
            self._error = error
            copy.event.fire(error)


class PacedLink:
    """A link on a CPU: a worker thread per direction copies while the main thread computes, at a set bandwidth or,
    with None, as fast as it can.

    With `overlap=False` each copy is done before the call returns: the schedule's yardstick. `delay` adds seconds to a
    copy, for tests that shake the schedule.
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

    def to_device(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._submit(self._in, dst, src, after)

    def to_host(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._submit(self._out, dst, src, after)

    def record(self) -> Event:
        return Done()

    def close(self) -> None:
        """Let the copies under way finish and end the threads."""
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


def _move(dst: Tensor, src: Tensor) -> None:
    """Copy on this thread alone: torch would split a large copy over the threads that compute."""
    if dst.dtype != src.dtype or dst.shape != src.shape:
        raise ValueError(f"copy of {src.dtype} {tuple(src.shape)} into {dst.dtype} {tuple(dst.shape)}")
    if src.element_size() == 2:  # numpy has no bfloat16
        dst, src = dst.view(torch.int16), src.view(torch.int16)
    dst.numpy()[...] = src.numpy()
