"""Loading of decoders from model folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from offload.config.next_token import own_bytes
from offload.config.reading import draft_config, read_config
from offload.kernels.choice import of_model
from offload.model.assistant import AssistantDecoder
from offload.model.decoder import Decoder
from offload.model.next_token import NextTokenDecoder
from offload.model.sums import Sums
from offload.plan.planner import Plan
from offload.plan.shards import ALONE, Shard
from offload.transfer.disk import Disk
from offload.transfer.link import Link
from offload.transfer.memory import Memory
from offload.weights.assistant import load_assistant
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.loader import load_weights
from offload.weights.next_token import load_next_token

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_decoders(
    folders: Mapping[str, Path],
    plan: Plan,
    memory: Memory,
    link: Link | None,
    disk: Disk | None,
    on_bytes: Callable[[int, int], None],
    *,
    readers: Disk | None = None,
    shard: Shard = ALONE,
    sums: Sums | None = None,
) -> dict[str, Decoder]:
    """Check each folder's checkpoint and load it: onto the device, except for the offloaded layers of "target". A draft
    in the target's folder is its next-token head, whose experts are where those of "target" are. disk: reads experts
    while the model runs, where not all of them are in memory. readers: read rows of tables of n-grams.

    shard, sums: this rank's shard of "target", and the sums over all ranks; other models are whole.
    `on_bytes(done, total)` is called as bytes are read. Raises ModelError.
    """
    dtype = DTYPES[plan.request.dtype]
    configs = {"target": read_config(folders["target"])}
    if "draft" in folders:
        configs["draft"] = draft_config(folders["draft"], folders["target"])
    shards = {name: shard if name == "target" else ALONE for name in folders}
    own = {name: shards[name].config(config) for name, config in configs.items()}
    total = sum(own_bytes(config, dtype.itemsize) for config in own.values())
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        on_bytes(done, total)

    decoders = dict[str, Decoder]()
    for name, folder in folders.items():
        with Checkpoint.open(folder) as checkpoint:
            if configs[name].is_head:
                loaded = load_next_token(
                    checkpoint,
                    configs[name],
                    memory,
                    dtype=dtype,
                    link=link,
                    expert_slots=plan.placement.expert_slots,
                    expert_places=plan.placement.expert_places,
                    disk=disk,
                    on_bytes=count,
                )
                found = of_model(memory.device, configs[name])
                decoders[name] = NextTokenDecoder(configs[name], loaded, decoders["target"].weights, found)
                continue
            check_model(checkpoint, configs[name])
            if configs[name].assistant:
                made = load_assistant(checkpoint, configs[name], memory, dtype=dtype, on_bytes=count)
                found = of_model(memory.device, configs[name])
                decoders[name] = AssistantDecoder(configs[name], made, decoders["target"], found)
                continue
            weights = load_weights(
                checkpoint,
                configs[name],
                memory,
                dtype=dtype,
                name=name,
                link=link if name == "target" and "weights" in plan.placement.offload else None,
                num_resident=plan.placement.resident_layers,
                link_bits=plan.placement.weight_link_bits if name == "target" else 16,
                expert_slots=plan.placement.expert_slots if name == "target" else 0,
                cpu_experts=plan.placement.cpu_experts if name == "target" else 0,
                shares_experts=plan.placement.shares_experts,
                expert_places=plan.placement.expert_places if name == "target" else 0,
                staged_experts=plan.placement.staged_experts,
                prefill_bytes=plan.placement.prefill_bytes,
                disk=disk if name == "target" else None,
                table=plan.placement.table if name == "target" else "device",
                ngram_table=plan.placement.ngram_table,
                ngram_rows=plan.placement.ngram_rows,
                readers=readers,
                on_bytes=count,
                shard=shards[name],
            )
        found = of_model(memory.device, own[name])
        decoders[name] = Decoder(own[name], weights, sums if name == "target" else None, found)
    return decoders
