"""Loaded models, with their memory and their link, which outlive a worker's plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from offload.config.model import ModelConfig
from offload.config.reading import draft_config, read_config
from offload.errors import ModelError
from offload.formats.layout import home_bytes
from offload.interrupts import poll
from offload.kernels.choice import gpu_kernels
from offload.kernels.cpu import of_model
from offload.model.decoder import Decoder
from offload.model.graphs import GraphPool
from offload.model.loading import DTYPES, load_decoders
from offload.model.quantised import QuantisedWeights, quantised_weights
from offload.model.sums import Sums
from offload.pages.tiles import TileShape, TileStore, tile_tokens
from offload.plan.planner import Plan
from offload.plan.shards import ALONE, Shard
from offload.plan.sizing import MAX_ROWS
from offload.progress import OnProgress, Progress, Stage
from offload.transfer.device import sum_in_fp32, use_device
from offload.transfer.disk import Disk
from offload.transfer.hidden_rows import StreamedRows
from offload.transfer.link import Link, make_link
from offload.transfer.memory import Memory
from offload.weights.layout import LayerLayout
from offload.weights.tables import NUM_READERS


@dataclass(frozen=True)
class LoadedModels:
    """The loaded models with the memory they are in, the link that streamed weights cross and the disk that experts are
    read from; they outlive a plan.
    readers: the threads that read rows of tables of n-grams.
    decoders: by name, "target" and, if there is one, "draft". rows: a prefill's hidden rows on the host, where the
    cache streams. graphs: memory of the levels' graphs."""

    decoders: Mapping[str, Decoder]
    memory: Memory
    link: Link | None
    disk: Disk | None = None
    readers: Disk | None = None
    rows: StreamedRows | None = None
    graphs: GraphPool = field(default_factory=GraphPool)
    _quantised: dict[int, QuantisedWeights] = field(default_factory=dict)  # copies of the target's, by number of bits
    _users: Counter[int] = field(default_factory=Counter)  # number of users of each copy, by number of bits

    @classmethod
    def load(
        cls,
        plan: Plan,
        folders: Mapping[str, Path],
        on_progress: OnProgress,
        *,
        shard: Shard = ALONE,
        sums: Sums | None = None,
    ) -> LoadedModels:
        """Load the models in `folders`, of "target" a shard, to their places in the plan. Meanwhile host memory is
        pinned for them, for hidden rows and for the cache's tiles; an error in pinning is raised at its first use.

        Raises ModelError, DoesNotFit. After an error all memory is released."""
        memory = Memory(torch.device(plan.request.device))
        use_device(memory.device)
        sum_in_fp32(memory.device)
        link = make_link(memory.device, plan.placement.link_bytes_per_second) if plan.placement.offload else None
        disk = Disk() if plan.placement.expert_places else None
        readers = Disk(num_threads=NUM_READERS) if plan.placement.ngram_rows else None
        try:
            memory.pin_ahead(_host_blocks(plan, *_models(folders, shard), memory))
            on_read, on_pinned = (_stage(name, on_progress) for name in ("load", "pin"))
            decoders = load_decoders(
                folders, plan, memory, link, disk, on_read, readers=readers, shard=shard, sums=sums
            )  # fmt: skip
            memory.wait_pinned(on_pinned)
            rows = streamed_rows(plan, decoders["target"].config, memory, link)
            return cls(decoders, memory, link, disk, readers, rows)
        except BaseException:
            memory.close()
            for each in (readers, disk, link):
                if each is not None:
                    each.close()
            raise

    @property
    def target(self) -> Decoder:
        return self.decoders["target"]

    def coded_target(self, bits: int) -> Decoder:
        """The target over a copy of its weights in `bits` bits. The copy is made at the first call and kept until each
        call was matched by a release. Raises UsageError, DoesNotFit."""
        if bits not in self._quantised:
            config, device = self.target.config, self.memory.device
            on_cpu = device.type == "cpu"
            kernels = of_model(device, config) if on_cpu else gpu_kernels(device)
            self._quantised[bits] = quantised_weights(self.target.weights, config, bits, self.memory, kernels)
        self._users[bits] += 1
        return self.target.over(self._quantised[bits].weights)

    def release_quantised_target(self, bits: int) -> None:
        """Give up one use of the copy in `bits` bits; the last one frees its memory."""
        self._users[bits] -= 1
        if not self._users[bits]:
            self._quantised.pop(bits).release(self.memory)

    def num_scored(self, num_tokens: int) -> int:
        """The function `num_scored` for the target. Raises ModelError where a draft scores fewer tokens."""
        width = num_scored(self.target.config, num_tokens)
        draft = self.decoders["draft"].config if "draft" in self.decoders else None
        if draft is not None and not draft.reads_hidden and (fewer := draft.vocab_size) < width:
            raise ModelError(f"the draft scores {fewer} tokens, the target {width}; --draft none")
        return width

    def close(self) -> None:
        """End the threads of the link and the disk."""
        for each in (self.readers, self.disk, self.link):
            if each is not None:
                each.close()


def num_scored(config: ModelConfig, num_tokens: int) -> int:
    """The number of a model's logits that stand for tokens: models may pad their vocabulary. num_tokens: one more than
    the highest id of the tokenizer; ids that end a text count too."""
    return min(max(num_tokens, *(1 + end for end in config.eos_token_ids), 0), config.vocab_size)


def tile_shape(plan: Plan, config: ModelConfig) -> TileShape:
    """The shape of the full cache's tiles. config: of the target, or of a shard of it."""
    page, dtype = plan.placement.page_tokens, DTYPES[plan.request.dtype]
    return TileShape(config.num_kv_heads, config.kv_dim, page, tile_tokens(plan, config) // page, dtype)


def window_shape(plan: Plan, config: ModelConfig) -> TileShape:
    """The shape of the window cache's pages, each of which is a tile."""
    kv_heads, head_dim = config.kv_shapes[config.windowed[0]]
    return replace(tile_shape(plan, config), num_pages=1, num_kv_heads=kv_heads, head_dim=head_dim)


def streamed_rows(plan: Plan, config: ModelConfig, memory: Memory, link: Link | None) -> StreamedRows | None:
    """The hidden rows on the host for all sequences' prefills, where the target's cache streams. Raises DoesNotFit."""
    if link is None or "kv" not in plan.placement.offload:
        return None
    return StreamedRows(
        memory,
        link,
        num_rows=plan.request.capacity,
        hidden_size=config.row_size,
        dtype=DTYPES[plan.request.dtype],
        block=plan.placement.prefill_block,
        together=plan.placement.expert_rows,
        num_layers=config.num_layers,
    )


def _models(folders: Mapping[str, Path], shard: Shard) -> tuple[ModelConfig, ModelConfig | None]:
    """The shard of the target, and its draft."""
    draft = draft_config(folders["draft"], folders["target"]) if "draft" in folders else None
    return shard.config(read_config(folders["target"])), draft


def _host_blocks(plan: Plan, config: ModelConfig, draft: ModelConfig | None, memory: Memory) -> list[int]:
    """The sizes in bytes of the plan's allocations on the host, in their order: each layer, the experts of each, the
    embedding's table, the experts of a next-token head, the hidden rows, then each block of the full cache."""
    placement, blocks = plan.placement, list[int]()
    itemsize = DTYPES[plan.request.dtype].itemsize
    if "weights" in placement.offload:
        layouts = LayerLayout.of_layers(config, DTYPES[plan.request.dtype])
        for index in range(placement.resident_layers, config.num_layers):
            elements = config.layer(index).layer_matrix_elements()
            blocks.append(home_bytes(layouts[index].num_bytes, elements, placement.weight_link_bits))
    if placement.expert_slots:
        each = (placement.experts_held(kind, itemsize) for kind in map(config.layer, range(config.num_layers)))
        blocks += filter(None, each)
    if placement.table == "host":
        blocks.append(config.vocab_size * config.hidden_size * itemsize)
    if not placement.ngram_rows:
        blocks += [table.nbytes(itemsize) for table in config.ngram_tables()]
    if placement.expert_slots and draft is not None and draft.is_head:
        blocks += filter(None, [placement.experts_held(draft, itemsize)])
    if "kv" in placement.offload:
        blocks.append(plan.request.capacity * config.row_size * itemsize)
        shape, num_tokens = tile_shape(plan, config), plan.request.capacity + MAX_ROWS
        tiles, packs = placement.resident_tiles, placement.link_bits < 16
        store = TileStore(memory, shape, len(config.growing), tiles, packs=packs, most_tokens=num_tokens)
        if placement.raw_pages:
            blocks += [placement.raw_pages * shape.nbytes // shape.num_pages] * plan.request.num_sequences
        for index in range(shape.count(num_tokens)):
            away = [layer for layer in range(len(config.growing)) if store.place(layer, index) != "device"]
            blocks += [store.home_bytes(layer, index) for layer in away] * plan.request.num_sequences
    return blocks


def _stage(stage: Stage, on_progress: OnProgress) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        poll()
        on_progress(Progress(stage, done, total, "bytes"))

    return report
