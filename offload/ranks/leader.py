"""Rank 0 of several: it decides, and sends each command to the other ranks before it runs the command itself.

Commands carry tokens, lengths and names. A forward carries the length at which it begins, so a rank that has run more
of an earlier forward, which rank 0 broke off, truncates first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.errors import RankFailed
from offload.kv import Cache
from offload.kv.kept import Kept
from offload.kv.parts import Part
from offload.metrics import RankStats
from offload.model.decoder import Decoder, OnHidden
from offload.model.level import Level
from offload.model.passes import Pass
from offload.plan.planner import Plan
from offload.plan.shards import Shard
from offload.progress import OnProgress
from offload.ranks import rendezvous
from offload.ranks.joined import JoinedKept
from offload.ranks.record import TokenRecord
from offload.ranks.sums import Sums
from offload.ranks.team import Team
from offload.speed.hardware import Launched
from offload.worker.assemble import block_rows
from offload.worker.models import LoadedModels
from offload.worker.worker import Worker, stats_of_rank

COMPARED_FORWARDS = 16  # forwards of the target between two comparisons of the ranks' tokens


def load_worker(plan: Plan, folders: Mapping[str, Path], *, num_tokens: int, on_progress: OnProgress) -> Worker:
    """The worker of `plan`; for several devices, rank 0's, which leads a worker on each. See `Worker.load`. Also raises
    RankFailed."""
    if plan.request.num_devices == 1:
        return Worker.load(plan, folders, num_tokens=num_tokens, on_progress=on_progress)
    return LeadingWorker.load(plan, folders, num_tokens=num_tokens, on_progress=on_progress)


class Lead:
    """Rank 0's connection to the other ranks: commands to them, and the sums over all ranks."""

    def __init__(self, plan: Plan) -> None:
        size, launched = plan.request.num_devices, Launched.look()
        self.whole: ModelConfig | None = None  # the unsharded target
        self._threads = torch.get_num_threads()
        torch.set_num_threads(max(self._threads // (launched.local_size if launched else size), 1))
        met = rendezvous.start(size) if launched is None else rendezvous.meet(launched)
        device = torch.device(plan.request.device)
        self.sums = Sums(0, size, device, check=self._check, go=self._go, memory=met.memory)
        self.team, self._store = Team(met, self.sums.abort), met.store
        self._num_workers = 0

    def load(self, plan: Plan, folders: Mapping[str, Path], on_progress: OnProgress) -> LoadedModels:
        """Load the models; all ranks read their shards at the same time."""
        self.whole, target = read_config(folders["target"]), str(folders["target"].absolute())
        told = self.team.tell("load", plan=plan.as_dict(), target=target, threads=torch.get_num_threads())
        models = LoadedModels.load(plan, folders, on_progress, shard=Shard(0, self.team.size), sums=self.sums)
        try:
            self.team.replies(told)
            self.team.tell("connect")
            self.sums.connect(self._store)
        except BaseException:
            models.close()
            raise
        return models

    def build(self, plan: Plan, block: int) -> tuple[int, int]:
        """Have the other ranks begin to build a worker. Returns the worker's number and the command's."""
        self._num_workers += 1
        number = self._num_workers
        return number, self.team.tell("build", worker=number, plan=plan.as_dict(), block=block)

    def close(self) -> None:
        self.team.close()
        self.sums.close()
        torch.set_num_threads(self._threads)

    def _check(self) -> None:
        self.team.check()

    def _go(self) -> None:
        self.team.tell("go")


class LeadingWorker(Worker):
    """Rank 0's worker: every change of the caches is sent to the other ranks' workers of this number first."""

    def __init__(
        self, lead: Lead, number: int, plan: Plan, models: LoadedModels, *, vocab_size: int, block: int
    ) -> None:
        self._lead, self.number, self._record = lead, number, TokenRecord()
        super().__init__(plan, models, vocab_size=vocab_size, block=block)

    @classmethod
    def load(
        cls, plan: Plan, folders: Mapping[str, Path], *, num_tokens: int, on_progress: OnProgress
    ) -> LeadingWorker:
        lead = Lead(plan)
        try:
            models = lead.load(plan, folders, on_progress)
            try:
                return cls.build(lead, plan, models, vocab_size=models.num_scored(num_tokens))
            except BaseException:
                models.close()
                raise
        except BaseException:
            lead.close()
            raise

    @classmethod
    def build(cls, lead: Lead, plan: Plan, models: LoadedModels, *, vocab_size: int) -> LeadingWorker:
        """Build a worker on every rank. Raises DoesNotFit where one rank has too little memory; then every rank
        releases what it allocated for the worker."""
        block = block_rows(plan, models.target.config)
        number, told = lead.build(plan, block)
        worker = cls(lead, number, plan, models, vocab_size=vocab_size, block=block)
        try:
            lead.team.replies(told)
        except BaseException:
            worker.release()
            raise
        return worker

    def tell(self, verb: str, **arguments: Any) -> int:
        """Send a command for this worker; see `Team.tell`."""
        return self._lead.team.tell(verb, worker=self.number, **arguments)

    def tell_all(self, verb: str, **arguments: Any) -> int:
        """Send a command that is not for this worker alone; see `Team.tell`."""
        return self._lead.team.tell(verb, **arguments)

    def check(self) -> None:
        """Raises RankFailed where a rank is lost."""
        self._lead.team.check()

    def rank_stats(self) -> list[RankStats]:
        told = self.tell("stats")
        own = stats_of_rank(0, self, self._lead.sums.seconds)
        return [own, *(RankStats(**found) for found in self._lead.team.replies(told))]

    def prefill(
        self, tokens: Sequence[int], on_tokens: Callable[[int], None], on_hidden: OnHidden | None = None
    ) -> None:
        if tokens:
            self._record.append(self.full.length, tokens)
            self.tell("prefill", at=self.full.length, tokens=list(tokens), hidden=on_hidden is not None)
            super().prefill(tokens, on_tokens, on_hidden)

    def record_mass(self, wanted: bool) -> None:
        self.tell("record_mass", wanted=wanted)
        super().record_mass(wanted)

    def refresh(self, num_rows: int) -> None:
        self.tell("refresh", num_rows=num_rows)
        super().refresh(num_rows)

    def prepare_copies(self, num_rows: int, wanted: bool) -> bool:
        self.tell("prepare_copies", num_rows=num_rows, wanted=wanted)
        return super().prepare_copies(num_rows, wanted)

    def fetch_ahead(self) -> None:
        self.tell("fetch_ahead")
        super().fetch_ahead()

    def beside(self) -> Worker:
        return LeadingWorker.build(self._lead, self.plan, self.models, vocab_size=self.vocab_size)

    def copy_rows(self, other: Worker, num_tokens: int | None = None) -> bool:
        """See `Worker.copy_rows`. False if `other` is not a worker of the same ranks."""
        if not isinstance(other, LeadingWorker) or other._lead is not self._lead:
            return False
        self.tell("copy_rows", other=other.number, num_tokens=num_tokens)
        copied = super().copy_rows(other, num_tokens)
        if copied:
            self._record.take(other._record, num_tokens)
        return copied

    def release(self) -> None:
        super().release()
        with suppress(RankFailed):  # then the ranks have ended, and their memory is free
            self.tell("release")

    def close(self) -> None:
        super().close()
        self._lead.close()

    def _another(self, plan: Plan) -> Worker:
        return LeadingWorker.build(self._lead, plan, self.models, vocab_size=self.vocab_size)

    def _bundle(self, parts: Sequence[Part]) -> Kept:
        whole, shards = self._lead.whole, [Shard(rank, self._lead.team.size) for rank in range(self._lead.team.size)]
        assert whole is not None
        splits = {part.name: part.splits(whole, shards) for part in parts}
        return JoinedKept(parts, splits, self._lead.sums, self.tell, self._record)

    def _level(self, name: str, decoder: Decoder, cache: Cache, block: int | None) -> Level:
        record = self._record if name == "target" else None
        more: dict[str, Any] = {"block": block, "link": self.link, "hidden": self._hidden_for(name)}
        return LeadingLevel(self, record, name, decoder, cache, vocab_size=self.vocab_size, **more)


class LeadingLevel(Level):
    """A level that all ranks run. record: the tokens in the target's cache, with which the other ranks compare theirs
    every COMPARED_FORWARDS forwards; None at other levels."""

    def __init__(self, worker: LeadingWorker, record: TokenRecord | None, name: str, *args: Any, **more: Any) -> None:
        super().__init__(name, *args, **more)
        self._worker, self._record, self._name, self._num_forwards = worker, record, name, 0

    def truncate(self, length: int) -> None:
        with suppress(RankFailed):  # then the ranks have ended: a text may be closed after its engine
            self._worker.tell("truncate", level=self._name, length=length)
        super().truncate(length)

    def run(self, passes: Sequence[Pass]) -> None:
        parts = [cast(LeadingLevel, each.level)._part(each.tokens) for each in passes]
        self._worker.tell_all("forward", parts=parts)
        super().run(passes)
        self._decoder.finish()
        self._worker.check()  # a GPU's sums with a rank that died are wrong

    def _part(self, tokens: Sequence[int] | Tensor) -> dict[str, Any]:
        """This sequence's part of the command "forward"; records its tokens."""
        assert not isinstance(tokens, Tensor)  # tokens are sent to the other ranks
        at, digest = self.length, None
        if self._record is not None:
            if self._num_forwards % COMPARED_FORWARDS == 0:
                digest = self._record.digest(at)
            self._num_forwards += 1
            self._record.append(at, tokens)
        named = {"worker": self._worker.number, "level": self._name}
        return {**named, "at": at, "tokens": list(tokens), "digest": digest}
