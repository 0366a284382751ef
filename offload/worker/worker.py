"""The worker: the models, caches, link and memory of one rank, built from a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from offload.errors import DoesNotFit
from offload.kv import Cache
from offload.kv.draft_rows import DraftRowsCache
from offload.kv.indexed import IndexedCache
from offload.kv.kept import Kept
from offload.kv.last_hidden import DraftedHidden
from offload.kv.mixed import MixedCache
from offload.kv.parts import Part
from offload.kv.quantised import QuantisedCache
from offload.kv.retrieval import RetrievalCache
from offload.kv.states import DraftStates, StateCache
from offload.kv.streaming import StreamingCache
from offload.metrics import DiskStats, ExpertStats, LevelStats, LinkStats, RankStats, TableStats
from offload.model.assistant import AssistantDecoder, AssistantLevel
from offload.model.decoder import Decoder, OnHidden
from offload.model.level import Hidden, Level, StreamingLevel
from offload.model.loading import DTYPES
from offload.model.next_token import NextTokenDecoder, NextTokenLevel
from offload.plan.planner import Plan
from offload.plan.sizing import MAX_ROWS
from offload.progress import OnProgress
from offload.transfer.arena import Arena
from offload.transfer.hidden_rows import HiddenRows, ResidentRows
from offload.transfer.link import Link
from offload.transfer.memory import Memory
from offload.transfer.timing import Timing
from offload.worker.assemble import (
    block_rows,
    draft_states,
    full_cache,
    last_hidden,
    ngram_caches,
    quantised_cache,
    retrieval_cache,
    scorings_of,
    state_cache,
    streaming_cache,
    target_keys,
    window_cache,
)
from offload.worker.models import LoadedModels


class _Owned(Protocol):
    def release(self) -> None: ...


class Worker:
    """The models, levels with their caches, link and memory of one rank.

    All calls that change the caches take only tokens and lengths: `prefill`, `run` and `truncate` of the `levels` (by
    name: "target", "self" or "retrieval", "draft"), `record_mass`, `refresh`, `prepare_copies`, `fetch_ahead`,
    `copy_rows`. `full` is the target's cache, `kept` what its sequence keeps. refreshes: of the copies over which the
    target is its own draft.
    """

    def __init__(self, plan: Plan, models: LoadedModels, *, vocab_size: int, block: int | None = None) -> None:
        """Allocate the plan's caches, empty. vocab_size: the width of all logits. block: rows of a block; the target's
        passes run in whole blocks on all ranks. None: this machine's default.

        Raises DoesNotFit, with the context that fits into memory. After an error all memory is released.
        """
        self.plan, self.models, self.vocab_size = plan, models, vocab_size
        self.block = block or block_rows(plan, models.target.config)
        self.levels: dict[str, Level] = {}
        self.refreshes, self._refresh_timing = LevelStats("refresh"), Timing(models.memory.device)
        self.retrieval: RetrievalCache | None = None
        self._copies: RetrievalCache | QuantisedCache | None = None  # see `Composition.keeps_copies`
        self._caches: list[_Owned] = []
        self._has_coded_target = False
        with self.memory.all_or_nothing():
            try:
                self._make_levels()
                self._reserve()
            except BaseException:
                self.release()
                raise

    @classmethod
    def load(
        cls,
        plan: Plan,
        folders: Mapping[str, Path],
        *,
        num_tokens: int,
        on_progress: OnProgress,
    ) -> Worker:
        """Load the models in `folders` ("target", "draft") to their places in the plan. num_tokens: of the tokenizer's
        vocabulary. on_progress: stages "load" and "pin". Raises ModelError, DoesNotFit."""
        models = LoadedModels.load(plan, folders, on_progress)
        try:
            return cls(plan, models, vocab_size=models.num_scored(num_tokens))
        except BaseException:
            models.close()
            raise

    def replanned(self, plan: Plan) -> Worker:
        """A worker for `plan` with the same models; this one keeps its caches. Only where neither plan offloads, or
        leaves experts in their file, since weights do not move. Raises DoesNotFit."""
        if plan.placement.is_for_one_capacity or self.plan.placement.is_for_one_capacity:
            raise ValueError("an engine that offloads is made for one plan")
        return self._another(plan)

    def beside(self) -> Worker:
        """A worker of the same plan for another sequence: with its own caches, over the same models. Raises
        DoesNotFit."""
        return Worker(self.plan, self.models, vocab_size=self.vocab_size, block=self.block)

    @property
    def target(self) -> Decoder:
        return self.models.target

    @property
    def memory(self) -> Memory:
        return self.models.memory

    @property
    def link(self) -> Link | None:
        return self.models.link

    @property
    def link_stats(self) -> LinkStats:
        """The totals of the link and the disk since the worker was loaded; zeros without them."""
        every = (decoder.weights.streamed_experts for decoder in self.models.decoders.values())
        each = (own.stats for experts in every for own in experts)
        link, disk = self.models.link, self.models.disk
        return replace(
            LinkStats() if link is None else link.stats,
            experts=sum(each, start=ExpertStats()),
            disk=DiskStats() if disk is None else disk.stats,
            ngram_rows=sum((table.stats for table in self.target.weights.ngrams.values()), start=TableStats()),
        )

    def rank_stats(self) -> list[RankStats]:
        """The totals of each rank since the worker was loaded; empty with one rank."""
        return []

    def prefill(
        self, tokens: Sequence[int], on_tokens: Callable[[int], None], on_hidden: OnHidden | None = None
    ) -> None:
        """Append `tokens` to the full cache and to a quantised copy, if there is one; the levels below catch up later.
        An interrupted prefill appends no tokens. `on_tokens` is called with the number of tokens that are done,
        `on_hidden` with the last layer's rows, where row 0 is the first appended token."""
        cache, rows, first = self._target_cache, self._hidden_rows, self.full.length
        draft = self.models.decoders.get("draft")
        hidden = self.hidden if draft is not None and draft.config.is_head else None  # others read the last one alone

        def take(start: int, block: Tensor) -> None:
            if hidden is not None:
                hidden.write(first + start, block)
            if on_hidden is not None:
                on_hidden(start, block)

        taken = on_hidden if hidden is None else take
        self.target.prefill(cache, tokens, rows, on_tokens=on_tokens, on_hidden=taken)
        if isinstance(self._copies, QuantisedCache):
            self._copies.refresh()

    def record_mass(self, wanted: bool) -> None:
        """Switch the recording of attention masses, by which chunks are chosen, from the target's next pass on."""
        self.full.record_mass = wanted

    def refresh(self, num_rows: int) -> None:
        """Update the copies of the full cache's tokens over which the target is its own draft, if any, after its last
        pass. Chunks are chosen by the first `num_rows` rows of that pass."""
        if self._copies is not None:
            self._copies.refresh(num_rows)

    def prepare_copies(self, num_rows: int, wanted: bool) -> bool:
        """Update the copies if `wanted` and possible, see `RetrievalCache.prepare`. False where there are none."""
        if self._copies is None:
            return False
        with self._refresh_timing.measure(self.refreshes, num_rows):
            return self._copies.prepare(num_rows, wanted=wanted)

    def settled_refreshes(self) -> LevelStats:
        """The statistics of `prepare_copies`, with the seconds of everything that has ended."""
        self._refresh_timing.settle()
        return self.refreshes

    def fetch_ahead(self) -> None:
        """Begin to fetch the first tiles of the target's next pass."""
        self.full.fetch_ahead()

    def copy_rows(self, other: Worker, num_tokens: int | None = None) -> bool:
        """Copy the rows of the target's cache of `other`, of the same model, or the first `num_tokens` of them. Returns
        False and copies no row where positions are rotated differently (RoPE scaling "dynamic" or "longrope" with
        another context size), or where `other` cannot be truncated to so many tokens."""
        scorings = (scorings_of(each.plan, each.target.config, each.target.weights.scoring) for each in (self, other))
        if not all(ours.rope.starts_like(theirs.rope) for ours, theirs in zip(*scorings, strict=True)):
            return False
        count = other.full.length if num_tokens is None else num_tokens
        if other.reachable(count) < count:
            return False
        self.kept.copy_from(other.kept, count)
        return True

    def reachable(self, length: int, stop: int | None = None) -> int:
        """The most tokens, up to `length`, that the target's caches can be truncated to: windows lose rows, and states
        are at few places. stop: tokens of the sequence when drafting begins; a next-token head then finds its hidden
        rows."""
        return self.kept.reachable(length, stop)

    def release(self) -> None:
        """Release the memory of the caches, and of quantised weights that no other worker uses. The worker is not used
        again."""
        for cache in reversed(self._caches):
            cache.release()
        self._caches.clear()
        if self._has_coded_target:
            self._has_coded_target = False
            self.models.release_quantised_target(self.plan.composition.weight_bits)

    def close(self) -> None:
        """End the link's threads."""
        self.models.close()

    def _another(self, plan: Plan) -> Worker:
        return Worker(plan, self.models, vocab_size=self.vocab_size)

    def _make_levels(self) -> None:
        plan = self.plan
        arena = Arena(self.memory, plan.placement.device_bytes.get("arena", 0) // plan.request.num_sequences)
        self._caches.append(arena)
        size, dtype = self.target.config.row_size, DTYPES[plan.request.dtype]
        block, together = plan.placement.prefill_block, plan.placement.expert_rows
        resident = ResidentRows(arena, size, dtype, block=block, together=together)
        self._hidden_rows: HiddenRows = self.models.rows or resident
        scoring = self.target.weights.scoring
        self.full = full_cache(plan, self.target.config, self.memory, self.link, arena, scoring=scoring)
        self._caches.append(self.full)
        self.windows = window_cache(plan, self.target.config, self.memory, scoring)
        self.states = state_cache(plan, self.target, self.memory)
        self.ngrams = ngram_caches(plan, self.target, self.memory)
        self.hidden = last_hidden(plan, self.models.decoders.get("draft"), self.memory)
        convolved = self.ngrams[0] if self.ngrams else None
        self._caches += [each for each in (self.windows, self.states, convolved, self.hidden) if each is not None]
        self.kept = self._bundle(self._parts())
        self._target_cache = self._mixed(self.full, drafts=False)
        self.levels["target"] = self._level("target", self.target, self._target_cache, self.block)
        own = self._own_target()
        if plan.composition.inner == "retrieval":
            self.retrieval = retrieval_cache(plan, self.target.config, self.full)
            self._copies = self.retrieval
            self._caches.append(self.retrieval)
            self.levels["retrieval"] = self._level("retrieval", own, self._mixed(self.retrieval), None)
        elif plan.composition.keeps_all_codes:
            quantised = quantised_cache(plan, self.target.config, self.full, self.memory)
            self._copies = quantised
            self._caches.append(quantised)
            self.levels["self"] = self._level("self", own, self._mixed(quantised), None)
        elif plan.composition.inner == "self":
            self.levels["self"] = self._level("self", own, self._mixed(DraftRowsCache(self.full)), self.block)
        draft = self.models.decoders.get("draft")
        if "draft" in plan.composition.levels and isinstance(draft, AssistantDecoder):
            assert self.hidden is not None
            keys = target_keys(plan, draft.config, self.full, self.windows)
            more: dict[str, Any] = {"vocab_size": self.vocab_size}
            self.levels["draft"] = AssistantLevel("draft", draft, self.full, keys, self.hidden, **more)
        elif "draft" in plan.composition.levels and draft is not None:
            streaming = streaming_cache(plan, draft.config, self.memory, draft.weights.scoring)
            self._caches.append(streaming)
            self.levels["draft"] = self._draft_level(draft, streaming)

    def _parts(self) -> list[Part]:
        """The parts of what a sequence keeps, rows first: what sessions, the prefix store and copies hold of it."""
        index = self.full.index if isinstance(self.full, IndexedCache) else None
        every = (self.full, index, self.windows, self.states, *(self.ngrams or ()), self.hidden)
        return [part for part in every if part is not None]

    def _bundle(self, parts: Sequence[Part]) -> Kept:
        return Kept(*parts)

    def _draft_level(self, draft: Decoder, cache: StreamingCache) -> Level:
        if isinstance(draft, NextTokenDecoder):
            assert self.hidden is not None
            more: dict[str, Any] = {"link": self.link if draft.streams else None, "pool": self.models.graphs}
            return NextTokenLevel("draft", draft, cache, self.hidden, vocab_size=self.vocab_size, **more)
        return StreamingLevel("draft", draft, cache, vocab_size=self.vocab_size, pool=self.models.graphs)

    def _mixed(self, growing: Cache, *, drafts: bool = True) -> Cache:
        """`growing`, joined with the target's windows and states if it has any. drafts: see `MixedCache`."""
        if self.windows is None and self.states is None:
            return growing
        states: StateCache | DraftStates | None = self.states
        if drafts and self.states is not None:
            states = draft_states(self.plan, self.target.config, self.memory, self.states)
            self._caches.append(states)
        convolved, ids = self.ngrams or (None, None)
        kept: dict[str, Any] = {"convolved": convolved, "ids": ids}
        return MixedCache(self.target.config, growing, self.windows, states, drafts=drafts, **kept)

    def _own_target(self) -> Decoder:
        """The decoder with which the target is its own draft."""
        if (bits := self.plan.composition.weight_bits) == 16:
            return self.target
        coded = self.models.coded_target(bits)
        self._has_coded_target = True
        return coded

    def _level(self, name: str, decoder: Decoder, cache: Cache, block: int | None) -> Level:
        """A level of the target, over one of its weights and caches. Where neither streams, bytes that cross the link
        during its passes are not the level's."""
        link = self.link if cache is self._target_cache or decoder.streams else None
        placement = self.plan.placement
        streams = cache is self._target_cache and "kv" in placement.offload and not placement.block_slots
        pool = None if streams else self.models.graphs
        more: dict[str, Any] = {"block": block, "link": link, "pool": pool, "hidden": self._hidden_for(name)}
        return Level(name, decoder, cache, vocab_size=self.vocab_size, **more)

    def _hidden_for(self, name: str) -> Hidden | None:
        """The hidden rows that a level of the target writes; None without a next-token head."""
        if self.hidden is None or name == "target":
            return self.hidden
        return DraftedHidden(self.hidden, self.full)

    def _reserve(self) -> None:
        plan = self.plan
        try:
            self.full.reserve(plan.request.capacity + MAX_ROWS)
        except DoesNotFit as error:
            allocated = self.full.nbytes() * plan.request.num_sequences
            tiers = plan.placement.device_bytes, plan.placement.host_bytes
            planned = sum(tier.get(purpose, 0) for tier in tiers for purpose in ("kv cache", "raw pages"))
            raise DoesNotFit(f"{error} to {plan.request.capacity * allocated // planned}") from error


def stats_of_rank(rank: int, worker: Worker, sum_seconds: float) -> RankStats:
    """The statistics of a rank's worker since it was loaded, with its allocated memory."""
    link, allocated = worker.link_stats, worker.memory.allocated()
    return RankStats(
        rank=rank,
        device=str(worker.memory.device),
        bytes_to_device=link.bytes_to_device,
        bytes_to_host=link.bytes_to_host,
        link_seconds=link.busy_seconds,
        sum_seconds=sum_seconds,
        device_bytes=sum(allocated["device"].values()),
        host_bytes=sum(allocated["host"].values()),
    )
