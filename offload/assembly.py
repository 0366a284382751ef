"""What an engine is made of, as a plan wants it: decoders with their weights, caches, block sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from offload.cache.full import FullCache
from offload.cache.retrieval import RetrievalCache
from offload.cache.selection import Selection
from offload.cache.streaming import StreamingCache
from offload.cache.tiles import TileShape
from offload.kernels.rope import RopeTable, rope_table
from offload.kernels.rows import Blocks, Shapes, equal_blocks, fast_blocks
from offload.model.decoder import Decoder
from offload.model.loading import load_decoder
from offload.plan.config import ModelConfig
from offload.plan.planner import Plan
from offload.plan.sizing import CPU_BLOCKS, MAX_ROWS
from offload.transfer.link import Link
from offload.transfer.memory import Memory

MAX_REACH = 32  # tokens: dilation reaches as far as blocks usually go
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_decoders(
    folders: dict[str, Path], plan: Plan, memory: Memory, link: Link | None, on_bytes: Callable[[int, int], None]
) -> dict[str, Decoder]:
    """One decoder per folder; the target's layers stay on the host where the plan offloads weights.

    `on_bytes(done, total)` hears how much was read. Raises ModelError.
    """
    dtype = DTYPES[plan.dtype]
    configs = {name: ModelConfig.from_folder(folder) for name, folder in folders.items()}
    total = sum(config.weight_bytes(dtype.itemsize) for config in configs.values())
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        on_bytes(done, total)

    def load(name: str) -> Decoder:
        streamed = link if name == "target" and "weights" in plan.offload else None
        return load_decoder(
            folders[name], configs[name], memory, dtype=dtype, name=name, link=streamed,
            num_resident=plan.resident_layers, on_bytes=count,
        )  # fmt: skip

    return {name: load(name) for name in folders}


def full_cache(plan: Plan, config: ModelConfig, memory: Memory, link: Link | None, blocks: Blocks) -> FullCache:
    shape = TileShape(
        config.num_kv_heads, config.head_dim, plan.page_tokens, plan.tile_tokens // plan.page_tokens, DTYPES[plan.dtype]
    )
    return FullCache(
        memory,
        shape,
        num_layers=config.num_layers,
        rope=rope(plan, config),
        blocks=blocks,
        link=link if "kv" in plan.offload else None,
        num_resident=plan.resident_tiles,
        mass_chunk=plan.chunk if "retrieval" in plan.levels and plan.selection == "mass" else None,
        prefill=plan.prefill,
    )


def retrieval_cache(plan: Plan, memory: Memory, full: FullCache) -> RetrievalCache:
    rule = Selection(rule="published" if plan.selection == "published" else "mass", reach=min(plan.gamma, MAX_REACH))
    return RetrievalCache(memory, full, budget=plan.budget, chunk=plan.chunk, selection=rule)


def streaming_cache(plan: Plan, config: ModelConfig, memory: Memory) -> StreamingCache:
    return StreamingCache(
        memory,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=DTYPES[plan.dtype],
        rope=rope(plan, config),
        sinks=plan.sinks,
        window=plan.window,
        slack=plan.gamma + plan.draft_gamma + 2 * plan.rows,
    )


def block_sizes(plan: Plan, config: ModelConfig) -> Blocks:
    """The block sizes that a pass may use. A GPU's blocks are all alike: fewer rows would not be faster there.

    Other sizes never change what is computed, so they may be chosen by time.
    """
    if plan.device != "cpu":
        return Blocks((plan.rows,))
    shapes = Shapes(
        config.layer_products(),
        (config.vocab_size, config.hidden_size, False),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        plan.tile_tokens // plan.page_tokens,
        plan.page_tokens,
    )
    dtype, threads = DTYPES[plan.dtype], torch.get_num_threads()
    return fast_blocks(shapes, equal_blocks(shapes, CPU_BLOCKS, dtype, threads), dtype, threads)


def rope(plan: Plan, config: ModelConfig) -> RopeTable:
    """Of all positions that a pass may reach."""
    return rope_table(config, plan.capacity + MAX_ROWS, plan.capacity, plan.device).to(DTYPES[plan.dtype])
