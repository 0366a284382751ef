"""The engine: requests in, text out, on a worker that a `Plan` describes."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.decode import generation
from offload.decode.build import build_speculator
from offload.decode.distribution import Distribution, distribution_of
from offload.decode.logprobs import scored
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import Speculator
from offload.engine.passages import NUM_ROWS, Attended
from offload.engine.prefix import OpenStore, PrefixCache
from offload.engine.request import GenerationRequest, end_tokens_of
from offload.engine.scores import Reference, Scores, Scoring
from offload.engine.step import Step
from offload.errors import DoesNotFit, ModelError, UsageError
from offload.kernels.choice import all_of_model, gpu_kernels
from offload.kernels.cpu import OFF
from offload.kernels.gpu.flash import flash
from offload.kv.retrieval import RetrievalCache
from offload.metrics import LevelStats, LinkStats, RankStats, Stats
from offload.model.decoder import OnHidden
from offload.model.level import Level
from offload.model.passes import Pass, Work, alone, forward
from offload.plan.composition import PLAIN
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.progress import OnProgress, ignore
from offload.ranks.leader import load_worker
from offload.text.reply_text import ReplyText
from offload.text.tokenizer import Tokenizer
from offload.transfer.device import use_device
from offload.worker.curve_timer import time_again, timed
from offload.worker.disk_timer import disk_timed, time_disk
from offload.worker.worker import Worker

if TYPE_CHECKING:
    from offload.session.store import Store


__all__ = [
    "Engine",
    "disk_timed",
    "kernels_problem",
    "load_tokenizer",
    "plan_request",
    "prefill_problem",
    "time_again",
    "time_disk",
    "timed",
]


def kernels_problem(device: str, model: ModelConfig) -> str:
    """The reason why a pass of `model` on `device` runs on torch's operators although kernels should run; "" if none.
    Raises UsageError for an invalid TRIFORCE_KERNELS."""
    found = all_of_model(torch.device(device), model)
    return "" if found.reason == OFF else found.reason


def prefill_problem(device: str) -> str:
    """The reason why a 16-bit prefill on `device` runs on torch's fused kernel although flash-attn could be installed;
    "" where there is no problem, or where Triton's kernel runs instead."""
    found = flash(torch.device(device))
    return found.reason if found.avoidable and not gpu_kernels(torch.device(device)).usable else ""


def load_tokenizer(model: Path, draft: Path | None) -> Tokenizer:
    """The target's tokenizer. Raises ModelError where a folder has none, or where the draft's vocabulary differs."""
    for folder in (model,) if draft is None else (model, draft):
        read_config(folder)  # some tokenizers read the config too, with less helpful errors
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
    request = disk_timed(timed(Request.on_this_machine(model, draft, options)), model)
    return request.plan(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)


class Engine:
    """The engine: it answers requests on a worker. A context manager: `close` ends the link's threads.

    worker: models and caches. prefix: the rows that the full cache keeps between requests. stats: of the latest
    request.
    """

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        *,
        load_seconds: float = 0.0,
        open_store: OpenStore | None = None,
    ) -> None:
        self.worker, self.tokenizer, self.stats = worker, tokenizer, Stats()
        self.prefix = PrefixCache(worker, open_store)
        self._load_seconds, self._open_store = load_seconds, open_store
        self._link_at_start = self._link_at_decode = LinkStats()
        self._ranks_at_decode: list[RankStats] = []

    @classmethod
    def load(
        cls,
        plan: Plan,
        model: Path,
        draft: Path | None,
        tokenizer: Tokenizer,
        *,
        open_store: OpenStore | None = None,
        on_progress: OnProgress = ignore,
    ) -> Engine:
        """Load the weights to their places in the plan, on each of its devices. open_store: opens the prefix store,
        from which prefills read rows; None: all rows are computed. Raises ModelError, DoesNotFit, RankFailed."""
        start = time.perf_counter()
        folders = {"target": model}
        if draft is not None and "draft" in plan.composition.levels:
            folders["draft"] = draft
        worker = load_worker(plan, folders, num_tokens=len(tokenizer), on_progress=on_progress)
        return cls(worker, tokenizer, load_seconds=time.perf_counter() - start, open_store=open_store)

    @property
    def plan(self) -> Plan:
        return self.worker.plan

    @property
    def levels(self) -> Mapping[str, Level]:
        return self.worker.levels

    @property
    def retrieval(self) -> RetrievalCache | None:
        return self.worker.retrieval

    def generate(self, request: GenerationRequest, *, on_progress: OnProgress = ignore) -> Generator[Step, None, None]:
        """Yield text as it is accepted. After the last step the caches hold exactly the prompt and the kept tokens.
        Stopping early (closing the iterator, Ctrl-C) leaves the caches consistent.

        Raises UsageError, ModelError, DoesNotFit before anything is computed where the request cannot be answered.
        """
        return alone(self.in_passes(request, on_progress=on_progress))

    def in_passes(self, request: GenerationRequest, *, on_progress: OnProgress = ignore) -> Work[Step]:
        """`generate` for a caller that runs the passes: after the prefill, passes are yielded before the steps that
        need them. Closing it leaves the caches consistent, too."""
        prompt, speculation = request.prompt, request.speculation
        self.stats = Stats()  # a request that is refused has no earlier one's
        self._check(prompt, request.max_tokens)
        full = self.worker.full
        attended = self._attended(len(prompt)) if request.passages else None
        text_tokens, end_tokens = list(prompt), self.end_tokens | frozenset(request.end_tokens)
        num_prompt = len(prompt) - request.begun
        distribution = self.distribution(request.sampling, num_prompt, end_tokens)
        if request.reuse and request.sampling.seed is None:  # a seed's text does not depend on what is stored
            self.prefix.give_way(prompt)
        self._start(prompt, reuse=request.reuse, record_mass=speculation)
        speculator = self._make_speculator(
            request.sampling, distribution, speculation=speculation, keeps_logits=request.logprobs is not None
        )
        written = self._written(request, end_tokens)
        begun = "".join(map(written.push, prompt[num_prompt:]))
        num_pending = len(prompt) - self.prefix.num_prefilled(prompt)
        runs = generation.in_passes(
            prompt,
            speculator,
            prefill=partial(self._prefill, on_progress=on_progress),
            num_pending=num_pending,
            max_tokens=request.max_tokens,
            end_tokens=end_tokens,
            stats=self.stats,
        )
        full.keep_mass = attended is not None
        try:
            for run in runs:
                if isinstance(run, Pass):
                    yield run
                    continue
                if attended is not None and run.tokens:
                    if self.stats.output_tokens == len(run.tokens):
                        last = range(max(num_pending - NUM_ROWS, 0), num_pending)
                        attended.begin([full.mass(1, after=row) for row in last])
                    else:
                        attended.add(full.mass(len(run.tokens)), len(run.tokens))
                self.worker.fetch_ahead()
                step, begun = Step.of(run, written, begun), ""
                if step.finish == "length" and distribution.is_over(text_tokens + step.tokens):
                    step = replace(step, finish="stop")
                if run.logits is not None and request.logprobs is not None:
                    step = replace(step, scores=tuple(scored(run.logits, step.tokens, request.logprobs)))
                self.stats.output_tokens -= len(run.tokens) - len(step.tokens)
                if attended is not None and step.finish is not None:
                    step = replace(step, passages=tuple(attended.passages(request.passages)))
                text_tokens += step.tokens
                self._measure(run)
                yield step
                if step.finish is not None:
                    return
        finally:
            full.keep_mass = False
            speculator.truncate(len(text_tokens))
            self.prefix.generated(text_tokens)

    def precompute(self, tokens: Sequence[int], *, on_progress: OnProgress = ignore) -> None:
        """Run `tokens`, with which the next prompt is certain to begin, and prepare the levels below for it.

        A later `generate(..., reuse=True)` then runs only the tokens after them.
        """
        self._check(tokens, 0)
        worker, prefix = self.worker, self.prefix
        prefix.num_precomputed = 0
        self._start(tokens, reuse=True, record_mass=True)
        self._prefill(tokens[: prefix.num_prefilled(tokens)], on_progress)
        target = worker.levels["target"]
        num_rows = len(tokens) - target.length
        forward(target, tokens[-num_rows:], 1)
        worker.refresh(num_rows)
        worker.fetch_ahead()
        prefix.precomputed(tokens)

    def score(
        self,
        tokens: Sequence[int],
        *,
        num_tokens: int | None = None,
        keep_rows: bool = False,
        reference: Reference | None = None,
        on_progress: OnProgress = ignore,
    ) -> Scores:
        """The log probability of each of `tokens` after the tokens before it. Afterwards the caches hold all tokens but
        the last.

        num_tokens: only the first `num_tokens` ids of the vocabulary can follow; None: all. keep_rows: make a
        `Scores.reference`. reference: another model's, of the same tokens, to compare with. Raises UsageError,
        ModelError, DoesNotFit before anything is computed, TriforceError where a probability is not a number.
        """
        self._check(tokens, 0)
        scoring = Scoring(self.worker, tokens, num_tokens=num_tokens, keep_rows=keep_rows, reference=reference)
        self.prefix.truncate(0)
        self._start(tokens, reuse=False, record_mass=False)
        self._prefill(tokens[:-1], on_progress, scoring.take)
        return scoring.scores()

    def replan(self, plan: Plan) -> None:
        """Change to another plan, with the cached rows. Only where neither plan offloads.

        Peak memory: both plans' caches. After an error, such as DoesNotFit, the engine is unchanged. Where the new
        context size changes the rotation of positions (RoPE scaling "dynamic" or "longrope"), no row can be used again.
        """
        worker = self.worker.replanned(plan)
        prefix = PrefixCache(worker, self._open_store)
        try:
            prefix.take(self.prefix)
        except BaseException:
            worker.release()
            raise
        outgrown, self.worker, self.prefix = self.worker, worker, prefix
        outgrown.release()

    @property
    def num_cached(self) -> int:
        """The number of tokens whose rows the full cache holds."""
        return len(self.prefix.tokens)

    def restore(self, store: Store, tokens: Sequence[int], *, on_progress: OnProgress = ignore) -> int:
        """Read the rows of the longest common prefix of `store` and `tokens`, if it is longer than the cached one.
        Returns the number of tokens of that prefix.

        Raises SessionError where a page is damaged; then no row is cached.
        """
        return self.prefix.restore(store, tokens, on_progress)

    def save(self, store: Store, extra: Mapping[str, object], *, on_progress: OnProgress = ignore) -> None:
        """Write the cached rows to `store`; pages that it has already are not written again.

        `store`: the same for all saves, and the one that was restored from. Raises SessionError, DoesNotFit; after an
        error the earlier save remains.
        """
        self.prefix.save(store, extra, on_progress)

    def keep(self, *, on_progress: OnProgress = ignore, documents: Sequence[str] = ()) -> int:
        """Write the rows of the last prompt's prefill to the prefix store, for later prompts that begin alike.
        documents: names of the prompt's, see `PrefixStore.keep`. Returns the number of tokens that are kept; 0 without
        a store."""
        return self.prefix.keep(on_progress, documents)

    def beside(self) -> Engine:
        """An engine of the same plan for another sequence: with its own caches, over the same models. Raises
        DoesNotFit."""
        return Engine(
            self.worker.beside(), self.tokenizer, load_seconds=self._load_seconds, open_store=self._open_store
        )

    def borrow(self, others: Sequence[Engine], prompt: Sequence[int], *, reuse: bool = False) -> None:
        """Copy from one of `others`, made by `beside`, the cached rows that a request of `prompt` reuses, see
        `GenerationRequest`, if it has more of them. `others` may be in the middle of a text."""
        self.prefix.borrow([other.prefix for other in others], prompt, reuse=reuse)

    def take_prompt(self, other: Engine) -> None:
        """Copy the cached prefill of `other`, of the same model, instead of running it again."""
        self.prefix.take_prefill(other.prefix)

    def close(self) -> None:
        self.worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def end_tokens(self) -> frozenset[int]:
        """The model's own end tokens."""
        return end_tokens_of(self.worker.target.config, self.tokenizer)

    def _check(self, prompt: Sequence[int], max_tokens: int) -> None:
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if max_tokens < 0:
            raise UsageError(f"max_tokens is {max_tokens}, it must be 0 or more")
        vocab_size = self.worker.vocab_size
        for token in (min(prompt), max(prompt)):
            if vocab_size <= token < len(self.tokenizer):
                raise ModelError(
                    f"the tokenizer gives token {token}, the weights are for {vocab_size}; they do not belong "
                    "together, download the model again"
                )
            if not 0 <= token < vocab_size:
                raise UsageError(
                    f"the prompt has token {token}, it must be from 0 to {vocab_size - 1}: take the ids of the "
                    "model's own tokenizer"
                )
        capacity = self.plan.request.capacity
        if len(prompt) + max_tokens > capacity:
            raise DoesNotFit(
                f"{len(prompt)} prompt tokens and {max_tokens} new ones are more than the planned {capacity}"
            )

    def _start(self, prompt: Sequence[int], *, reuse: bool, record_mass: bool) -> None:
        """Start a request, with new counters. The full cache keeps the reused rows. The levels below start empty, so
        that a text does not depend on earlier requests' drafts, except for a precomputed retrieval cache."""
        use_device(self.worker.memory.device)
        reused = self.prefix.begin(prompt, reuse=reuse)
        if "draft" in self.levels:
            self.levels["draft"].truncate(0)
        if (inner := self.plan.composition.inner) is not None and not self.prefix.num_precomputed:
            self.levels[inner].truncate(0)
        self.worker.record_mass(record_mass)
        self.stats = Stats(
            prompt_tokens=len(prompt),
            reused_tokens=reused,
            load_seconds=self._load_seconds,
            wider_layers=self.worker.target.weights.layers.num_wider,
        )
        for level in self.levels.values():
            level.stats = LevelStats(level.stats.name)
        self.worker.refreshes = LevelStats("refresh")
        self.stats.levels = [level.stats for level in self.levels.values()]
        self._link_at_start = self._link_at_decode = self.worker.link_stats

    def _written(self, request: GenerationRequest, end_tokens: Collection[int]) -> ReplyText:
        """The text after a request's prompt, none yet."""
        return ReplyText(
            self.tokenizer,
            request.prompt[: len(request.prompt) - request.begun],
            stops=request.stop,
            named=request.named,
            end_tokens=end_tokens,
            answer=None if request.answer is None else request.answer(),
            of_answer=request.answer_stop,
        )

    def _attended(self, num_prompt: int) -> Attended:
        """The masses of a text, none yet. Raises UsageError where the plan records no masses."""
        if (chunk := self.worker.full.mass_chunk) is None:
            raise UsageError("passages are found by attention masses, and the plan records none; plan with masses=True")
        if not self.worker.full.num_layers:
            raise UsageError("every layer of this model has a window: none attends to all of the prompt (--cite)")
        return Attended(chunk, num_prompt)

    def _prefill(self, tokens: Sequence[int], on_progress: OnProgress, on_hidden: OnHidden | None = None) -> None:
        self.prefix.prefill(tokens, on_progress, on_hidden)
        self.stats.stored_tokens = self.prefix.num_read
        self.stats.reused_tokens += self.prefix.num_read
        self._link_at_decode, self._ranks_at_decode = self.worker.link_stats, self.worker.rank_stats()

    def _measure(self, run: generation.Run) -> None:
        """Update the statistics; of the other ranks only at the end, since that takes messages."""
        self.stats.prefill_link = self._link_at_decode - self._link_at_start
        self.stats.decode_link = self.worker.link_stats - self._link_at_decode
        for level in self.levels.values():
            level.settle()
        self.stats.refresh_seconds = self.worker.settled_refreshes().seconds
        if run.finish is not None:
            now = zip(self.worker.rank_stats(), self._ranks_at_decode, strict=True)
            self.stats.ranks = [rank.since(earlier) for rank, earlier in now]

    def distribution(self, sampling: SamplingParams, num_prompt: int, end_tokens: Collection[int]) -> Distribution:
        """The distribution of one text after a prompt of `num_prompt` tokens. Raises UsageError."""
        return distribution_of(
            sampling,
            self.tokenizer,
            num_prompt=num_prompt,
            vocab_size=self.worker.vocab_size,
            end_tokens=end_tokens,
            suppressed=self.worker.target.config.suppressed,
            device=self.worker.memory.device,
        )

    def _make_speculator(
        self, sampling: SamplingParams, distribution: Distribution, *, speculation: bool, keeps_logits: bool = False
    ) -> Speculator:
        """The request's speculator; without speculation it drafts no tokens, and the levels below are not used."""
        levels = self.levels if speculation else {"target": self.levels["target"]}
        return build_speculator(
            self.plan if speculation else replace(self.plan, composition=PLAIN),
            levels,
            sampling,
            distribution,
            device=self.worker.memory.device,
            prepare_copies=self.worker.prepare_copies,
            block=self.levels["target"].block,
            keeps_logits=keeps_logits,
        )
