"""What rank 0 tells another rank, as that rank sees it."""

from __future__ import annotations

import os
import queue
from typing import Any

from offload.ranks.channel import Channel
from offload.ranks.watch import Watch

LOST = 1  # exit code of a rank whose rank 0 is gone
_RANK_0 = 0


class GivenUp(Exception):
    """Rank 0 broke a forward off before its next part began, and told something else."""


class Orders:
    """Messages from rank 0, in order. The process ends at rank 0's word, and when rank 0 is gone or hangs: at once,
    whatever is under way, since nothing of it is wanted any more."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._next: dict[str, Any] | None = None  # was told while something else was waited for
        Watch({_RANK_0: channel}, self._on_message, lambda rank, what: os._exit(LOST)).start()

    def next(self) -> dict[str, Any]:
        """Wait for the next message."""
        message, self._next = self._next, None
        return message or self._told.get()

    def wait_to_go(self) -> None:
        """Wait until rank 0 begins the next part of a forward. Raises GivenUp where it does not."""
        message = self.next()
        if message["verb"] != "go":
            self._next = message
            raise GivenUp

    def answer(self, number: int, value: Any) -> None:
        """Answer the message of that number."""
        self._channel.send({"number": number, "value": value})

    def refuse(self, number: int, kind: str, why: str) -> None:
        """Answer that it could not be done, with an error's kind. This rank is as it was."""
        self._channel.send({"number": number, "error": kind, "message": why})

    def fail(self, why: str, traceback: str) -> None:
        """Tell of an error that ends this rank."""
        self._channel.send({"failed": why, "traceback": traceback})

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        if message["verb"] == "end":
            os._exit(0)
        self._told.put(message)
