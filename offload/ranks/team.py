"""The other ranks as rank 0 sees them: processes that it starts and ends, tells what to do, and asks."""

from __future__ import annotations

import atexit
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from offload import errors
from offload.errors import RankFailed, TriforceError
from offload.interrupts import poll
from offload.ranks.rendezvous import Met
from offload.ranks.watch import Watch

_END_SECONDS = 5.0  # for a rank to end by itself
_LOOK_SECONDS = 0.2  # how often who waits for an answer looks whether anybody is left to give it
_KINDS: dict[str, type[TriforceError]] = {
    kind.kind: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TriforceError)
}


class Team:
    """Ranks 1 to size - 1. `tell` sends all of them the same message; `replies` waits for the answers to it, where it
    is one that is answered.

    A rank that is lost ends the others: from then on whatever is asked of the team raises RankFailed, which names it.
    on_failure: called then, on the watch's thread. A team that nobody closed ends with the interpreter, which may wait
    for the ranks, as they wait for what it tells them.
    """

    def __init__(self, met: Met, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self.size = len(met.channels) + 1
        self._channels, self._processes = dict(met.channels), met.processes
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {
            rank: queue.SimpleQueue() for rank in met.channels
        }
        self._num_told = 0
        self._failure: RankFailed | None = None
        self._failed = threading.Event()
        self._watch = Watch(self._channels, self._on_message, self._on_lost)
        self._watch.start()
        atexit.register(self.close)

    def tell(self, verb: str, **arguments: Any) -> int:
        """Send a message. Returns its number, for `replies`."""
        self.check()
        self._num_told += 1
        for channel in self._channels.values():
            try:
                channel.send({"verb": verb, "number": self._num_told, **arguments})
            except OSError:
                self._failed.wait(_END_SECONDS)
                self.check()
                raise
        return self._num_told

    def replies(self, told: int) -> list[Any]:
        """What ranks 1 and on answer to the message of that number. Raises the error of the first one that has none:
        its own kind, with its rank."""
        answers = [self._reply(rank, told) for rank in self._answers]
        for rank, answer in enumerate(answers, 1):
            if "error" in answer:
                raise _KINDS.get(answer["error"], RankFailed)(f"rank {rank}: {answer['message']}")
        return [answer["value"] for answer in answers]

    def check(self) -> None:
        """Raises RankFailed where a rank is lost."""
        if self._failed.is_set():
            assert self._failure is not None
            raise RankFailed(str(self._failure)) from self._failure.__cause__  # each time with a trace of its own

    def close(self) -> None:
        """Let the others end, and end those that do not. From then on, too, whatever is asked raises RankFailed."""
        atexit.unregister(self.close)
        self._watch.end()
        for channel in self._channels.values():
            try:
                channel.send({"verb": "end", "number": 0})
            except OSError:
                continue
        latest = time.monotonic() + _END_SECONDS
        for each in self._processes:
            try:
                each.process.wait(max(latest - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        self._watch.join(_END_SECONDS)  # it may be reading their last words
        for each in self._processes:
            each.words.close()
        for channel in self._channels.values():
            channel.close()
        if not self._failed.is_set():
            self._failure = RankFailed("the ranks were ended; start again")
            self._failed.set()

    def _reply(self, rank: int, told: int) -> dict[str, Any]:
        """Answers to earlier messages, for which nobody waited in the end, are dropped."""
        while True:
            try:
                answer = self._answers[rank].get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self.check()
                poll()
                continue
            if answer["number"] == told:
                return answer

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._fail(f"rank {rank} failed: {message['failed']}", message["traceback"])
        else:
            self._answers[rank].put(message)

    def _on_lost(self, rank: int, what: str) -> None:
        process = self._processes[rank - 1] if self._processes else None
        epitaph = process.epitaph() if process and what == "ended" else ""
        self._fail(f"rank {rank} {what}{epitaph}")

    def _fail(self, what: str, traceback: str = "") -> None:
        """End all others: they, and this process, may wait for the one that is lost."""
        if not self._failed.is_set():
            self._failure = RankFailed(f"{what}; the other ranks are ended, and what came so far is kept")
            if traceback:
                self._failure.__cause__ = RuntimeError(f"on that rank:\n{traceback}")
            self._failed.set()
        for each in self._processes:
            each.process.kill()
        for channel in self._channels.values():
            channel.close()
        self._on_failure()
