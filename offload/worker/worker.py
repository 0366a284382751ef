"""A worker: what one rank owns, made from a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from offload.cache import Cache
from offload.cache.ahead import AheadCache
from offload.cache.full import FullCache
from offload.cache.quantised import QuantisedCache
from offload.cache.retrieval import RetrievalCache
from offload.cache.selection import ByMass
from offload.cache.streaming import StreamingCache
from offload.errors import DoesNotFit, UsageError
from offload.kernels import gpu
from offload.kernels.gpu.flash import PAGE_STEP, FlashTiles, flash
from offload.kernels.native import FEW_ROWS, Kernels, fitting
from offload.kernels.rope import RopeTable, rope_table
from offload.kernels.rows import Blocks, Shapes, equal_blocks, fast_blocks
from offload.metrics import HostStats, LinkStats, RankStats
from offload.model.decoder import Decoder
from offload.model.level import Level, StreamingLevel, prefill
from offload.model.loading import DTYPES
from offload.plan.config import ModelConfig
from offload.plan.planner import Plan
from offload.plan.sizing import CPU_BLOCKS, MAX_ROWS, tail_tokens
from offload.progress import OnProgress
from offload.session.page import PagedRows
from offload.transfer.arena import Arena
from offload.transfer.hidden_rows import HiddenRows, ResidentRows
from offload.transfer.link import Link
from offload.transfer.memory import Memory
from offload.transfer.pace import HostReads
from offload.worker.models import LoadedModels, tile_shape

MAX_REACH = 32  # tokens: dilation reaches as far as blocks usually go


class Worker:
    """Models, levels with their caches, link and memory of one rank.

    Whatever changes the caches is asked for with tokens and lengths alone: `prefill`, `forward` and `truncate` of the
    `levels` (by name: "target", "self" or "retrieval", "draft"), `record_mass`, `refresh`, `prepare_copies`,
    `fetch_ahead`, `copy_rows`. `full` is the target's cache.
    """

    def __init__(self, plan: Plan, models: LoadedModels, *, vocab_size: int, blocks: Blocks | None = None) -> None:
        """Allocate the plan's caches, empty. vocab_size: the width of all logits. blocks: sizes that all ranks compute
        alike; None: those that this machine does.

        Raises DoesNotFit, with the context that there is memory for. On an error nothing stays allocated.
        """
        self.plan, self.models, self.vocab_size = plan, models, vocab_size
        self._blocks = blocks or fast_sizes(plan, models.target.config, equal_sizes(plan, models.target.config))
        self.levels: dict[str, Level] = {}
        self.retrieval: RetrievalCache | None = None
        self._copies: RetrievalCache | QuantisedCache | None = None  # see `Composition.keeps_copies`
        self._caches: list[Arena | FullCache | RetrievalCache | QuantisedCache | StreamingCache] = []
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
        """Read the models in `folders` ("target", "draft") to where the plan wants them. num_tokens: in the tokenizer's
        vocabulary. on_progress: stages "load" and "pin". Raises ModelError, DoesNotFit."""
        models = LoadedModels.load(plan, folders, on_progress)
        try:
            return cls(plan, models, vocab_size=models.num_scored(num_tokens))
        except BaseException:
            models.close()
            raise

    def replanned(self, plan: Plan) -> Worker:
        """A worker for `plan` with the same models, while this one keeps its caches. Only where neither plan offloads:
        weights stay where they are. Raises DoesNotFit."""
        if plan.placement.offload or self.plan.placement.offload:
            raise ValueError("an engine that offloads is made for one plan")
        return self._another(plan)

    def beside(self) -> Worker:
        """A worker of the same plan, for another sequence: with caches of its own, over the same models. Raises
        DoesNotFit."""
        return Worker(self.plan, self.models, vocab_size=self.vocab_size, blocks=self._blocks)

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
    def rows(self) -> PagedRows:
        """The target's cached rows, which a session saves and fills."""
        return self.full

    @property
    def link_stats(self) -> LinkStats:
        """Totals since the worker was loaded; zeros where there is no link."""
        return self.link.stats if self.link is not None else LinkStats()

    @property
    def host_stats(self) -> HostStats:
        """Totals of the target's cache since it was made."""
        return self.full.host_reads.stats

    def rank_stats(self) -> list[RankStats]:
        """Totals of each rank since the worker was loaded; none where there is one rank."""
        return []

    def prefill(self, tokens: Sequence[int], on_tokens: Callable[[int], None]) -> None:
        """Append `tokens` to the full cache, and to a quantised copy; the other levels below see what they need of
        them later. Broken off, it appends nothing. `on_tokens` is called with how many are done."""
        prefill(self.target, self.full, tokens, rows=self._hidden_rows, on_tokens=on_tokens)
        if isinstance(self._copies, QuantisedCache):
            self._copies.refresh()

    def record_mass(self, wanted: bool) -> None:
        """From the target's next pass on, record the masses that chunks are chosen by, or no longer."""
        self.full.record_mass = wanted

    def refresh(self, num_rows: int) -> None:
        """Have the copies of the full cache's tokens over which the target proposes to itself, if there are any, follow
        its last pass, of which the first `num_rows` rows count: by them chunks are chosen."""
        if self._copies is not None:
            self._copies.refresh(num_rows)

    def prepare_copies(self, num_rows: int, *, wanted: bool) -> bool:
        """The same where it is wanted and possible, see `RetrievalCache.prepare`. False where there are none."""
        return self._copies is not None and self._copies.prepare(num_rows, wanted=wanted)

    def fetch_ahead(self) -> None:
        """Start to fetch the tiles that the target's next pass needs first."""
        self.full.fetch_ahead()

    def copy_rows(self, other: Worker, num_tokens: int | None = None) -> bool:
        """Hold the rows that the full cache of `other` holds, of the same model, or the first `num_tokens` of them.
        False, and nothing is copied, where positions are rotated otherwise (RoPE scaling "dynamic" in a context of
        another size)."""
        if not self.full.rope.starts_like(other.full.rope):
            return False
        self.full.copy_from(other.full, num_tokens)
        return True

    def release(self) -> None:
        """Give the memory of the caches back, and that of quantised weights if nobody else uses them; they are not
        used again."""
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
        size, dtype = self.target.config.hidden_size, DTYPES[plan.request.dtype]
        resident = ResidentRows(arena, size, dtype, block=plan.placement.prefill_block)
        self._hidden_rows: HiddenRows = self.models.rows or resident
        self.full = full_cache(plan, self.target.config, self.memory, self.link, self._blocks, arena)
        self._caches.append(self.full)
        self.levels["target"] = self._level("target", self.target, self.full, self._blocks)
        own = self._own_target()
        if plan.composition.inner == "retrieval":
            self.retrieval = _retrieval_cache(plan, self.target.config, self.full)
            self._copies = self.retrieval
            self._caches.append(self.retrieval)
            self.levels["retrieval"] = self._level("retrieval", own, self.retrieval, None)
        elif plan.composition.keeps_all_codes:
            quantised = _quantised_cache(plan, self.target.config, self.full, self.memory)
            self._copies = quantised
            self._caches.append(quantised)
            self.levels["self"] = self._level("self", own, quantised, None)
        elif plan.composition.inner == "self":
            self.levels["self"] = self._level("self", own, AheadCache(self.full), self._blocks)
        draft = self.models.decoders.get("draft")
        if "draft" in plan.composition.levels and draft is not None:
            streaming = _streaming_cache(plan, draft.config, self.memory)
            self._caches.append(streaming)
            self.levels["draft"] = StreamingLevel("draft", draft, streaming, vocab_size=self.vocab_size)

    def _own_target(self) -> Decoder:
        """That with which the target proposes to itself."""
        if (bits := self.plan.composition.weight_bits) == 16:
            return self.target
        coded = self.models.coded_target(bits)
        self._has_coded_target = True
        return coded

    def _level(self, name: str, decoder: Decoder, cache: Cache, blocks: Blocks | None) -> Level:
        """A level of the target, over one of its weights and caches. Where neither streams, what crosses the link
        meanwhile is for others."""
        link = self.link if cache is self.full or decoder.streams else None
        return Level(name, decoder, cache, vocab_size=self.vocab_size, blocks=blocks, link=link)

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
    """What a rank's worker did since it was loaded, and what it has allocated."""
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


def full_cache(
    plan: Plan, config: ModelConfig, memory: Memory, link: Link | None, blocks: Blocks, arena: Arena | None = None
) -> FullCache:
    """The cache of the plan's target, or of a shard of it."""
    composition, placement = plan.composition, plan.placement
    return FullCache(
        memory,
        tile_shape(plan, config),
        num_layers=config.num_layers,
        rope=rotary_table(plan, config),
        blocks=blocks,
        link=link if "kv" in placement.offload else None,
        num_resident=placement.resident_tiles,
        num_host=placement.host_tiles,
        num_staging=placement.staging_tiles,
        host_reads=_host_reads(plan, config),
        mass_chunk=composition.chunk if composition.budget else None,
        fused_prefill=placement.fused_prefill,
        flash=_flash_tiles(plan),
        kernels=_attention_kernels(plan, config),
        host_kernels=fitting(torch.device("cpu"), config.head_dim, ()),
        packs=_packs(plan, config),
        raw_pages=placement.raw_pages,
        arena=arena,
    )


def _packs(plan: Plan, config: ModelConfig) -> bool:
    """Whether pages cross the link packed. Raises UsageError where they should and the kernels do not run."""
    if plan.placement.link_bits == 16:
        return False
    for kernels in (fitting(torch.device("cpu"), config.head_dim, ()), _attention_kernels(plan, config)):
        if not kernels.usable:
            raise UsageError(
                f"pages that cross the link in {plan.placement.link_bits} bits need kernels, which do not run: "
                f"{kernels.reason}; add --link-bits 16"
            )
    return True


def _host_reads(plan: Plan, config: ModelConfig) -> HostReads:
    """Paced on a CPU alone: beside a GPU the CPU is what it is."""
    rate = plan.placement.host_bytes_per_second if plan.request.device == "cpu" else None
    return HostReads(rate, group=config.num_heads // config.num_kv_heads)


def _retrieval_cache(plan: Plan, config: ModelConfig, full: FullCache) -> RetrievalCache:
    found = plan.composition
    kernels = _attention_kernels(plan, config) if found.kv_bits == 16 else _coding_kernels(plan, config)
    return RetrievalCache(
        full,
        budget=found.budget,
        chunk=found.chunk,
        selector=ByMass(reach=min(found.gamma, MAX_REACH)),
        kernels=kernels,
        tail=tail_tokens(found),
        bits=found.kv_bits,
    )


def _quantised_cache(plan: Plan, config: ModelConfig, full: FullCache, memory: Memory) -> QuantisedCache:
    """Raises UsageError, see `_coding_kernels`; DoesNotFit."""
    return QuantisedCache(
        full,
        memory,
        num_tokens=plan.request.capacity,
        drafted=plan.composition.drafted,
        kernels=_coding_kernels(plan, config),
        beside=plan.placement.link_bits == 9,
    )


def _coding_kernels(plan: Plan, config: ModelConfig) -> Kernels | gpu.GpuKernels:
    """The device's, which alone attend to a cache in 4 bits. Raises UsageError where they do not run."""
    kernels = _attention_kernels(plan, config)
    if isinstance(kernels, gpu.GpuKernels):
        usable, whose = kernels.usable, "GPU"
    else:
        usable, whose = kernels.library is not None, "CPU"
    if not usable:
        raise UsageError(f"a cache in 4 bits needs the {whose}'s kernels, which do not run: {kernels.reason}")
    return kernels


def _streaming_cache(plan: Plan, config: ModelConfig, memory: Memory) -> StreamingCache:
    composition = plan.composition
    return StreamingCache(
        memory,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=DTYPES[plan.request.dtype],
        rope=rotary_table(plan, config),
        sinks=composition.sinks,
        window=composition.window,
        slack=composition.gamma + composition.draft_gamma + 2 * plan.placement.rows,
        kernels=_attention_kernels(plan, config),
    )


def equal_sizes(plan: Plan, config: ModelConfig) -> Blocks:
    """The sizes of blocks that a pass may have on this machine, whatever is fast. config: of this rank's shard. A GPU's
    blocks are all alike: fewer rows would not be faster there."""
    if plan.request.device != "cpu":
        return Blocks((plan.placement.rows,))
    if _kernels(plan, config).library is not None:
        return Blocks(tuple(range(1, FEW_ROWS + 1)))
    return equal_blocks(_shapes(plan, config), CPU_BLOCKS, DTYPES[plan.request.dtype], torch.get_num_threads())


def fast_sizes(plan: Plan, config: ModelConfig, blocks: Blocks) -> Blocks:
    """Those of `blocks` that are worth their while on this machine. Other sizes never change what is computed, so they
    may be chosen by time."""
    if plan.request.device != "cpu" or _kernels(plan, config).library is not None:
        return blocks
    return fast_blocks(_shapes(plan, config), blocks, DTYPES[plan.request.dtype], torch.get_num_threads())


def _attention_kernels(plan: Plan, config: ModelConfig) -> Kernels | gpu.GpuKernels:
    """Those of the plan's device, for attention of few rows."""
    device = torch.device(plan.request.device)
    return _kernels(plan, config) if device.type == "cpu" else gpu.fitting(device, config.head_dim)


def _flash_tiles(plan: Plan) -> FlashTiles | None:
    """For a prefill on a GPU that torch's fused kernel would serve, too."""
    found, placement = flash(torch.device(plan.request.device)), plan.placement
    if found.call is None or not placement.fused_prefill or placement.page_tokens % PAGE_STEP:
        return None
    return FlashTiles(found.call)


def _kernels(plan: Plan, config: ModelConfig) -> Kernels:
    """The CPU's kernels that the model's passes run on; none on a GPU."""
    return fitting(torch.device(plan.request.device), config.head_dim, config.layer_products())


def _shapes(plan: Plan, config: ModelConfig) -> Shapes:
    return Shapes(
        config.layer_products(),
        (config.vocab_size, config.hidden_size, False),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        plan.placement.tile_tokens // plan.placement.page_tokens,
        plan.placement.page_tokens,
    )


def rotary_table(plan: Plan, config: ModelConfig) -> RopeTable:
    """The table of all positions that a pass may reach."""
    request = plan.request
    return rope_table(config, request.capacity + MAX_ROWS, request.capacity, request.device).to(DTYPES[request.dtype])
