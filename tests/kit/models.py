"""Tiny random models of every family, and stacks of levels over them with explicit small sizes. No tests in here.

Ground truth is transformers' own model; the same weights, saved as safetensors, are read back by the code under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kit.processor import best
from offload.config.mixers import Recurring
from offload.config.model import ModelConfig
from offload.config.reading import draft_config, read_config
from offload.decode import generation
from offload.decode.lengths import Fixed
from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import ModelProposer, Proposer, Speculator
from offload.decode.warp import warp
from offload.engine.engine import Engine, load_tokenizer
from offload.engine.prefix import OpenStore
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.recurrence import RecurrenceWeights
from offload.kernels.rope import Scoring, scorings
from offload.kv import Cache
from offload.kv.block_index import BlockIndex
from offload.kv.checkpoints import Checkpoints
from offload.kv.chunk_store import QuantisedChunks, RetrievedRows, RetrievedStore
from offload.kv.fetch import Tail
from offload.kv.full import FullCache
from offload.kv.indexed import IndexedCache
from offload.kv.layer_states import LayerStates
from offload.kv.mixed import MixedCache
from offload.kv.recent_ids import RecentIds
from offload.kv.retrieval import RetrievalCache
from offload.kv.selection import ByMass
from offload.kv.states import StateCache
from offload.kv.streaming import StreamingCache
from offload.kv.window import WindowCache
from offload.metrics import LinkStats, Stats
from offload.model.decoder import Decoder
from offload.model.level import Level, StreamingLevel
from offload.model.passes import alone
from offload.pages.storage import Offload
from offload.pages.tiles import TileShape
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.plan.sizing import ring_pages
from offload.speed.curves import Curves
from offload.speed.hardware import Hardware
from offload.speed.split import LinkPace
from offload.transfer.arena import Arena
from offload.transfer.hidden_rows import ResidentRows
from offload.transfer.link import Done, Event, Link
from offload.transfer.memory import Memory
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.loader import load_weights

VOCABULARY = 96
TOKENIZER_SIZE = 258  # 256 bytes, bos, eos
BOS, EOS = 256, 257
GREEDY = SamplingParams(temperature=0.0)
CURVES = Curves(
    calls=(1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 7e-4),
    layer=(1e-5, 1e-5, 1e-5, 2e-5, 4e-5, 8e-5, 16e-5),
    vocabulary=(1e-9, 1e-9, 2e-9, 3e-9, 4e-9, 8e-9, 16e-9),
    weights={"": (4e-10, 4e-10, 4e-10, 8e-10, 16e-10, 32e-10, 64e-10)},
    cache=(6e-11, 6e-11, 12e-11, 18e-11, 24e-11, 48e-11, 96e-11),
    near_cache=(6e-11, 6e-11, 12e-11, 18e-11, 24e-11, 48e-11, 96e-11),
    coded_cache=None,
    mass_share=0.5,
    product=8e-12,
    pair=2e-12,
    kernels="a test's",
)
CPU = Hardware("cpu", "test CPU", 2**40, 2**40, True)

SMALL: dict[str, object] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
# Frequencies that depend on the capacity where it is over the 256 positions of SMALL; a context of 512.
DYNAMIC_ROPE: dict[str, object] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
# Name -> (config class, model class, fields that differ from SMALL).
FAMILIES: dict[str, tuple[type, type, dict[str, object]]] = {
    "llama-mha": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama-gqa": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
}


def random_model(family: str = "llama-gqa", *, seed: int = 0, **fields: object) -> PreTrainedModel:
    """transformers' model with random weights, norms and biases too, scaled so that attention and logits are peaked."""
    config_class, model_class, own = FAMILIES[family]
    model: PreTrainedModel = model_class(config_class(**{**SMALL, **own, **fields})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.2 * noise)
            elif name.endswith("bias") or "embed" in name:
                weight.copy_(0.3 * noise if name.endswith("bias") else noise)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name or "lm_head" in name else 1.0
                weight.copy_(gain * noise / weight.shape[1] ** 0.5)
    return model


def perturbed(model: PreTrainedModel, amount: float, *, seed: int = 1) -> PreTrainedModel:
    """The same model with noise of `amount` standard deviations on every weight: often right, not always."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=amount * float(weight.std()))
    return model


def save(model: PreTrainedModel, folder: Path, *, tokenizer: bool = False) -> Path:
    """Write `model` as a safetensors folder, with a byte-level tokenizer if wanted."""
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def save_pair(folder: Path, *, context: int) -> tuple[Path, Path]:
    """Write `folder`/target and `folder`/draft, which is often right, both with a token per byte."""
    fields = {"vocab_size": TOKENIZER_SIZE, "max_position_embeddings": context, "eos_token_id": None}
    return (
        save(random_model(**fields), folder / "target", tokenizer=True),
        save(perturbed(random_model(**fields), 0.1), folder / "draft", tokenizer=True),
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, then <s> and </s>."""
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = RawTokenizer(BPE(vocab=alphabet, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def load(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    link: Link | None = None,
    num_staging: int = 2,
    kernels: DeviceKernels = NONE,
    config: ModelConfig | None = None,
) -> Decoder:
    """A folder's model in our code: all resident, or, with a link, its layers streamed. config: None, the folder's."""
    config = config or read_config(folder)
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
        memory = Memory(torch.device("cpu"))
        weights = load_weights(checkpoint, config, memory, dtype=dtype, link=link, num_staging=num_staging)
    return Decoder(config, weights, kernels=kernels)


def kernels_of(decoder: Decoder) -> DeviceKernels:
    """Those that the decoder's few rows run on, which its caches should use too."""
    return decoder._kernels


def random_tokens(num_tokens: int, *, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (num_tokens,), generator=generator).tolist()


class _Late:
    """A copy that is carried out when somebody waits for it, after all earlier ones of its direction."""

    def __init__(self, lane: list[_Late], dst: Tensor, src: Tensor, after: Sequence[Event]) -> None:
        self._lane, self._dst, self._src, self._after, self._done = lane, dst, src, after, False
        lane.append(self)

    def wait(self) -> None:
        while not self._done:
            first = self._lane.pop(0)
            for event in first._after:
                event.wait()
            with torch.inference_mode():  # blocks that were allocated in it may be written in it only
                first._dst.copy_(first._src)
            first._done = True

    def synchronize(self) -> None:
        self.wait()


class LateLink:
    """The worst schedule that events allow, without a thread: copies of a late direction happen when waited for and no
    sooner, those of the other at once. Whoever forgets to wait reads old bytes, every time."""

    def __init__(self, *, late_in: bool, late_out: bool) -> None:
        self._late_in, self._late_out = late_in, late_out
        self._lanes: tuple[list[_Late], list[_Late]] = ([], [])
        self.stats = LinkStats()

    def to_device(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._submit(self._lanes[0], self._late_in, dst, src, after)

    def to_host(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._submit(self._lanes[1], self._late_out, dst, src, after)

    def record(self) -> Event:
        return Done()

    def pace(self, num_bytes: int) -> LinkPace:
        return LinkPace(0.0, 1e-3)

    def close(self) -> None: ...

    @property
    def num_coming(self) -> int:
        """Copies to the device that were asked for and not carried out yet."""
        return len(self._lanes[0])

    def _submit(self, lane: list[_Late], late: bool, dst: Tensor, src: Tensor, after: Sequence[Event]) -> Event:
        copy = _Late(lane, dst, src, after)
        if not late:
            copy.wait()
        return copy


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All sizes of a stack, in tokens; `gamma` 0 is plain decoding, `draft_gamma` 0 has no draft level."""

    gamma: int = 0
    draft_gamma: int = 0
    rows: int = 4
    prefill_block: int = 8
    expert_rows: int | None = None  # None: a block
    page: int = 8
    pages: int = 2
    num_resident: int = 0  # tiles of all layers together, only where there is a link
    kv_staging: int = 2
    budget: int = 16
    chunk: int = 4
    lookup: bool = False
    adaptive: bool = False
    sinks: int = 2
    window: int = 8
    capacity: int = 192
    block_slots: int = 24
    any_rows: bool = False  # passes have no padding: kernels give rows their bits among any others
    weight_bits: int = 16  # with fewer and a budget of 0 the target proposes to itself over its whole cache
    kv_bits: int = 16  # with fewer over that in as many bits

    @property
    def block(self) -> int:
        return 1 if self.any_rows else self.rows


def scorings_of(decoder: Decoder, capacity: int, slack: int = 64) -> Sequence[Scoring]:
    """Enough positions for padding and drafts beyond the capacity, in the weights' dtype."""
    dtype, own = decoder.weights.embedding.dtype, decoder.weights.scoring
    return scorings(decoder.config, capacity + slack, capacity, "cpu", dtype, weights=own)


def full_cache(
    decoder: Decoder,
    sizes: Sizes,
    *,
    link: Link | None = None,
    mass: bool = False,
    memory: Memory | None = None,
    packs: bool = False,
    raw_pages: int = 0,
) -> FullCache:
    config, dtype, memory = decoder.config, decoder.weights.embedding.dtype, memory or Memory(torch.device("cpu"))
    own, make = _of(config, config.readers(config.growing), scorings_of(decoder, sizes.capacity)), FullCache
    if (indexer := config.indexer) is not None:
        index = BlockIndex(memory, indexer, scorings=own, dtype=dtype, page_tokens=sizes.page)
        slots = sizes.block_slots if link is not None else 0
        make = partial(IndexedCache, index=index, block_slots=slots)  # type: ignore[assignment]
    return make(
        memory,
        TileShape(config.num_kv_heads, config.kv_dim, sizes.page, sizes.pages, dtype),
        num_layers=len(config.growing),
        reads=config.reads(config.growing),
        scorings=own,
        offload=link
        and Offload(
            link,
            num_resident=sizes.num_resident,
            num_staging=sizes.kv_staging,
            packs=best() if packs else None,
            raw_pages=raw_pages,
            by_blocks=config.indexer is not None,
        ),
        mass_chunk=sizes.chunk if mass else None,
        kernels=kernels_of(decoder),
    )


def target_cache(decoder: Decoder, sizes: Sizes, *, link: Link | None = None, undo: int = 24) -> Cache:
    """The full cache, beside the windows of a model that has some. undo: tokens that it may lose."""
    config = decoder.config
    full = full_cache(decoder, sizes, link=link)
    windows, states = None, None
    if config.windowed:
        windows = _windows(decoder, sizes, undo)
    if config.recurrence is not None:
        states = state_cache(decoder)
    kept: dict[str, Any] = {}
    if config.with_ngrams:
        own = config.ngrams(config.with_ngrams[0])
        weights = [each.ngrams.convolution for each in decoder.weights.layers if each.ngrams is not None]
        kept["convolved"] = state_cache(decoder, of=own.convolution, num_layers=len(weights), weights=weights)
        kept["ids"] = RecentIds(own.context, own.eos, kept["convolved"])
    return MixedCache(config, full, windows, states, drafts=False, **kept) if windows or states else full


def _windows(decoder: Decoder, sizes: Sizes, undo: int) -> WindowCache:
    config, dtype = decoder.config, decoder.weights.embedding.dtype
    return WindowCache(
        Memory(torch.device("cpu")),
        TileShape(*config.kv_shapes[config.windowed[0]], sizes.page, 1, dtype),
        num_pages=ring_pages(config.window, max(sizes.prefill_block, 16), page=sizes.page, undo=undo),
        windows=config.windows,
        reads=config.reads(config.windowed),
        scorings=_of(config, config.readers(config.windowed), scorings_of(decoder, sizes.capacity)),
        kernels=kernels_of(decoder),
    )


def state_cache(
    decoder: Decoder,
    *,
    rows: int = 16,
    most: int = 4,
    of: Recurring | None = None,
    num_layers: int = 0,
    weights: Sequence[RecurrenceWeights] = (),
) -> StateCache:
    """rows: inputs that are held. most: checkpoints. of, num_layers, weights: of the convolutions of n-grams."""
    config, dtype, memory = decoder.config, decoder.weights.embedding.dtype, Memory(torch.device("cpu"))
    own, count = of or config.recurrence, num_layers or len(config.stateful)
    assert own is not None
    layers = LayerStates(memory, own, num_layers=count, rows=rows, dtype=dtype, kernels=kernels_of(decoder))
    kept = Checkpoints(memory, own, num_layers=count, dtype=dtype, most=most)
    found = weights or [layer.recurrence for layer in decoder.weights.layers if layer.recurrence is not None]
    return StateCache(layers, kept, weights=lambda: found)


def _of(config: ModelConfig, layers: Sequence[int], scorings: Sequence[Scoring]) -> list[Scoring]:
    found = dict(zip(config.attending, scorings, strict=True))
    return [found[layer] for layer in layers]


def resident_rows(decoder: Decoder, block: int, together: int | None = None) -> ResidentRows:
    """Hidden rows of a prefill on the device, in memory of their own."""
    config, dtype = decoder.config, decoder.weights.embedding.dtype
    return ResidentRows(Arena(Memory(torch.device("cpu"))), config.row_size, dtype, block=block, together=together)


def streaming_cache(decoder: Decoder, sizes: Sizes) -> StreamingCache:
    config = decoder.config
    return StreamingCache(
        Memory(torch.device("cpu")),
        shapes=config.kv_shapes,
        sources=config.sources,
        dtype=decoder.weights.embedding.dtype,
        scorings=scorings_of(decoder, sizes.capacity),
        sinks=sizes.sinks,
        window=sizes.window,
        slack=sizes.gamma + sizes.draft_gamma + 2 * sizes.rows,
        kernels=kernels_of(decoder),
    )


def count_fetched(patch: pytest.MonkeyPatch) -> Counter[RetrievedStore]:
    """Gets, of each store, the chunks that it fetches from now on, of all layers and heads."""
    counts: Counter[RetrievedStore] = Counter()
    for kind in (RetrievedRows, QuantisedChunks):

        def counted(store: Any, tail: Tail, wanted: Tensor | None, fill: Callable[..., None] = kind.fill) -> None:
            fill(store, tail, wanted)
            counts[store] += 0 if wanted is None else int((wanted >= 0).sum())

        patch.setattr(kind, "fill", counted)
    return counts


def retrieval_cache(full: FullCache, sizes: Sizes, kernels: DeviceKernels = NONE) -> RetrievalCache:
    return RetrievalCache(
        full,
        budget=sizes.budget,
        chunk=sizes.chunk,
        selector=ByMass(reach=max(sizes.gamma, 1)),
        kernels=kernels,
    )


@dataclass
class Generated:
    """The tokens that a stack generated, and the target's logits [n, V] that each was drawn from."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    num_accepted: int = 0
    num_drafted: int = 0


class Stack:
    """Levels built by hand, so that every size can be chosen, and the loop of `generation` over them."""

    def __init__(
        self, target: Decoder, sizes: Sizes, *, draft: Decoder | None = None, link: Link | None = None
    ) -> None:
        self.sizes, self.target, self.draft = sizes, target, draft
        self.vocabulary = target.config.vocab_size
        self.full = full_cache(target, sizes, link=link, mass=sizes.gamma > 0)
        self.full_level = Level("target", target, self.full, vocab_size=self.vocabulary, block=sizes.block, link=link)
        self.retrieval = retrieval_cache(self.full, sizes, kernels_of(target)) if sizes.gamma else None
        self.streaming = streaming_cache(draft, sizes) if draft is not None and sizes.draft_gamma else None
        self.retrieval_level: Level | None = None

    def generate(self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> Generated:
        """Start afresh and emit `num_tokens` tokens."""
        said, seen = Generated(), list[Tensor]()
        speculator = self._speculator(sampling, seen)
        speculator.truncate(0)
        drafted = self.full_level.stats.drafted
        accepted = self.full_level.stats.accepted
        runs = generation.in_passes(
            prompt,
            speculator,
            prefill=lambda tokens: self.target.prefill(
                self.full, tokens, resident_rows(self.target, self.sizes.prefill_block)
            ),
            num_pending=self.sizes.rows,
            max_tokens=num_tokens,
            end_tokens=(),
            stats=Stats(),
        )
        for run in alone(runs):
            said.tokens += run.tokens
            said.logits.append(seen[-1][: len(run.tokens)])
        said.num_drafted = self.full_level.stats.drafted - drafted
        said.num_accepted = self.full_level.stats.accepted - accepted
        return said

    def _speculator(self, sampling: SamplingParams, seen: list[Tensor]) -> Speculator:
        random = SeededSource(sampling.seed)

        def distribution(logits: Tensor) -> Tensor:
            return warp(logits, sampling)

        def watched(logits: Tensor) -> Tensor:
            seen.append(logits)
            return warp(logits, sampling)

        proposers: list[Proposer] = []
        if self.retrieval is not None:
            retrieval = self.retrieval
            level = Level("retrieval", self.target, retrieval, vocab_size=self.vocabulary)
            self.retrieval_level = level
            if self.streaming is not None and self.draft is not None:
                drafts = StreamingLevel("draft", self.draft, self.streaming, vocab_size=self.vocabulary)
                proposers = [ModelProposer(drafts, distribution, random)]

            def prepare(num_rows: int, wanted: bool) -> float | None:
                return 0.0 if retrieval.prepare(num_rows, wanted=wanted) else None

            lengths = Fixed(self.sizes.draft_gamma)
            proposers = [
                Speculator(level, proposers, lengths=lengths, warp=distribution, random=random, prepare=prepare)
            ]
        return Speculator(self.full_level, proposers, lengths=Fixed(self.sizes.gamma), warp=watched, random=random)


def tiny_plan(
    target: Path,
    draft: Path | None,
    sizes: Sizes,
    *,
    num_prompt_tokens: int,
    max_tokens: int,
    dtype: str = "fp32",
    offload: frozenset[str] = frozenset(),
    num_sequences: int = 1,
) -> Plan:
    """The planner's plan with the sizes of `sizes` in it."""
    request = Request(
        read_config(target),
        draft_config(draft, target) if draft is not None else None,
        Options(
            dtype=dtype, offload=offload, gamma=sizes.gamma, draft_gamma=sizes.draft_gamma, chunk=sizes.chunk,
            sinks=sizes.sinks, window=sizes.window, device="cpu",
            speculation=sizes.gamma > 0, budget=(sizes.budget or None) if sizes.gamma else None, lookup=sizes.lookup,
            weight_bits=sizes.weight_bits if sizes.gamma else None, kv_bits=sizes.kv_bits if sizes.gamma else None,
        ),
        CPU,
    )  # fmt: skip
    plan = request.plan(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
    plan = request.together(plan, num_sequences, most=num_sequences)
    window = read_config(target).window
    return changed(
        plan, rows=sizes.rows, window_pages=window and ring_pages(window, 64, page=sizes.page, undo=64),
        prefill_block=sizes.prefill_block, expert_rows=sizes.expert_rows or sizes.prefill_block, page_tokens=sizes.page,
        tile_tokens=sizes.page * sizes.pages, staging_tiles=sizes.kv_staging,
        budget=sizes.budget if plan.composition.budget else 0,
        adaptive=("retrieval" if sizes.budget else "self", "target") if sizes.adaptive else (),
    )  # fmt: skip


def changed(plan: Plan, **values: object) -> Plan:
    """`plan` with other `values` in its parts, by the names of their fields."""
    for name, value in values.items():
        parts = (part for part in ("composition", "placement", "request") if name in vars(getattr(plan, part)))
        part = next(parts)
        plan = replace(plan, **{part: replace(getattr(plan, part), **{name: value})})  # type: ignore[arg-type]
    return plan


def tiny_engine(plan: Plan, target: Path, draft: Path | None = None, open_store: OpenStore | None = None) -> Engine:
    return Engine.load(plan, target, draft, load_tokenizer(target, draft), open_store=open_store)
