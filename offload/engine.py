"""The roof: builds everything from a `Plan`, owns lifetimes, generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from offload import assembly
from offload.cache.full import FullCache
from offload.cache.retrieval import RetrievalCache
from offload.cache.streaming import StreamingCache
from offload.decode import generation
from offload.decode.generation import FinishReason
from offload.decode.held import Held, num_common
from offload.decode.lookahead import Lookahead
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import Speculator
from offload.decode.stack import stack
from offload.decode.tokenizer import Detokenizer, StopStrings, Tokenizer
from offload.errors import DoesNotFit, ModelError, UsageError
from offload.metrics import LinkStats, Stats
from offload.model.decoder import Decoder
from offload.model.level import Level, StreamingLevel, prefill
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.plan.sizing import MAX_ROWS
from offload.transfer.link import Link, make_link
from offload.transfer.memory import Memory

if TYPE_CHECKING:
    from offload.session.store import Store


@dataclass(frozen=True)
class Progress:
    """How far a long stage is."""

    stage: Literal["load", "restore", "prefill", "save"]
    done: int
    total: int
    unit: Literal["bytes", "tokens"]


OnProgress = Callable[[Progress], None]


def _ignore(progress: Progress) -> None:
    return None


@dataclass(frozen=True)
class Step:
    """What came at once: accepted tokens and the text that is complete with them. `finish` on the last step only."""

    text: str
    tokens: list[int]
    finish: FinishReason | None


def load_tokenizer(model: Path, draft: Path | None) -> Tokenizer:
    """The target's tokenizer. Raises ModelError where a folder has none or the draft's vocabulary is another."""
    tokenizer = Tokenizer.from_folder(model)
    if draft is not None:
        ours, theirs = tokenizer.vocabulary(), Tokenizer.from_folder(draft).vocabulary()
        if ours != theirs:
            raise ModelError(
                f"the draft {draft} has another vocabulary ({len(theirs)} tokens) than the target {model} "
                f"({len(ours)} tokens); name a draft with the target's tokenizer, or --draft none"
            )
    return tokenizer


def plan_request(model: Path, draft: Path | None, options: Options, *, num_prompt_tokens: int, max_tokens: int) -> Plan:
    """The plan for one request on this machine. Raises ModelError, UsageError, DoesNotFit."""
    request = Request.on_this_machine(model, draft, options)
    return request.plan(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)


class Engine:
    """Models, caches and a link for one plan. A context manager: `close` ends the link's threads.

    The full cache keeps what it holds from one request to the next. `levels` by name and the `retrieval` cache are
    there to be looked at, and for benchmarks that drive them.
    """

    plan: Plan
    levels: dict[str, Level]
    retrieval: RetrievalCache | None
    _full: FullCache
    _caches: list[FullCache | RetrievalCache | StreamingCache]
    _held: Held
    _lookahead: Lookahead

    def __init__(
        self,
        plan: Plan,
        target: Decoder,
        draft: Decoder | None,
        tokenizer: Tokenizer,
        memory: Memory,
        link: Link | None,
    ) -> None:
        self.tokenizer, self.memory, self.stats = tokenizer, memory, Stats()
        self._target, self._draft, self._link = target, draft, link
        self._load_seconds = 0.0
        self._link_at_start = self._link_at_decode = LinkStats()
        width = min(len(tokenizer), target.config.vocab_size)
        if draft is not None and draft.config.vocab_size < width:
            raise ModelError(f"the draft scores {draft.config.vocab_size} tokens, the target {width}; --draft none")
        self._width = width
        self._assemble(plan)

    @classmethod
    def load(
        cls, plan: Plan, model: Path, draft: Path | None, tokenizer: Tokenizer, *, on_progress: OnProgress = _ignore
    ) -> Engine:
        """Read the weights to where the plan wants them. Raises ModelError."""
        start = time.perf_counter()
        memory = Memory(torch.device(plan.device))
        link = make_link(memory.device, plan.link_bytes_per_second) if plan.offload else None
        folders = {"target": model}
        if draft is not None and "draft" in plan.levels:
            folders["draft"] = draft

        def report(done: int, total: int) -> None:
            on_progress(Progress("load", done, total, "bytes"))

        try:
            decoders = assembly.load_decoders(folders, plan, memory, link, report)
            engine = cls(plan, decoders["target"], decoders.get("draft"), tokenizer, memory, link)
            engine._reserve()
        except BaseException:
            if link is not None:
                link.close()
            raise
        engine._load_seconds = time.perf_counter() - start
        return engine

    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        end_tokens: Collection[int] = (),
        reuse: bool = False,
        on_progress: OnProgress = _ignore,
    ) -> Iterator[Step]:
        """Yield text as it is accepted. After the last step the caches hold the prompt and the kept tokens, no more.

        A stop string ends the text before it; tokens after the one that completes it are dropped, inside an accepted
        run too. end_tokens: more of them, besides the model's own. Stopping early (closing the iterator, Ctrl-C) leaves
        the caches consistent.
        reuse: go on from the rows that are held of the longest common prefix, whichever passes computed them: the same
        rows but for rounding. Otherwise only a prefill of this very prompt is taken over, and the text does not depend
        on what the engine was asked before.
        """
        self._check(prompt, max_tokens)
        speculator = self._make_speculator(sampling)
        self._start(prompt, reuse=reuse)
        text_tokens, end_tokens = list(prompt), self._end_tokens() | frozenset(end_tokens)
        detokenizer, stops = Detokenizer(self.tokenizer, prompt), StopStrings(stop)
        runs = generation.generate(
            prompt,
            speculator,
            prefill=lambda tokens: self._prefill(tokens, on_progress),
            num_pending=len(prompt) - self._num_prefilled(prompt),
            max_tokens=max_tokens,
            end_tokens=end_tokens,
            stats=self.stats,
        )
        try:
            for run in runs:
                step = _show(run, detokenizer, stops, end_tokens)
                self.stats.output_tokens -= len(run.tokens) - len(step.tokens)
                text_tokens += step.tokens
                self._measure_link()
                yield step
                if step.finish is not None:
                    return
        finally:
            speculator.truncate(len(text_tokens))
            self._held.generated(text_tokens[: self._full.length])

    def settle(self, tokens: Sequence[int], *, on_progress: OnProgress = _ignore) -> None:
        """Hold `tokens`, with which the next prompt is certain to begin, and get the levels below ready for it.

        A later `generate(..., reuse=True)` then runs only what comes after them.
        """
        self._check(tokens, 0)
        self._held.num_settled = 0
        self._start(tokens, reuse=True)
        self._prefill(tokens[: self._num_prefilled(tokens)], on_progress)
        num_rows = len(tokens) - self._full.length
        self.levels["target"].forward(tokens[-num_rows:], 1)
        if self.retrieval is not None:
            self.retrieval.refresh(num_rows)
        self._full.fetch_ahead()
        self._held.tokens, self._held.num_settled = list(tokens), len(tokens)

    def replan(self, plan: Plan) -> None:
        """Go on under another plan, with what is held. Only where neither plan offloads: weights stay where they are.

        Needs the memory of both caches for a moment; without it (DoesNotFit) all is as it was. Where the positions turn
        otherwise in a context of the new size (RoPE scaling "dynamic"), nothing of what is held can be used.
        """
        if plan.offload or self.plan.offload:
            raise ValueError("an engine that offloads is made for one plan")
        full, held, before = self._full, self._held, vars(self).copy()
        old, self._caches = self._caches, []
        try:
            self._assemble(plan)
            self._reserve()
        except BaseException:
            self._release(self._caches)
            vars(self).update(before)
            raise
        if self._full.rope.starts_like(full.rope):
            self._full.copy_from(full)
            held.num_settled = 0
            self._held = held
        self._release(old)

    @property
    def num_held(self) -> int:
        """Tokens whose rows the full cache holds."""
        return len(self._held.tokens)

    def restore(self, store: Store, tokens: Sequence[int], *, on_progress: OnProgress = _ignore) -> int:
        """Hold what `store` has of the longest common prefix with `tokens`, where that is more than is held. Returns
        how many tokens that prefix has.

        Raises SessionError where a page is damaged; then nothing is held.
        """
        common = min(num_common(store.tokens, tokens), self.plan.capacity)
        if common <= num_common(self._held.tokens, tokens):
            return common
        self._held = Held()
        total = store.bytes_to_write(common, 0)
        report = _counted("restore", total, on_progress)
        store.load(self._full, common, on_bytes=report)
        report(total)
        self._held = Held(list(tokens[:common]), num_saved=common)
        return common

    def save(self, store: Store, extra: Mapping[str, object], *, on_progress: OnProgress = _ignore) -> None:
        """Have `store` hold what this engine holds; pages that it has already are not written again.

        `store`: the same from one save to the next, and the one that was restored from. Raises SessionError,
        DoesNotFit; what was saved before stays.
        """
        held = self._held
        total = store.bytes_to_write(len(held.tokens), held.num_saved)
        report = _counted("save", total, on_progress)
        store.save(
            self._full,
            held.tokens,
            capacity=self.plan.capacity,
            extra=extra,
            unchanged=held.num_saved,
            on_bytes=report,
        )
        report(total)
        held.num_saved = len(held.tokens)

    def take_prompt(self, other: Engine) -> None:
        """Hold the prefill that `other` holds, of the same model, instead of running it again."""
        other._truncate(other._held.num_own)
        self._full.copy_from(other._full)
        self._held = Held(list(other._held.tokens), other._held.num_own)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end_tokens(self) -> frozenset[int]:
        own = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        return frozenset((*self._target.config.eos_token_ids, *own))

    def _assemble(self, plan: Plan) -> None:
        """Caches and levels of `plan`, holding nothing."""
        self.plan, width, link = plan, self._width, self._link
        self._held = Held()
        config = self._target.config
        blocks = assembly.block_sizes(plan, config)
        self._full = assembly.full_cache(plan, config, self.memory, link, blocks)
        self._caches = [self._full]
        self.retrieval = None
        self.levels = {"target": Level("target", self._target, self._full, vocab_size=width, blocks=blocks, link=link)}
        if "retrieval" in plan.levels:
            self.retrieval = assembly.retrieval_cache(plan, self.memory, self._full)
            self._caches.append(self.retrieval)
            self.levels["retrieval"] = Level("retrieval", self._target, self.retrieval, vocab_size=width, link=link)
        if "draft" in plan.levels and self._draft is not None:
            cache = assembly.streaming_cache(plan, self._draft.config, self.memory)
            self._caches.append(cache)
            self.levels["draft"] = StreamingLevel("draft", self._draft, cache, vocab_size=width)

    @staticmethod
    def _release(caches: Sequence[FullCache | RetrievalCache | StreamingCache]) -> None:
        """They are not used again."""
        for cache in caches:
            cache.release()

    def _check(self, prompt: Sequence[int], max_tokens: int) -> None:
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if len(prompt) + max_tokens > self.plan.capacity:
            raise DoesNotFit(
                f"{len(prompt)} prompt tokens and {max_tokens} new ones are more than the planned {self.plan.capacity}"
            )

    def _start(self, prompt: Sequence[int], *, reuse: bool) -> None:
        """Fresh counters. The full cache keeps what this request may go on from; the levels below start afresh, unless
        they were got ready for it: so a request's text does not depend on what was drafted in earlier ones."""
        kept = (self._held.reusable if reuse else self._held.own)(prompt, self.plan.rows)
        if not reuse:
            self._held.num_settled = 0
        self._truncate(kept)
        if self.retrieval is not None and not self._held.num_settled:
            self.retrieval.truncate(0)
        if "draft" in self.levels:
            self.levels["draft"].truncate(0)
        self._full.keeps_mass = True
        self.stats = Stats(prompt_tokens=len(prompt), reused_tokens=kept, load_seconds=self._load_seconds)
        for level in self.levels.values():
            level.stats = type(level.stats)(level.stats.name)
        self.stats.levels = [level.stats for level in self.levels.values()]
        self._link_at_start = self._link_at_decode = self._link.stats if self._link else LinkStats()

    def _truncate(self, length: int) -> None:
        self._held.truncate(length)
        self._full.truncate(length)

    def _num_prefilled(self, prompt: Sequence[int]) -> int:
        """Tokens of it that no pass of the target level runs."""
        return max(len(prompt) - self.plan.rows, self._full.length)

    def _prefill(self, tokens: Sequence[int], on_progress: OnProgress) -> None:
        """Into the full cache, what it does not hold yet; the levels below see what they need of it later."""
        held = self._full.length
        if len(tokens) == held:
            return

        def report(num_tokens: int) -> None:
            on_progress(Progress("prefill", num_tokens, len(tokens) - held, "tokens"))

        prefill(self._target, self._full, tokens[held:], walk=self.plan.walk, on_tokens=report)
        self._held.prefilled(tokens)
        if self._link is not None:
            self._link_at_decode = self._link.stats

    def _reserve(self) -> None:
        """Allocate the full cache. Raises DoesNotFit, with the context that the memory had so far is enough for."""
        try:
            self._full.reserve(self.plan.capacity + MAX_ROWS)
        except DoesNotFit as error:
            held = sum(tier.get("kv cache", 0) for tier in self.memory.allocated().values())
            planned = sum(tier.get("kv cache", 0) for tier in (self.plan.device_bytes, self.plan.host_bytes))
            raise DoesNotFit(f"{error} to {self.plan.capacity * held // planned}") from error

    def _measure_link(self) -> None:
        if self._link is None:
            return
        now = self._link.stats
        self.stats.prefill_link = self._link_at_decode - self._link_at_start
        self.stats.decode_link = now - self._link_at_decode

    def _make_speculator(self, sampling: SamplingParams) -> Speculator:
        levels = stack(
            self.plan,
            self.levels,
            sampling,
            vocab_size=self._width,
            device=self.memory.device,
            on_verified=self._prepare,
        )
        self._lookahead = levels.lookahead
        return levels.top

    def _prepare(self, num_rows: int) -> None:
        """After a verification, for the next: retrieved chunks first, since the proposals wait for them."""
        if self.retrieval is not None:
            self._prepare_retrieval(self.retrieval, num_rows)
        self._full.fetch_ahead()

    def _prepare_retrieval(self, retrieval: RetrievalCache, num_rows: int) -> None:
        """Refresh where the retrieval level is wanted, by the masses of the pass that ended; else it rests, and none
        are kept."""
        start, index = time.perf_counter(), -1  # the last proposer of the target
        wanted = self._lookahead.wants(index)
        ready = wanted and (self._full.keeps_mass or not retrieval.needs_mass)
        self._full.keeps_mass = wanted
        if ready:
            retrieval.refresh(num_rows)
        seconds = time.perf_counter() - start
        self._lookahead.readied(index, seconds if ready else None)
        self.stats.refresh_seconds += seconds


def _counted(stage: Literal["restore", "save"], total: int, on_progress: OnProgress) -> Callable[[int], None]:
    """Hears of bytes as they come, and tells how many they are by now."""
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        on_progress(Progress(stage, done, total, "bytes"))

    return count


def _show(run: generation.Run, detokenizer: Detokenizer, stops: StopStrings, end_tokens: frozenset[int]) -> Step:
    """The run's text, cut after the token that completes a stop string. End tokens print nothing."""
    text, tokens = "", []
    for token in run.tokens:
        tokens.append(token)
        if token not in end_tokens:
            text += stops.push(detokenizer.push(token))
        if stops.found:
            return Step(text, tokens, "stop")
    if run.finish is not None:
        text += stops.push(detokenizer.flush())
        if stops.found:
            return Step(text, tokens, "stop")
        text += stops.flush()
    return Step(text, tokens, run.finish)
