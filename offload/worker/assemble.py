"""Assembly of a plan's caches, with the kernels and row blocks of its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from offload.config.mixers import Attention
from offload.config.model import ModelConfig
from offload.errors import UsageError
from offload.kernels import choice
from offload.kernels.cpu import CpuKernels, fitting, of_model
from offload.kernels.device import DeviceKernels
from offload.kernels.prefill import OperatorTiles, PrefillAttention
from offload.kernels.recurrence import RecurrenceWeights
from offload.kernels.rope import Scoring, ScoringWeights, scorings
from offload.kv.block_index import BlockIndex
from offload.kv.checkpoints import Checkpoints
from offload.kv.full import FullCache
from offload.kv.indexed import IndexedCache
from offload.kv.last_hidden import LastHidden
from offload.kv.layer_states import LayerStates
from offload.kv.quantised import QuantisedCache
from offload.kv.recent_ids import CONVOLVED, RecentIds
from offload.kv.retrieval import RetrievalCache
from offload.kv.selection import ByMass
from offload.kv.states import DraftStates, StateCache
from offload.kv.streaming import StreamingCache
from offload.kv.window import WindowCache
from offload.model.assistant import TargetKeys
from offload.model.decoder import Decoder
from offload.model.loading import DTYPES
from offload.pages.storage import Offload
from offload.pages.tiles import run_tokens
from offload.plan.planner import Plan
from offload.plan.sizing import BLOCK_ROWS, MAX_ROWS, tail_tokens
from offload.plan.states import held_rows
from offload.transfer.arena import Arena
from offload.transfer.link import Link
from offload.transfer.memory import Memory
from offload.worker.models import tile_shape, window_shape

OfLayers = Sequence[ScoringWeights]
MAX_REACH = 32  # tokens: the limit of a selection's dilation, about the usual length of a block


def full_cache(
    plan: Plan, config: ModelConfig, memory: Memory, link: Link | None, arena: Arena | None = None, *,
    scoring: OfLayers = (),
) -> FullCache:  # fmt: skip
    """The full cache of the plan's target, or of a shard of it. scoring: see `Weights`."""
    composition, placement = plan.composition, plan.placement
    shape, own = tile_shape(plan, config), list(scorings_of(plan, config, scoring))
    own = _of_layers(config, config.readers(config.growing), own)
    make: Callable[..., FullCache] = FullCache
    if (indexer := config.indexer) is not None:
        index = BlockIndex(memory, indexer, scorings=own, dtype=shape.dtype, page_tokens=shape.page_tokens)
        make = partial(IndexedCache, index=index, block_slots=placement.block_slots)
    return make(
        memory,
        shape,
        num_layers=len(config.growing),
        reads=config.reads(config.growing),
        scorings=own,
        offload=None if link is None or "kv" not in placement.offload else _offload(plan, config, link),
        mass_chunk=composition.mass_chunk,
        run_tokens=run_tokens(plan, config),
        prefill=_prefill_attention(plan, config),
        kernels=_attention_kernels(plan, config),
        arena=arena,
    )


def window_cache(plan: Plan, config: ModelConfig, memory: Memory, scoring: OfLayers) -> WindowCache | None:
    """The window cache of the target's layers that have a window, or of a shard's; None without such layers."""
    if not config.windowed:
        return None
    return WindowCache(
        memory,
        window_shape(plan, config),
        num_pages=plan.placement.window_pages,
        windows=config.windows,
        reads=config.reads(config.windowed),
        scorings=_of_layers(config, config.readers(config.windowed), scorings_of(plan, config, scoring)),
        prefill=_prefill_attention(plan, config, windows=True),
        kernels=_attention_kernels(plan, config, windows=True),
    )


def state_cache(plan: Plan, target: Decoder, memory: Memory) -> StateCache | None:
    """The states of the target's layers that have one, or of a shard's; None without such layers."""
    config = target.config
    if config.recurrence is None:
        return None

    def weights() -> Iterator[RecurrenceWeights]:
        return (layer.recurrence for layer in target.weights.layers if layer.recurrence is not None)

    dtype, most = DTYPES[plan.request.dtype], plan.placement.checkpoints
    kept = Checkpoints(memory, config.recurrence, num_layers=len(config.stateful), dtype=dtype, most=most)
    states = _layer_states(plan, config, memory)
    return StateCache(states, kept, weights=weights, block=plan.placement.prefill_block)


def ngram_caches(plan: Plan, target: Decoder, memory: Memory) -> tuple[StateCache, RecentIds] | None:
    """The caches of a sequence for the target's n-grams: the rows that their convolutions read, and ids; None without
    n-grams."""
    config, kept = target.config, plan.placement.checkpoints
    if not config.with_ngrams:
        return None
    own, dtype = config.ngrams(config.with_ngrams[0]), DTYPES[plan.request.dtype]

    def weights() -> Iterator[RecurrenceWeights]:
        return (layer.ngrams.convolution for layer in target.weights.layers if layer.ngrams is not None)

    sizes: dict[str, Any] = {"num_layers": len(config.with_ngrams), "dtype": dtype}
    rows, kernels = held_rows(plan.composition, plan.placement.rows), _attention_kernels(plan, config)
    layers = LayerStates(memory, own.convolution, rows=rows, kernels=kernels, **sizes)
    held = Checkpoints(memory, own.convolution, most=kept, **sizes)
    cache = StateCache(layers, held, weights=weights, block=plan.placement.prefill_block, name=CONVOLVED)
    return cache, RecentIds(own.context, own.eos, cache)


def draft_states(plan: Plan, config: ModelConfig, memory: Memory, exact: StateCache) -> DraftStates:
    """The states of the level where the target drafts for itself."""
    return DraftStates(_layer_states(plan, config, memory), exact)


def last_hidden(plan: Plan, draft: Decoder | None, memory: Memory) -> LastHidden | None:
    """The target's hidden rows that a next-token head or an assistant reads; None without one."""
    composition = plan.composition
    if draft is None or not draft.config.reads_hidden or not composition.draft:
        return None
    assistant = draft.config.assistant
    return LastHidden(
        memory,
        hidden_size=assistant.target_size if assistant else draft.config.row_size,
        dtype=DTYPES[plan.request.dtype],
        sinks=0 if assistant else composition.sinks,
        window=1 if assistant else composition.window,
        slack=_slack(plan) + composition.gamma,  # drafts follow a pass of as many rows, of which all may stay
    )


def _slack(plan: Plan) -> int:
    """Rows of a draft that may be rejected."""
    return plan.composition.gamma + plan.composition.draft_gamma + 2 * plan.placement.rows


def _layer_states(plan: Plan, config: ModelConfig, memory: Memory) -> LayerStates:
    assert config.recurrence is not None
    return LayerStates(
        memory,
        config.recurrence,
        num_layers=len(config.stateful),
        rows=held_rows(plan.composition, plan.placement.rows),
        dtype=DTYPES[plan.request.dtype],
        kernels=_attention_kernels(plan, config),
    )


def _of_layers(config: ModelConfig, layers: Sequence[int], scorings: Sequence[Scoring]) -> list[Scoring]:
    found = dict(zip(config.attending, scorings, strict=True))
    return [found[layer] for layer in layers]


def _offload(plan: Plan, config: ModelConfig, link: Link) -> Offload:
    placement = plan.placement
    return Offload(
        link,
        num_resident=placement.resident_tiles,
        num_staging=placement.staging_tiles,
        packs=_packs(plan, config),
        raw_pages=placement.raw_pages,
        by_blocks=config.indexer is not None,
    )


def _packs(plan: Plan, config: ModelConfig) -> CpuKernels | None:
    """The CPU's kernels, if the plan's pages cross the link packed; otherwise None. Raises UsageError where the plan
    packs pages and the kernels do not run."""
    if plan.placement.link_bits == 16:
        return None
    host, device = fitting(torch.device("cpu"), config.head_dim, ()), _attention_kernels(plan, config)
    if isinstance(host, CpuKernels) and device.usable:
        return host
    reason = device.reason if isinstance(host, CpuKernels) else host.reason
    raise UsageError(
        f"pages that cross the link in {plan.placement.link_bits} bits need kernels, which do not run: {reason}; add "
        "--link-bits 16"
    )


def retrieval_cache(plan: Plan, config: ModelConfig, full: FullCache) -> RetrievalCache:
    found = plan.composition
    return RetrievalCache(
        full,
        budget=found.budget,
        chunk=found.chunk,
        selector=ByMass(reach=min(found.gamma, MAX_REACH)),
        kernels=_attention_kernels(plan, config),
        tail=tail_tokens(found),
        bits=found.kv_bits,
    )


def quantised_cache(plan: Plan, config: ModelConfig, full: FullCache, memory: Memory) -> QuantisedCache:
    """The quantised cache over `full`. Raises DoesNotFit."""
    return QuantisedCache(
        full,
        memory,
        num_tokens=plan.request.capacity,
        drafted=plan.composition.drafted,
        kernels=_attention_kernels(plan, config),
        beside=plan.placement.link_bits == 9,
    )


def streaming_cache(plan: Plan, config: ModelConfig, memory: Memory, scoring: OfLayers) -> StreamingCache:
    composition = plan.composition
    return StreamingCache(
        memory,
        shapes=config.kv_shapes,
        sources=config.sources,
        dtype=DTYPES[plan.request.dtype],
        scorings=scorings_of(plan, config, scoring),
        sinks=composition.sinks,
        window=composition.window,
        slack=_slack(plan),
        kernels=_attention_kernels(plan, config),
    )


def target_keys(plan: Plan, config: ModelConfig, full: FullCache, windows: WindowCache | None) -> TargetKeys:
    """The target's caches as its assistant, of `config`, reads them."""
    return TargetKeys(config, full, windows, scorings_of(plan, config))


def block_rows(plan: Plan, config: ModelConfig) -> int:
    """The number of rows of a block; the target's passes run in whole blocks. 1 where the CPU's kernels run, with which
    a row's bits do not depend on other rows. config: of this rank's shard."""
    if plan.request.device != "cpu":
        return plan.placement.rows
    return 1 if of_model(torch.device("cpu"), config).usable else BLOCK_ROWS


def _attention_kernels(plan: Plan, config: ModelConfig, *, windows: bool = False) -> DeviceKernels:
    """The kernels of the plan's device for attention of few rows, in growing layers or in layers with a window. A CPU
    has kernels for all layers or for none."""
    device = torch.device(plan.request.device)
    if device.type == "cpu":
        return choice.of_model(device, config)
    return choice.of_attention(device, _attention(config, windows=windows), config.all_products)


def _prefill_attention(plan: Plan, config: ModelConfig, *, windows: bool = False) -> PrefillAttention:
    """The prefill attention of growing layers or of layers with a window."""
    device, placement = torch.device(plan.request.device), plan.placement
    attention = _attention(config, windows=windows)
    found = None
    if device.type != "cpu" and DTYPES[plan.request.dtype].itemsize == 2:
        found = choice.prefill_attention(device, attention, page=placement.page_tokens, windows=windows)
    return found or OperatorTiles(attention.num_kv_heads, placement.fused_prefill)


def _attention(config: ModelConfig, *, windows: bool) -> Attention:
    """The attention of growing layers or of layers with a window."""
    return config.blocks[config.windowed[0]].attention if windows else config.block.attention


def scorings_of(plan: Plan, config: ModelConfig, scoring: OfLayers = ()) -> tuple[Scoring, ...]:
    """The `Scoring` of each layer that attends, for all positions that a pass may reach. scoring: see `Weights`."""
    request, dtype = plan.request, DTYPES[plan.request.dtype]
    most = request.capacity + MAX_ROWS
    return scorings(config, most, request.capacity, request.device, dtype, weights=scoring)
