"""Rank 0's commands, as another rank receives and answers them."""

from __future__ import annotations

import os
import queue
from typing import Any

from offload.ranks.channel import Channel
from offload.ranks.watch import Watch

LOST = 1  # exit code of a rank that failed or lost rank 0
_RANK_0 = 0


class GivenUp(Exception):
    """Rank 0 broke a forward off before its next part began, and sent another command."""


class Orders:
    """Messages from rank 0, in order. The process exits at rank 0's command, and when rank 0 has ended or hangs. It
    exits at once, in the middle of any work: no result is needed any more."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._next: dict[str, Any] | None = None  # a message received while waiting for "go"
        Watch({_RANK_0: channel}, self._on_message, lambda rank, what: os._exit(LOST)).start()

    def next(self) -> dict[str, Any]:
        """Wait for the next message."""
        message, self._next = self._next, None
        return message or self._told.get()

    def wait_to_go(self) -> None:
        """Wait until rank 0 begins the next part of a forward. Raises GivenUp if it sends another command."""
        message = self.next()
        if message["verb"] != "go":
            self._next = message
            raise GivenUp

    def answer(self, number: int, value: Any) -> None:
        """Answer message `number`."""
        self._channel.send({"number": number, "value": value})

    def refuse(self, number: int, kind: str, why: str) -> None:
        """Answer message `number` with an error of a kind. The command has changed nothing on this rank."""
        self._channel.send({"number": number, "error": kind, "message": why})

    def fail(self, why: str, traceback: str) -> None:
        """Report an error that ends this rank."""
        self._channel.send({"failed": why, "traceback": traceback})

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        if message["verb"] == "end":
            os._exit(0)
        self._told.put(message)
