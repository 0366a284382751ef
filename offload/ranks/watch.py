"""A watch over channels: a thread that receives messages, and detects ranks that have died or hang."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from offload.ranks.channel import Channel

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 7.0  # after which a rank counts as hung; with the time to end the others, less than ten seconds
START_SECONDS = 120.0  # the same before a rank's first message: it imports libraries, perhaps from a slow disk
_STOPPED_SECONDS = 2.0  # between two looks: this process was stopped itself (Ctrl-Z), so silence is no evidence

OnMessage = Callable[[int, dict[str, Any]], None]  # rank, message
OnLost = Callable[[int, str], None]  # rank, how it was lost


class Hearing:
    """The time at which each rank was last heard, in seconds of the caller's clock, and the ranks that are hung."""

    def __init__(self, ranks: Collection[int], now: float) -> None:
        self._since = dict.fromkeys(ranks, now)
        self._begun: set[int] = set()
        self._looked = now

    def heard(self, ranks: Collection[int], now: float) -> None:
        """`ranks` were heard since the last look. If this process was stopped meanwhile, all ranks count as heard."""
        self._since |= dict.fromkeys(self._since if now - self._looked > _STOPPED_SECONDS else ranks, now)
        self._begun.update(ranks)
        self._looked = now

    def silent(self, ranks: Collection[int], now: float) -> dict[int, str]:
        """The hung ranks among `ranks`, each with a description."""
        return {rank: self._words(rank, now - self._since[rank]) for rank in ranks if self._is_silent(rank, now)}

    def _is_silent(self, rank: int, now: float) -> bool:
        return now - self._since[rank] > (SILENCE_SECONDS if rank in self._begun else START_SECONDS)

    def _words(self, rank: int, seconds: float) -> str:
        since = "" if rank in self._begun else " since its start,"
        return f"has not been heard of{since} for {seconds:.0f} seconds"


class Watch(threading.Thread):
    """A thread that sends heartbeats to every channel, by rank, and expects heartbeats from it. Both callbacks run on
    the thread; a rank is reported lost once."""

    def __init__(self, channels: Mapping[int, Channel], on_message: OnMessage, on_lost: OnLost) -> None:
        super().__init__(name="ranks", daemon=True)
        self._channels, self._on_message, self._on_lost = dict(channels), on_message, on_lost
        self._ending = threading.Event()

    def end(self) -> None:
        """Stop watching: a rank that ends from now on is not reported as lost."""
        self._ending.set()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            hearing, beaten = Hearing(self._channels, time.monotonic()), -BEAT_SECONDS
            while self._channels and not self._ending.is_set():
                ready = [key.data for key, _ in selector.select(BEAT_SECONDS / 2)]
                now = time.monotonic()
                hearing.heard(ready, now)
                lost = {rank: "ended" for rank in ready if not self._take(rank)}
                if now - beaten >= BEAT_SECONDS:
                    lost |= {rank: "ended" for rank in self._channels if not self._beat(rank)}
                    beaten = now
                lost |= hearing.silent(self._channels, now)
                for rank, what in lost.items():
                    selector.unregister(self._channels.pop(rank))
                    if not self._ending.is_set():
                        self._on_lost(rank, what)

    def _take(self, rank: int) -> bool:
        try:
            messages = self._channels[rank].receive()
        except (OSError, EOFError):
            return False
        for message in messages:
            self._on_message(rank, message)
        return True

    def _beat(self, rank: int) -> bool:
        try:
            self._channels[rank].beat()
        except OSError:
            return False
        return True
