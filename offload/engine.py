"""The roof: builds everything from a `Plan`, owns lifetimes, generates."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offload import assembly
from offload.cache.full import FullCache
from offload.cache.retrieval import RetrievalCache
from offload.cache.streaming import StreamingCache
from offload.decode import generation
from offload.decode.clock import Clock
from offload.decode.generation import FinishReason
from offload.decode.lookahead import Lookahead
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import Speculator
from offload.decode.stack import stack
from offload.decode.tokenizer import Detokenizer, StopStrings, Tokenizer
from offload.errors import DoesNotFit, ModelError, UsageError
from offload.holding import Holding
from offload.metrics import LinkStats, Stats
from offload.model.decoder import Decoder
from offload.model.level import Level, StreamingLevel
from offload.plan.config import ModelConfig
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.progress import OnProgress, Progress, ignore
from offload.transfer.link import Link, make_link
from offload.transfer.memory import Memory

if TYPE_CHECKING:
    from offload.session.store import Store


@dataclass(frozen=True)
class Step:
    """What came at once: accepted tokens and the text that is complete with them. `finish` on the last step only."""

    text: str
    tokens: list[int]
    finish: FinishReason | None


def load_tokenizer(model: Path, draft: Path | None) -> Tokenizer:
    """The target's tokenizer. Raises ModelError where a folder has none or the draft's vocabulary is another."""
    for folder in (model,) if draft is None else (model, draft):
        ModelConfig.from_folder(folder)  # some tokenizers read it too, and say less of what is wrong with it
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

    `rows`: what the full cache holds from one request to the next. `levels` by name and the `retrieval` cache are
    there to be looked at, and for benchmarks that drive them.
    """

    plan: Plan
    levels: dict[str, Level]
    retrieval: RetrievalCache | None
    rows: Holding
    _caches: list[FullCache | RetrievalCache | StreamingCache]
    clock: Clock  # of the latest request
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
        cls, plan: Plan, model: Path, draft: Path | None, tokenizer: Tokenizer, *, on_progress: OnProgress = ignore
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
            engine.rows.reserve()
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
        speculation: bool = True,
        on_progress: OnProgress = ignore,
    ) -> Iterator[Step]:
        """Yield text as it is accepted. After the last step the caches hold the prompt and the kept tokens, no more.

        A stop string ends the text before it; tokens after the one that completes it are dropped, inside an accepted
        run too. end_tokens: more of them, besides the model's own. Stopping early (closing the iterator, Ctrl-C) leaves
        the caches consistent.
        reuse: go on from the rows that are held of the longest common prefix, whichever passes computed them: the same
        rows but for rounding. Otherwise only rows that a prefill of this prompt would give bit for bit are taken over
        (whole blocks that prompts begin with alike), and the text does not depend on what the engine was asked before.
        speculation: off, this request is decoded plainly, whatever the plan has; what lies where stays as planned.
        """
        self._check(prompt, max_tokens)
        self._start(prompt, reuse=reuse)
        speculator = self._make_speculator(sampling) if speculation else self._make_plain(sampling)
        text_tokens, end_tokens = list(prompt), self.end_tokens | frozenset(end_tokens)
        detokenizer, stops = Detokenizer(self.tokenizer, prompt), StopStrings(stop)
        runs = generation.generate(
            prompt,
            speculator,
            prefill=lambda tokens: self._prefill(tokens, on_progress),
            num_pending=len(prompt) - self.rows.num_prefilled(prompt),
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
            self.rows.generated(text_tokens)

    def settle(self, tokens: Sequence[int], *, on_progress: OnProgress = ignore) -> None:
        """Hold `tokens`, with which the next prompt is certain to begin, and get the levels below ready for it.

        A later `generate(..., reuse=True)` then runs only what comes after them.
        """
        self._check(tokens, 0)
        rows = self.rows
        rows.unsettle()
        self._start(tokens, reuse=True)
        self._prefill(tokens[: rows.num_prefilled(tokens)], on_progress)
        num_rows = len(tokens) - rows.cache.length
        self.levels["target"].forward(tokens[-num_rows:], 1)
        if self.retrieval is not None:
            self.retrieval.refresh(num_rows)
        rows.cache.fetch_ahead()
        rows.settled(tokens)

    def replan(self, plan: Plan) -> None:
        """Go on under another plan, with what is held. Only where neither plan offloads: weights stay where they are.

        Needs the memory of both caches for a moment; without it (DoesNotFit) all is as it was. Where the positions turn
        otherwise in a context of the new size (RoPE scaling "dynamic"), nothing of what is held can be used.
        """
        if plan.offload or self.plan.offload:
            raise ValueError("an engine that offloads is made for one plan")
        before, rows, old = vars(self).copy(), self.rows, self._caches
        self._caches = []
        try:
            self._assemble(plan)
            self.rows.reserve()
        except BaseException:
            self._release(self._caches)
            vars(self).update(before)
            raise
        self.rows.take(rows)
        self._release(old)

    @property
    def num_held(self) -> int:
        """Tokens whose rows the full cache holds."""
        return len(self.rows.tokens)

    def restore(self, store: Store, tokens: Sequence[int], *, on_progress: OnProgress = ignore) -> int:
        """Hold what `store` has of the longest common prefix with `tokens`, where that is more than is held. Returns
        how many tokens that prefix has.

        Raises SessionError where a page is damaged; then nothing is held.
        """
        return self.rows.restore(store, tokens, on_progress)

    def save(self, store: Store, extra: Mapping[str, object], *, on_progress: OnProgress = ignore) -> None:
        """Have `store` hold what this engine holds; pages that it has already are not written again.

        `store`: the same from one save to the next, and the one that was restored from. Raises SessionError,
        DoesNotFit; what was saved before stays.
        """
        self.rows.save(store, extra, on_progress)

    def take_prompt(self, other: Engine) -> None:
        """Hold the prefill that `other` holds, of the same model, instead of running it again."""
        self.rows.take_prefill(other.rows)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def end_tokens(self) -> frozenset[int]:
        """The model's own."""
        own = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        return frozenset((*self._target.config.eos_token_ids, *own))

    def _assemble(self, plan: Plan) -> None:
        """Caches and levels of `plan`, holding nothing."""
        self.plan, width, link = plan, self._width, self._link
        config = self._target.config
        blocks = assembly.block_sizes(plan, config)
        full = assembly.full_cache(plan, config, self.memory, link, blocks)
        self.rows = Holding(full, self._target, plan)
        self._caches = [full]
        self.retrieval = None
        self.levels = {"target": Level("target", self._target, full, vocab_size=width, blocks=blocks, link=link)}
        if "retrieval" in plan.levels:
            self.retrieval = assembly.retrieval_cache(plan, self.memory, full)
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
        num_known = min(model.config.vocab_size for model in (self._target, self._draft) if model is not None)
        if max(prompt) >= num_known:
            raise ModelError(
                f"the tokenizer gives token {max(prompt)}, the weights are for {num_known}; they do not belong "
                "together, download the model again"
            )
        if len(prompt) + max_tokens > self.plan.capacity:
            raise DoesNotFit(
                f"{len(prompt)} prompt tokens and {max_tokens} new ones are more than the planned {self.plan.capacity}"
            )

    def _start(self, prompt: Sequence[int], *, reuse: bool) -> None:
        """Fresh counters. The full cache keeps what this request may go on from; the levels below start afresh, unless
        they were got ready for it: so a request's text does not depend on what was drafted in earlier ones."""
        kept = self.rows.begin(prompt, reuse=reuse)
        if self.retrieval is not None and not self.rows.is_settled:
            self.retrieval.truncate(0)
        if "draft" in self.levels:
            self.levels["draft"].truncate(0)
        self.rows.cache.record_mass = True
        self.stats = Stats(prompt_tokens=len(prompt), reused_tokens=kept, load_seconds=self._load_seconds)
        for level in self.levels.values():
            level.stats = type(level.stats)(level.stats.name)
        self.stats.levels = [level.stats for level in self.levels.values()]
        self._link_at_start = self._link_at_decode = self._link.stats if self._link else LinkStats()

    def _prefill(self, tokens: Sequence[int], on_progress: OnProgress) -> None:
        """Into the full cache, what it does not hold yet; the levels below see what they need of it later."""
        self.rows.prefill(tokens, on_progress)
        if self._link is not None:
            self._link_at_decode = self._link.stats

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
            keeps_mass=lambda: self.retrieval is not None and self.rows.cache.record_mass,
            block=self.levels["target"].block,
        )
        self._lookahead, self.clock = levels.lookahead, levels.clock
        return levels.top

    def _make_plain(self, sampling: SamplingParams) -> Speculator:
        """One that drafts nothing: the levels below rest, and no masses are kept for them."""
        self.rows.cache.record_mass = False
        levels = stack(
            replace(self.plan, gamma=0, lookup=False, adaptive=()),
            {"target": self.levels["target"]},
            sampling,
            vocab_size=self._width,
            device=self.memory.device,
            on_verified=lambda num_rows: self.rows.cache.fetch_ahead(),
            keeps_mass=lambda: False,
        )
        return levels.top

    def _prepare(self, num_rows: int) -> None:
        """After a verification, for the next: retrieved chunks first, since the proposals wait for them."""
        if self.retrieval is not None:
            self._prepare_retrieval(self.retrieval, num_rows)
        self.rows.cache.fetch_ahead()

    def _prepare_retrieval(self, retrieval: RetrievalCache, num_rows: int) -> None:
        """Refresh where the retrieval level is wanted, by the masses of the pass that ended; else it rests, and none
        are kept."""
        began, start, index = time.perf_counter(), self.clock.now(), -1  # the last proposer of the target
        wanted = self._lookahead.wants(index)
        ready = wanted and (self.rows.cache.record_mass or not retrieval.needs_mass)
        self.rows.cache.record_mass = wanted
        if ready:
            retrieval.refresh(num_rows)
            self.clock.wind(self.plan.predicted.refresh_seconds)
        self._lookahead.readied(index, self.clock.now() - start if ready else None)
        self.stats.refresh_seconds += time.perf_counter() - began


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
