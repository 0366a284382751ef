"""A worker of a model at its real size, on a GPU on paper and without its bytes. No tests in here.

Only shapes are computed, and Triton's programs are launched without being run: what is left is which kernels and copies
a pass issues, in which order, and where the host waits. One of two GPUs has a shard; the other is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.jit import JITFunction

from kit.fake_flash import check
from offload.config.matrices import OPERATORS
from offload.config.model import ModelConfig
from offload.formats.layout import PageShape
from offload.kernels import choice
from offload.kernels.gpu.flash import Flash
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.kv import fetch
from offload.kv.full import FullCache
from offload.kv.retrieval import RetrievalCache
from offload.model.decoder import Decoder
from offload.model.loading import DTYPES
from offload.pages import codec
from offload.pages.tiles import TileStore
from offload.plan.options import Options
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.plan.shards import ALONE, Shard
from offload.ranks.sums import Sums
from offload.speed.hardware import RTX_4090, Hardware
from offload.transfer.link import make_link
from offload.transfer.memory import Memory, sent
from offload.weights import embedding, loader
from offload.weights.checkpoint import Checkpoint
from offload.weights.homes import PACKING, BesideCodes, Home, HomeMaker, Packed
from offload.weights.layout import LayerLayout
from offload.weights.loader import load_weights
from offload.worker.models import LoadedModels, streamed_rows
from offload.worker.worker import Worker
from paper.gpu import ADDRESS, PaperGpu, on_paper
from paper.tensors import PaperTensor, launch, stored

NUM_PROMPT = 120_000  # tokens
GPU = Hardware("cuda:0", "a GPU on paper", 23 * 10**9, 256 * 10**9, True, RTX_4090)


def planned(target: ModelConfig, draft: ModelConfig, num_gpus: int, **bits: int) -> Plan:
    """bits: `weight_bits` and `kv_bits` with which the target proposes to itself, where not the fastest are wanted."""
    hardware, options = replace(GPU, num_devices=num_gpus), Options(**bits)  # type: ignore[arg-type]
    return Request(target, draft, options, hardware).plan(num_prompt_tokens=NUM_PROMPT, max_tokens=200)


class _Unread(Checkpoint):
    """Weights that nobody will look at."""

    def __init__(self) -> None: ...

    def read_into(self, name: str, dst: Tensor, *, rows: range | None = None, columns: range | None = None) -> None: ...


@contextmanager
def worker_without_bytes(
    plan: Plan, target: ModelConfig, draft: ModelConfig, *, with_flash: bool = False
) -> Iterator[tuple[Worker, PaperGpu]]:
    """The worker of the first GPU, with a cache that holds the prompt. with_flash: flash-attn is installed."""
    with on_paper(without_values=True) as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "gpu_kernels", lambda device: GPU_KERNELS)
        patch.setattr(JITFunction, "run", lambda program, *args, **more: _launched(gpu, program, *args, **more))
        for reader in (fetch, embedding):
            patch.setattr(reader, "kernels_read_host", lambda device: True)
        patch.setattr(codec, "pack", lambda addresses, *_, to: torch.ones(len(addresses), dtype=torch.long))
        patch.setattr(codec, "split_off_pages", lambda parts, shape, *_, most: _nine_bits(parts, shape))
        for name in ("unpack", "restore_pages", "move"):
            patch.setattr(codec, name, lambda *_: None)
        patch.setattr(loader, "HomeMaker", _HomeMaker)
        patch.setattr(TileStore, "address", lambda store, layer, index: _address(store.home(layer, index)))
        patch.setattr(dist, "all_gather", partial(_gathered, gpu))
        if with_flash:
            found = Flash("on paper", call=partial(_flash_attended, gpu))
            patch.setattr(choice, "flash", lambda device: found)
        parts = _parts(plan, {"target": target, "draft": draft})
        worker = Worker(plan, parts, vocab_size=target.vocab_size)
        _hold_prompt(worker.full)
        _fill(worker.retrieval)
        try:
            yield worker, gpu
        finally:
            worker.release()
            worker.close()


def _parts(plan: Plan, models: dict[str, ModelConfig]) -> LoadedModels:
    """As `load_decoders` places them."""
    placement, num_gpus = plan.placement, plan.request.num_devices
    memory = Memory(torch.device(plan.request.device))
    link = make_link(memory.device) if placement.offload else None
    decoders = {}
    for name in ("target", "draft") if plan.composition.draft else ("target",):
        is_shard = name == "target" and num_gpus > 1
        shard = Shard(0, num_gpus) if is_shard else ALONE
        weights = load_weights(
            _Unread(),
            models[name],
            memory,
            dtype=DTYPES[plan.request.dtype],
            name=name,
            link=link if name == "target" and "weights" in placement.offload else None,
            num_resident=placement.resident_layers,
            link_bits=placement.weight_link_bits if name == "target" else 16,
            table=placement.table if name == "target" else "device",
            shard=shard,
        )
        sums = Sums(0, num_gpus, memory.device, check=lambda: None, go=lambda: None) if is_shard else None
        decoders[name] = Decoder(shard.config(models[name]), weights, sums, GPU_KERNELS)
    rows = streamed_rows(plan, decoders["target"].config, memory, link)
    return LoadedModels(decoders, memory, link, rows=rows)


class _HomeMaker(HomeMaker):
    """Homes of the bytes that are planned, and no more in them than in the layers."""

    def make(self, layer: Tensor, layout: LayerLayout, config: ModelConfig) -> Home:
        content, coded_layout = self._block(self._planned(layout, config)), self._coded_layout(config)
        if coded_layout is None:
            numbers = layout.end_of_matrices // 2
            starts = torch.zeros(numbers // PACKING.numbers + 1, dtype=torch.long)
            return Packed(content, sent(starts, self._memory.device), self._device)
        coded = torch.zeros(coded_layout.num_bytes, dtype=torch.uint8)
        self.coded.append(coded_layout.bind(self._on_device(coded)))
        places, end = [], 0
        for name in (each for each in OPERATORS if f"{each}.weight" in layout.views):
            start, end = end, end + layout.views[f"{name}.weight"].nbytes // 2
            places.append((slice(start, end), end - start))
        return BesideCodes(content, tuple(places), self.coded[-1], layout, self._device)


def _hold_prompt(full: FullCache) -> None:
    """With pages that were packed before there were codes."""
    full.restored(NUM_PROMPT)
    if full.pages.packed is not None:
        numbers, table = range(NUM_PROMPT // full.shape.page_tokens), full.pages.packed.table
        full.pages.packed._without = {page: None for number in numbers for page in table.streaming(number)}


def _nine_bits(parts: Tensor, shape: PageShape) -> Tensor:
    return torch.full((len(parts),), shape.numbers // 8 * 9 // 16 * 16)


def _fill(retrieval: RetrievalCache | None) -> None:
    """As after a refresh."""
    if retrieval is not None:
        full = retrieval.full
        size = (full.num_layers, full.shape.num_kv_heads, retrieval.budget // retrieval.chunk)
        retrieval.chunks = torch.zeros(size, dtype=torch.long, device=full.device)
        retrieval._tail_start = NUM_PROMPT // retrieval.chunk * retrieval.chunk
        retrieval._exact = retrieval.length = NUM_PROMPT


def _launched(gpu: PaperGpu, program: Any, *args: object, **more: object) -> None:
    """A Triton program goes to the current stream. It writes what its source stores to."""
    given = dict(zip(program.arg_names, args, strict=False)) | more
    tensors = {name: each for name, each in given.items() if isinstance(each, PaperTensor)}
    launch(
        gpu, program.__name__, [*tensors.values()], {id(tensors[name]) for name in stored(program.fn) & tensors.keys()}
    )


def _gathered(gpu: PaperGpu, parts: Sequence[Tensor], part: Tensor) -> None:
    """Every GPU's part, over NCCL's own links."""
    tensors = [cast(PaperTensor, each) for each in (*parts, part)]
    launch(gpu, "all_gather", tensors, {id(each) for each in parts})


def _flash_attended(gpu: PaperGpu, q: Tensor, k_cache: Tensor, v_cache: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    tables = more["cache_seqlens"], more["block_table"]
    check(q, k_cache, v_cache, *tables)
    out = torch.empty_like(q)
    lse = torch.empty((1, q.shape[2], q.shape[1]), device=q.device)
    tensors = [cast(PaperTensor, each) for each in (q, k_cache, v_cache, *tables, out, lse)]
    launch(gpu, "flash_attn_with_kvcache", tensors, {id(out), id(lse)})
    return out, lse


def _address(home: Tensor) -> int:
    """No read by the host, as others of addresses: only a GPU's kernel is told them. Tensors on paper have none."""
    return 0 if isinstance(home, PaperTensor) else ADDRESS(home)
