"""The roof: builds everything from a `Plan`, owns lifetimes, generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from offload.cache.full import FullCache
from offload.cache.retrieval import RetrievalCache
from offload.cache.selection import Selection
from offload.cache.streaming import StreamingCache
from offload.cache.tiles import TileShape
from offload.decode import generation
from offload.decode.generation import FinishReason
from offload.decode.lookahead import Lookahead
from offload.decode.lookup import LookupProposer
from offload.decode.pace import Pace
from offload.decode.sampling import SamplingParams, SeededSource, warp
from offload.decode.speculation import ModelProposer, Proposer, Speculator
from offload.decode.tokenizer import Detokenizer, StopStrings, Tokenizer
from offload.errors import DoesNotFit, ModelError, UsageError
from offload.kernels.rope import RopeTable, rope_table
from offload.kernels.rows import Blocks, Shapes, equal_blocks
from offload.metrics import LinkStats, Stats
from offload.model.decoder import Decoder
from offload.model.level import Level, StreamingLevel, prefill
from offload.model.loading import load_decoder
from offload.plan.config import ModelConfig
from offload.plan.hardware import probe
from offload.plan.planner import Options, Plan, make_plan
from offload.plan.sizing import CPU_BLOCKS, MAX_ROWS
from offload.transfer.link import Link, make_link
from offload.transfer.memory import Memory

MAX_REACH = 32  # tokens: dilation reaches as far as blocks usually go
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Progress:
    """How far a long stage is."""

    stage: Literal["load", "prefill"]
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
    target = ModelConfig.from_folder(model)
    return make_plan(
        target,
        ModelConfig.from_folder(draft) if draft is not None and options.speculation else None,
        options,
        probe(options.device),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
    )


class Engine:
    """Models, caches and a link for one plan. A context manager: `close` ends the link's threads.

    `levels` by name and the `retrieval` cache are there to be looked at, and for benchmarks that drive them.
    """

    def __init__(
        self,
        plan: Plan,
        target: Decoder,
        draft: Decoder | None,
        tokenizer: Tokenizer,
        memory: Memory,
        link: Link | None,
    ) -> None:
        self.plan, self.tokenizer, self.memory, self.stats = plan, tokenizer, memory, Stats()
        self._target, self._link = target, link
        self._load_seconds = 0.0
        self._link_at_start = self._link_at_decode = LinkStats()
        self._prefilled: list[int] = []  # the tokens of the last prefill
        self._lookahead: Lookahead
        width = min(len(tokenizer), target.config.vocab_size)
        if draft is not None and draft.config.vocab_size < width:
            raise ModelError(f"the draft scores {draft.config.vocab_size} tokens, the target {width}; --draft none")
        self._width = width
        slack = plan.gamma + plan.draft_gamma + 2 * plan.rows
        blocks = _equal_blocks(plan, target.config)
        self._full = self._make_full_cache(slack, blocks)
        self.retrieval: RetrievalCache | None = None
        self.levels = {"target": Level("target", target, self._full, vocab_size=width, blocks=blocks, link=link)}
        if "retrieval" in plan.levels:
            selection = Selection(
                rule="published" if plan.selection == "published" else "mass", reach=min(plan.gamma, MAX_REACH)
            )
            self.retrieval = RetrievalCache(
                memory, self._full, budget=plan.budget, chunk=plan.chunk, selection=selection
            )
            self.levels["retrieval"] = Level("retrieval", target, self.retrieval, vocab_size=width, link=link)
        if "draft" in plan.levels and draft is not None:
            cache = self._make_draft_cache(draft, slack)
            self.levels["draft"] = StreamingLevel("draft", draft, cache, vocab_size=width)

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
        try:
            decoders = _load_decoders(folders, plan, memory, link, on_progress)
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
        on_progress: OnProgress = _ignore,
    ) -> Iterator[Step]:
        """Yield text as it is accepted. After the last step the caches hold the prompt and the kept tokens, no more.

        A stop string ends the text before it; tokens after the one that completes it are dropped, inside an accepted
        run too. Stopping early (closing the iterator, Ctrl-C) leaves the caches consistent.
        """
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if len(prompt) + max_tokens > self.plan.capacity:
            raise DoesNotFit(
                f"{len(prompt)} prompt tokens and {max_tokens} new ones are more than the planned {self.plan.capacity}"
            )
        speculator = self._make_speculator(sampling)
        self._start(prompt, speculator)
        kept, end_tokens = len(prompt), self._end_tokens()
        detokenizer, stops = Detokenizer(self.tokenizer, prompt), StopStrings(stop)
        runs = generation.generate(
            prompt,
            speculator,
            prefill=lambda tokens: self._prefill(tokens, on_progress),
            num_pending=self.plan.rows,
            max_tokens=max_tokens,
            end_tokens=end_tokens,
            stats=self.stats,
        )
        try:
            for run in runs:
                step = _show(run, detokenizer, stops, end_tokens)
                self.stats.output_tokens -= len(run.tokens) - len(step.tokens)
                kept += len(step.tokens)
                self._measure_link()
                yield step
                if step.finish is not None:
                    return
        finally:
            speculator.truncate(kept)

    def take_prompt(self, other: Engine) -> None:
        """Hold the prefill that `other` holds, of the same model and capacity, instead of running it again."""
        other._full.truncate(len(other._prefilled))
        self._full.copy_from(other._full)
        self._prefilled = list(other._prefilled)

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

    def _start(self, prompt: Sequence[int], speculator: Speculator) -> None:
        """Fresh counters, and caches empty but for the last request's prefill, where it is this one's too."""
        prefilled = list(prompt[: max(len(prompt) - self.plan.rows, 0)])
        if prefilled != self._prefilled:
            self._prefilled = []
        speculator.truncate(len(self._prefilled))
        self._full.keeps_mass = True
        self.stats = Stats(prompt_tokens=len(prompt), load_seconds=self._load_seconds)
        for level in self.levels.values():
            level.stats = type(level.stats)(level.stats.name)
        self.stats.levels = [level.stats for level in self.levels.values()]
        self._link_at_start = self._link_at_decode = self._link.stats if self._link else LinkStats()

    def _prefill(self, tokens: Sequence[int], on_progress: OnProgress) -> None:
        """Into the full cache; the levels below see what they need of it later. The same prompt again costs nothing."""
        if len(tokens) == self._full.length:
            return
        self._prefilled = []

        def report(num_tokens: int) -> None:
            on_progress(Progress("prefill", num_tokens, len(tokens), "tokens"))

        prefill(self._target, self._full, tokens, walk=self.plan.walk, on_tokens=report)
        self._prefilled = list(tokens)
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
        """The levels of the plan, stacked: each verifies what those below propose."""
        random = SeededSource(sampling.seed)

        def law(logits: torch.Tensor) -> torch.Tensor:
            return warp(logits, sampling)

        def lookups() -> list[Proposer]:
            return [LookupProposer(self._width, self.memory.device)] if self.plan.lookup else []

        levels, pace = self.levels, Pace(self.plan, measured=self._measures(sampling))
        below: list[Proposer] = [ModelProposer(levels["draft"], law, random)] if "draft" in levels else []
        if "retrieval" in levels:
            ahead = pace.retrieval([*lookups(), *below])
            below = [Speculator(levels["retrieval"], [*lookups(), *below], lookahead=ahead, warp=law, random=random)]
        proposers = [*lookups(), *below]
        self._lookahead = pace.target(proposers)
        return Speculator(
            levels["target"], proposers, lookahead=self._lookahead, warp=law, random=random, on_verified=self._prepare
        )

    def _measures(self, sampling: SamplingParams) -> bool:
        """Whether lengths follow the clock: not where a seed is to give the same text again."""
        if self.plan.pace == "auto":
            return sampling.seed is None or sampling.temperature == 0.0
        return self.plan.pace == "measured"

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

    def _make_full_cache(self, slack: int, blocks: Blocks) -> FullCache:
        plan, config = self.plan, self._target.config
        shape = TileShape(
            config.num_kv_heads,
            config.head_dim,
            plan.page_tokens,
            plan.tile_tokens // plan.page_tokens,
            DTYPES[plan.dtype],
        )
        return FullCache(
            self.memory,
            shape,
            num_layers=config.num_layers,
            rope=self._rope(config, slack),
            blocks=blocks,
            link=self._link if "kv" in plan.offload else None,
            num_resident=plan.resident_tiles,
            mass_chunk=plan.chunk if "retrieval" in plan.levels and plan.selection == "mass" else None,
            prefill=plan.prefill,
        )

    def _make_draft_cache(self, draft: Decoder, slack: int) -> StreamingCache:
        config = draft.config
        return StreamingCache(
            self.memory,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=DTYPES[self.plan.dtype],
            rope=self._rope(config, slack),
            sinks=self.plan.sinks,
            window=self.plan.window,
            slack=slack,
        )

    def _rope(self, config: ModelConfig, slack: int) -> RopeTable:
        capacity = self.plan.capacity
        table = rope_table(config, capacity + slack, capacity, self.plan.device)
        return table.to(DTYPES[self.plan.dtype])


def _equal_blocks(plan: Plan, config: ModelConfig) -> Blocks:
    """The block sizes that a pass may use. A GPU's blocks are all alike: fewer rows would not be faster there."""
    if plan.device != "cpu":
        return Blocks((plan.rows,))
    shapes = Shapes(
        (*config.layer_products(), (config.vocab_size, config.hidden_size, False)),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        plan.tile_tokens // plan.page_tokens,
        plan.page_tokens,
    )
    return equal_blocks(shapes, plan.rows, CPU_BLOCKS, DTYPES[plan.dtype], torch.get_num_threads())


def _load_decoders(
    folders: dict[str, Path], plan: Plan, memory: Memory, link: Link | None, on_progress: OnProgress
) -> dict[str, Decoder]:
    """One decoder per folder; the target's layers stay on the host where the plan offloads weights."""
    dtype = DTYPES[plan.dtype]
    configs = {name: ModelConfig.from_folder(folder) for name, folder in folders.items()}
    total = sum(config.weight_bytes(dtype.itemsize) for config in configs.values())
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        on_progress(Progress("load", done, total, "bytes"))

    def load(name: str) -> Decoder:
        streamed = link if name == "target" and "weights" in plan.offload else None
        return load_decoder(
            folders[name], configs[name], memory, dtype=dtype, name=name, link=streamed,
            num_resident=plan.resident_layers, on_bytes=count,
        )  # fmt: skip

    return {name: load(name) for name in folders}


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
