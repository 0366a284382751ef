"""The other ranks as rank 0 manages them: their processes, commands to them, and their replies."""

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
_LOOK_SECONDS = 0.2  # interval at which a wait for a reply checks that the ranks are alive
_KINDS: dict[str, type[TriforceError]] = {
    kind.kind: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TriforceError)
}


class Team:
    """Ranks 1 to size - 1. `tell` sends the same message to all of them; `replies` waits for their answers, if the
    message is of a kind that is answered.

    The loss of a rank ends the others: from then on every call raises RankFailed, which names the lost rank.
    on_failure: called then, on the watch's thread. A team that is still open at the interpreter's exit is closed, since
    rank 0 and the ranks might otherwise wait for each other.
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
        """The answers of ranks 1 and on to message `told`. Raises the error of the first rank that answers with one: of
        that error's kind, naming the rank."""
        answers = [self._reply(rank, told) for rank in self._answers]
        for rank, answer in enumerate(answers, 1):
            if "error" in answer:
                raise _KINDS.get(answer["error"], RankFailed)(f"rank {rank}: {answer['message']}")
        return [answer["value"] for answer in answers]

    def check(self) -> None:
        """Raises RankFailed where a rank is lost."""
        if self._failed.is_set():
            assert self._failure is not None
            raise RankFailed(str(self._failure)) from self._failure.__cause__  # a new error has its own traceback

    def close(self) -> None:
        """Tell the ranks to end, and kill those that do not. Later calls raise RankFailed."""
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
        self._watch.join(_END_SECONDS)  # it may be reading the processes' standard error
        for each in self._processes:
            each.words.close()
        for channel in self._channels.values():
            channel.close()
        if not self._failed.is_set():
            self._failure = RankFailed("the ranks were ended; start again")
            self._failed.set()

    def _reply(self, rank: int, told: int) -> dict[str, Any]:
        """A rank's answer to message `told`. Answers to earlier messages, which were not waited for, are dropped."""
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
        """Kill the remaining ranks: they, and this process, may be waiting for the lost one."""
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
