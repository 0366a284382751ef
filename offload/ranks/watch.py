"""A watch over channels: a thread that hands over what comes and notices who has died or hangs."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from offload.ranks.channel import Channel

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 7.0  # after which a rank counts as hung: with what has to be ended then, ten seconds are kept
START_SECONDS = 120.0  # the same of one that has not been heard yet: it reads libraries from a disk, perhaps a slow one
_STOPPED_SECONDS = 2.0  # between two looks: this process did not run itself (Ctrl-Z), so silence says nothing

OnMessage = Callable[[int, dict[str, Any]], None]  # rank, message
OnLost = Callable[[int, str], None]  # rank, what is known of it


class Watch(threading.Thread):
    """Beats to every channel, by rank, and expects beats from there. Both callbacks are called on its thread; a rank is
    lost once."""

    def __init__(self, channels: Mapping[int, Channel], on_message: OnMessage, on_lost: OnLost) -> None:
        super().__init__(name="ranks", daemon=True)
        self._channels, self._on_message, self._on_lost = dict(channels), on_message, on_lost
        self._ending = threading.Event()

    def end(self) -> None:
        """Look no more: whoever goes now is not missed."""
        self._ending.set()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            looked = beaten = time.monotonic()
            heard = dict.fromkeys(self._channels, looked + START_SECONDS - SILENCE_SECONDS)
            while self._channels and not self._ending.is_set():
                ready = [key.data for key, _ in selector.select(BEAT_SECONDS / 2)]
                now = time.monotonic()
                if now - looked > _STOPPED_SECONDS:
                    heard = {rank: max(moment, now) for rank, moment in heard.items()}
                looked = now
                heard |= dict.fromkeys(ready, now)
                lost = {rank: "ended" for rank in ready if not self._take(rank)}
                if now - beaten >= BEAT_SECONDS:
                    lost |= {rank: "ended" for rank in self._channels if not self._beat(rank)}
                    beaten = now
                silent = f"has not been heard of for {SILENCE_SECONDS:.0f} seconds"
                lost |= {rank: silent for rank in self._channels if now - heard[rank] > SILENCE_SECONDS}
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
