"""Streams and events of a GPU on paper, in place of torch.cuda's. No tests in here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from paper.clocks import Actor, Clock

if TYPE_CHECKING:
    from paper.gpu import PaperGpu

MILLISECONDS = 0.01  # between any two events


class Stream:
    """A queue of work, done in its order."""

    def __init__(self, gpu: PaperGpu, name: str) -> None:
        self._gpu, self.device = gpu, torch.device("cuda:0")
        self.actor = Actor(name)

    def wait_event(self, event: Event) -> None:
        self.actor.learn(event.known("waited for"))

    def wait_stream(self, stream: Stream) -> None:
        self.actor.learn(stream.actor.clock)

    def synchronize(self) -> None:
        self._gpu.synced("stream", self.actor.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class Event:
    """What a stream knew when it was recorded; the host knew it too when it asked for that."""

    def __init__(self, gpu: PaperGpu, enable_timing: bool = False) -> None:
        self._gpu, self._timing = gpu, enable_timing
        self._clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        actor = (stream or self._gpu.stream).actor
        actor.learn(self._gpu.host.clock)
        self._clock = dict(actor.clock)

    def known(self, use: str) -> Clock:
        """CUDA takes an event that was never recorded for one that has happened."""
        if self._clock is None:
            self._gpu.problem(f"an event is {use} and was never recorded")
        return self._clock or {}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        self._gpu.synced("event", self.known("synchronized"))

    def query(self) -> bool:
        """True says nothing of the order: a program must not rely on it."""
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self._timing and end._timing):
            self._gpu.problem("time is asked of an event that was made without timing")
        self.known("timed")
        end.known("timed")
        return MILLISECONDS


@contextmanager
def current(gpu: PaperGpu, stream: Stream) -> Iterator[None]:
    """`torch.cuda.stream`: what this thread issues goes there."""
    before, gpu.stream = gpu.stream, stream
    try:
        yield
    finally:
        gpu.stream = before
