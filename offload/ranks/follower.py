"""A rank other than 0: it applies rank 0's commands to its shard of the model and of the caches.

Started by rank 0 as `python -m offload.ranks.follower DESCRIPTOR FILE MEMORY START RANK SIZE`, or by torchrun with the
same command as rank 0. It prints nothing: errors are reported to rank 0, and it ends when rank 0 has ended or hangs.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from offload.errors import TriforceError
from offload.kv.kept import Call
from offload.model.passes import Pass
from offload.plan.planner import Plan
from offload.plan.shards import Shard
from offload.progress import ignore
from offload.ranks import rendezvous
from offload.ranks.channel import Channel
from offload.ranks.joined import gathered, scattered
from offload.ranks.record import TokenRecord
from offload.ranks.rendezvous import Met
from offload.ranks.sums import Sums
from offload.ranks.watch import Watch
from offload.speed.hardware import Launched
from offload.worker.models import LoadedModels
from offload.worker.worker import Worker, stats_of_rank

_ANSWERED = ("load", "build", "stats")
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


class Follower:
    """The command loop of a rank, until the process is told to end. Workers are named by rank 0's numbers."""

    def __init__(self, shard: Shard, local_rank: int, met: Met) -> None:
        self._shard, self._local_rank, self._store = shard, local_rank, met.store
        self._memory = met.memory
        self._orders = Orders(met.channels[0])
        self._models: LoadedModels | None = None
        self._sums: Sums | None = None
        self._workers: dict[int, Worker] = {}
        self._records: dict[int, TokenRecord] = {}

    def run(self) -> None:
        """Never returns. An error in a command that rank 0 awaits no reply to ends this rank, and so all ranks."""
        try:
            while True:
                message = self._orders.next()
                self._obey(message.pop("verb"), message.pop("number"), message)
        except BaseException as error:
            why = str(error) if isinstance(error, TriforceError) else f"{type(error).__name__}: {error}"
            self._orders.fail(why, "".join(traceback.format_exception(error)))
            os._exit(LOST)

    def _obey(self, verb: str, number: int, arguments: Mapping[str, Any]) -> None:
        try:
            value = getattr(self, f"_{verb}")(**arguments)
        except GivenUp:
            return
        except TriforceError as error:
            if verb not in _ANSWERED:
                raise
            self._orders.refuse(number, error.kind, str(error))
        else:
            if verb in _ANSWERED:
                self._orders.answer(number, value)

    def _load(self, plan: Mapping[str, Any], target: str, threads: int) -> None:
        torch.set_num_threads(threads)
        own = self._own(plan)
        device = torch.device(own.request.device)
        rank, size, memory = self._shard.rank, self._shard.size, self._memory
        self._sums = Sums(rank, size, device, check=lambda: None, go=self._orders.wait_to_go, memory=memory)
        self._models = LoadedModels.load(own, {"target": Path(target)}, ignore, shard=self._shard, sums=self._sums)

    def _connect(self) -> None:
        assert self._sums is not None
        self._sums.connect(self._store)

    def _build(self, worker: int, plan: Mapping[str, Any], block: int) -> None:
        assert self._models is not None
        vocab_size = self._models.target.config.vocab_size
        made = Worker(self._own(plan), self._models, vocab_size=vocab_size, block=block)
        self._workers[worker], self._records[worker] = made, TokenRecord()

    def _go(self) -> None:
        """A "go" of a forward whose sums this rank never waited for: nothing to do."""

    def _prefill(self, worker: int, at: int, tokens: Sequence[int], hidden: bool) -> None:
        """hidden: the last layer's rows are wanted, and so all layers run."""
        self._begin(worker, "target", at, tokens, None)
        self._workers[worker].prefill(tokens, lambda num_tokens: None, (lambda start, rows: None) if hidden else None)

    def _forward(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """One pass over the weights for one or more sequences. parts: one of each sequence."""
        for part in parts:
            self._begin(**part)
        levels = [self._workers[part["worker"]].levels[part["level"]] for part in parts]
        levels[0].run([Pass(level, part["tokens"], 0) for level, part in zip(levels, parts, strict=True)])

    def _begin(self, worker: int, level: str, at: int, tokens: Sequence[int], digest: str | None) -> None:
        """Truncate to rank 0's length `at`, and check that the tokens before it are rank 0's."""
        cache = self._workers[worker].levels[level]
        cache.truncate(at)
        if cache.length != at:
            raise RuntimeError(f"the {level} level has {cache.length} tokens, rank 0 has {at}")
        if level == "target":
            if digest is not None:
                self._records[worker].compare(at, digest)
            self._records[worker].append(at, tokens)

    def _truncate(self, worker: int, level: str, length: int) -> None:
        self._workers[worker].levels[level].truncate(length)

    def _record_mass(self, worker: int, wanted: bool) -> None:
        self._workers[worker].record_mass(wanted)

    def _refresh(self, worker: int, num_rows: int) -> None:
        self._workers[worker].refresh(num_rows)

    def _prepare_copies(self, worker: int, num_rows: int, wanted: bool) -> None:
        self._workers[worker].prepare_copies(num_rows, wanted)

    def _fetch_ahead(self, worker: int) -> None:
        self._workers[worker].fetch_ahead()

    def _copy_rows(self, worker: int, other: int, num_tokens: int | None) -> None:
        if self._workers[worker].copy_rows(self._workers[other], num_tokens):
            self._records[worker].take(self._records[other], num_tokens)

    def _release(self, worker: int) -> None:
        """Release a worker; nothing happens if it could not be built here."""
        if (released := self._workers.pop(worker, None)) is not None:
            released.release()

    def _stats(self, worker: int) -> dict[str, Any]:
        assert self._sums is not None
        return asdict(stats_of_rank(self._shard.rank, self._workers[worker], self._sums.seconds))

    def _each(self, worker: int, call: Call, numbers: Sequence[int]) -> None:
        self._workers[worker].kept.each(call, *numbers)
        if call == "restored":
            self._records[worker].forget(*numbers)

    def _gather(self, worker: int, part: str, unit: Sequence[int]) -> None:
        assert self._sums is not None
        gathered(self._workers[worker].kept[part], tuple(unit), self._sums)

    def _fill(self, worker: int, part: str, unit: Sequence[int]) -> None:
        assert self._sums is not None
        scattered(self._workers[worker].kept[part], tuple(unit), [], self._sums)

    def _own(self, data: Mapping[str, Any]) -> Plan:
        """Rank 0's plan on this rank's device: the same kind, its index increased by the rank within the machine."""
        plan = Plan.from_dict(data)
        kind, _, first = plan.request.device.partition(":")
        if kind == "cpu":
            return plan
        return replace(plan, request=replace(plan.request, device=f"{kind}:{int(first) + self._local_rank}"))


def follow(shard: Shard, local_rank: int, met: Met) -> None:
    """Run rank 0's commands until it ends. Signals of the terminal are ignored: rank 0 ends the other ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Follower(shard, local_rank, met).run()


def follow_torchrun(launched: Launched) -> None:
    """`follow` in a process that torchrun started."""
    follow(Shard(launched.rank, launched.size), launched.local_rank, rendezvous.meet(launched))


def main(arguments: Sequence[str]) -> None:
    descriptor, file, memory, number, rank, size = map(int, arguments)
    follow(Shard(rank, size), rank, rendezvous.started(descriptor, file, memory, number))


if __name__ == "__main__":
    main(sys.argv[1:])
