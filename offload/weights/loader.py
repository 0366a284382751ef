"""The loader of a model's weights: from a checkpoint to their places on device and host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offload.config.matrices import Matrix
from offload.config.model import ModelConfig
from offload.config.vectors import NGRAM_TAPS
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import ExpertHomes
from offload.kernels.norms import NormWeights, dtype_of
from offload.kernels.rope import ScoringWeights
from offload.plan.placement import TableTier
from offload.plan.shards import ALONE, Shard
from offload.plan.sizing import NUM_STAGING
from offload.transfer.disk import Disk
from offload.transfer.link import Link
from offload.transfer.memory import Memory, Tier
from offload.weights.checkpoint import Checkpoint
from offload.weights.embedding import Embedding
from offload.weights.experts import in_prefill, load_experts
from offload.weights.fp16 import check_range
from offload.weights.homes import AsTheyAre, Home, HomeMaker
from offload.weights.layer_inputs import LayerInputWeights
from offload.weights.layers import Layers, ResidentLayers, StreamedLayers
from offload.weights.layout import ROTATED, LayerLayout, LayerWeights, scoring_weights
from offload.weights.linear import Linear
from offload.weights.prefill_experts import PrefillExperts
from offload.weights.streamed_experts import StreamedExperts
from offload.weights.streams import StreamWeights
from offload.weights.tables import Shards, Table, TableFile, load_table
from offload.weights.tensors import head_order, sources

TABLES, ROWS = "n-gram tables", "n-gram rows"  # purposes
_CHECKED_ROWS = 1 << 10  # of a layer table that are checked at once


def load_layer(
    checkpoint: Checkpoint, whole: ModelConfig, layout: LayerLayout, index: int, buffer: Tensor, shard: Shard = ALONE
) -> None:
    """Read a shard of one layer of the model `whole` directly into `buffer`, which is zeroed."""
    block, own = whole.blocks[index], whole.layer(index)
    pending = {name: sources(own, shard, f"{name}.weight") for name in own.layer_matrices()}
    factors = {name: list(each) for name, each in block.factors}
    for name, view in layout.views.items():
        target, row, operator = view.of(buffer), 0, name.partition(".")[0]
        is_matrix = operator in pending and not name.endswith(".bias")
        parts = pending[operator] if is_matrix else sources(own, shard, name)
        if name in layout.norms and parts and parts[0].columns is not None:  # one row per head
            target = target.unflatten(0, (-1, len(parts[0].columns)))
        elif name in ("taps", NGRAM_TAPS):
            target = target.T
        while parts and row < len(target):
            source = parts.pop(0)
            rows = target[row : row + source.height]
            into = rows.T if source.transposed else rows
            read = checkpoint.read_stored if name in layout.stored else checkpoint.read_into
            read(whole.layer_name(index) + source.name, into, rows=source.rows, columns=source.columns)
            if is_matrix and operator in factors:
                rows *= _factor(factors[operator].pop(0), name, layout)
            if source.rotates and (order := head_order(block.attention, source.head_dim)) is not None:
                _order_heads(rows.flatten() if name in layout.norms else rows, order)
            row += source.height
        norm = layout.norms.get(name)
        if norm is not None and norm.weightless:
            target.fill_(1)
        elif norm is not None and norm.plus_one and not name.endswith(".bias"):
            target += 1
        elif name == "decay":
            _as_rates(target, whole.names.recurrence.decays)


def _as_rates(stored: Tensor, how: str) -> None:
    """Turn decays as they are stored, see `RecurrenceNames`, into -exp(A_log), in place."""
    if how == "logs":
        stored.exp_()
    if how != "rates":
        stored.neg_()


def _factor(factor: float, view: str, layout: LayerLayout) -> float:
    """The factor of a part of a matrix. Raises ModelError if the matrix is stored in blocks."""
    if view in layout.stored:
        raise ModelError(
            f"the model multiplies its matrices by factors (one is {factor:g}), which matrices in blocks cannot take; "
            "fetch it in 16 bits, or as a GGUF file, which has them multiplied already"
        )
    return factor


def _order_heads(rows: Tensor, order: Tensor) -> None:
    """Reorder the rows of queries and keys, or of their norms' weights, to this program's order within a head, in
    place."""
    heads = rows.view(-1, len(order), *rows.shape[1:])
    heads.copy_(heads[:, order])


@dataclass(frozen=True)
class Weights:
    """The weights of a model, or of a shard. final_norm: the norm of the last hidden rows, or the mean of their
    streams. head: [V, hidden], the
    embedding's table itself if tied, None on a rank that computes no logits. scoring: of each layer that attends; ()
    if none has any. experts: of each layer; () if no layer has any. inputs: of layers; None if they have none.
    ngrams: the tables of layers with n-grams."""

    embedding: Embedding
    layers: Layers
    final_norm: NormWeights | StreamWeights
    head: Linear | None
    scoring: tuple[ScoringWeights, ...] = ()
    experts: tuple[ExpertHomes | None, ...] = ()
    inputs: LayerInputWeights | None = None
    ngrams: Mapping[int, Table] = field(default_factory=dict)

    @property
    def norm(self) -> NormWeights:
        """The norm of the last hidden rows of a model without streams."""
        assert isinstance(self.final_norm, NormWeights)
        return self.final_norm

    @property
    def streamed_experts(self) -> list[StreamedExperts]:
        """The experts that cross the link, in a pass or in a prefill."""
        many = [*map(in_prefill, self.experts)]
        parts = (part for each in many if isinstance(each, PrefillExperts) for part in each.parts)
        every = {id(each): each for each in (*self.experts, *many, *parts)}
        return [each for each in every.values() if isinstance(each, StreamedExperts)]


class _Loader:
    """Loads weights to their places; parameters as those of `load_weights`. layouts: of the shard's layers. scoring: of
    each layer that attends and was loaded."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        memory: Memory,
        dtype: torch.dtype,
        name: str,
        on_bytes: Callable[[int], None],
        shard: Shard,
    ) -> None:
        self._checkpoint, self._config, self._memory, self._dtype = checkpoint, config, memory, dtype
        self._name, self._on_bytes, self._shard = name, on_bytes, shard
        self._own = shard.config(config)
        self.layouts = LayerLayout.of_layers(self._own, dtype)
        self.scoring: list[ScoringWeights] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], tier: Tier = "device", kind: torch.dtype | None = None
    ) -> Tensor:
        """A tensor of the checkpoint. kind: its dtype, by default that of the model."""
        block = self._memory.allocate(shape, kind or self._dtype, tier=tier, purpose=f"{self._name} embeddings")
        self._checkpoint.read_into(name, block)
        check_range(block, name, self._dtype)
        self._on_bytes(block.nbytes)
        return block

    def table(self, name: str, table: Matrix, tier: TableTier = "device") -> Tensor | StoredMatrix:
        """The table of embeddings or the head, plain or as it is stored."""
        if not table.encoding:
            assert tier != "file"
            return self.tensor(name, (table.outputs, table.inputs), tier)
        kind = ENCODINGS[table.encoding]
        if tier == "file":
            rows = self._checkpoint.mapped_rows(name)
        else:
            rows = self._block(tier, f"{self._name} embeddings", table.nbytes(0))
            rows = rows[: table.outputs * kind.row_bytes(table.inputs)].view(table.outputs, -1)
            self._checkpoint.read_stored(name, rows)
        check_range(StoredMatrix(rows, kind), name, self._dtype)
        self._on_bytes(rows.nbytes)
        return StoredMatrix(rows, kind)

    def inputs(self) -> LayerInputWeights | None:
        """The weights of the inputs of layers, with the table in its file."""
        names, own = self._config.names, self._config.layer_table
        if own is None:
            return None
        mapped = self._checkpoint.mapped_rows(names.layer_table)
        table = StoredMatrix(mapped, ENCODINGS[own.encoding]) if own.encoding else mapped
        for piece in mapped.split(_CHECKED_ROWS) if isinstance(table, Tensor) and self._dtype == torch.float16 else ():
            check_range(piece.to(self._dtype), names.layer_table, self._dtype)
        if isinstance(table, StoredMatrix):
            check_range(table, names.layer_table, self._dtype)
        projection = self.table(names.layer_projection, self._config.of_layer_table[names.layer_projection])
        weight = self.tensor(names.layer_norm, (own.size,), kind=dtype_of(own.norm, self._dtype))
        norm = NormWeights(own.norm, weight)
        return LayerInputWeights(own, table, Linear(projection, None), norm, self._memory.device, self._dtype)

    def last_mean(self) -> StreamWeights:
        """The mean of the streams of the last hidden rows."""
        assert self._config.streams is not None
        down, up = (Linear(self.table(*each), None) for each in self._config.of_last_mean.items())
        return StreamWeights(self._config.streams, self.norm(), down, up)

    def last(self) -> NormWeights | StreamWeights:
        """The norm of the last hidden rows, or the mean of their streams, which the head reads."""
        return self.norm() if self._config.streams is None else self.last_mean()

    def ngrams(self, tier: TableTier, num_rows: int, readers: Disk | None) -> dict[int, Table]:
        """The tables of n-grams, by layer. ModelError where the checkpoint's own integers hash otherwise."""
        found = dict[int, Table]()
        for layer in self._config.with_ngrams:
            self._check_hashes(layer)
            names, own = self._config.ngram_parts(layer), self._config.ngrams(layer)
            if tier == "file":
                assert readers is not None
                inside, device = Shards.of(self._checkpoint, names), self._memory.device
                held = self._memory.allocate((num_rows, inside.row_bytes), torch.uint8, tier="host", purpose=ROWS)
                found[layer] = TableFile(inside, readers, held, dtype=self._dtype, device=device)
            else:
                more: dict[str, Any] = {"tier": tier, "dtype": self._dtype, "purpose": TABLES}
                found[layer] = load_table(self._checkpoint, names, Matrix(*own.table), self._memory, **more)
                self._on_bytes(Matrix(*own.table).nbytes(self._dtype.itemsize))
        return found

    def _check_hashes(self, layer: int) -> None:
        """Raises ModelError for other integers that hash n-grams than those that follow from the fields."""
        names = self._config.names.ngrams.hashes
        for name, wanted in zip(names, self._config.ngrams(layer).hashes, strict=True):
            whole = self._config.layer_name(layer) + name
            if whole in self._checkpoint.names() and self._checkpoint.integers(whole).tolist() != [*wanted]:
                raise ModelError(
                    f"{self._checkpoint.folder}: {whole} has other integers than follow from seed and sizes in "
                    "config.json; fetch both files of one version"
                )

    def norm(self) -> NormWeights:
        """The norm of the last hidden rows."""
        norm, (name, size) = self._config.norm, self._config.last_norm
        row = (size,)
        kind = dtype_of(norm, self._dtype)
        weight = self.tensor(f"{name}.weight", row, kind=kind)
        if norm.plus_one:
            weight += 1
        return NormWeights(norm, weight, self.tensor(f"{name}.bias", row, kind=kind) if norm.bias else None)

    def resident(self, count: int) -> list[LayerWeights]:
        """The first `count` layers, on the device."""
        return [self.layouts[index].bind(self._placed(index, "device")) for index in range(count)]

    def streamed(
        self, resident: Sequence[LayerWeights], link: Link, num_staging: int, link_bits: int
    ) -> StreamedLayers:
        """All layers: the resident ones, and the others on the host, from where they cross in `link_bits` bits."""
        others = range(len(resident), len(self.layouts))
        whole = max(layout.num_bytes for layout in self.layouts)
        coded, opened = list[LayerWeights](), None
        if link_bits == 16:
            homes: list[Home] = [AsTheyAre(self._placed(index, "host")) for index in others]
        else:
            homes, coded = self._packed(others, link_bits)
            opened = self._block("device", "weight staging", whole)
        largest = max((len(home.content) for home in homes), default=whole)
        staging = [self._block("device", "weight staging", largest) for _ in range(num_staging)]
        return StreamedLayers(resident, homes, self.layouts, staging, link, opened=opened, coded=coded)

    def _packed(self, others: Sequence[int], link_bits: int) -> tuple[list[Home], list[LayerWeights]]:
        """The homes of layers in fewer bits, and the layers' quantised copies. Each layer is read into memory that the
        next one of its layout takes over."""
        maker = HomeMaker(self._memory, link_bits)
        used = {id(self.layouts[index]): self.layouts[index] for index in others}
        scratch = {key: torch.zeros(layout.num_bytes, dtype=torch.uint8) for key, layout in used.items()}

        def home(index: int) -> Home:
            layout = self.layouts[index]
            return maker.make(self._read(index, scratch[id(layout)]), layout, self._own.layer(index))

        return [home(index) for index in others], maker.coded

    def _placed(self, index: int, tier: Tier) -> Tensor:
        return self._read(index, self._block(tier, f"{self._name} layers", self.layouts[index].num_bytes))

    def _read(self, index: int, buffer: Tensor) -> Tensor:
        """Read a layer, checked, and return `buffer`."""
        layout = self.layouts[index]
        load_layer(self._checkpoint, self._config, layout, index, buffer, self._shard)
        for name, view in layout.views.items():
            kind, held = layout.stored.get(name), view.of(buffer)
            check_range(StoredMatrix(held, ENCODINGS[kind]) if kind else held, f"layer {index}", self._dtype)
        if (block := self._config.blocks[index]).attends:
            self.scoring.append(scoring_weights(block.attention, layout, buffer, self._memory.device))
            for norm in ROTATED if block.attention.weighs_rotated else ():
                layout.views[norm].of(buffer).fill_(1)
        self._on_bytes(buffer.nbytes)
        return buffer

    def _block(self, tier: Tier, purpose: str, num_bytes: int) -> Tensor:
        return self._memory.allocate((num_bytes,), torch.uint8, tier=tier, purpose=purpose)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    memory: Memory,
    *,
    dtype: torch.dtype,
    name: str = "target",
    link: Link | None = None,
    num_resident: int = 0,
    num_staging: int = NUM_STAGING,
    link_bits: int = 16,
    expert_slots: int = 0,
    cpu_experts: int = 0,
    shares_experts: bool = False,
    expert_places: int = 0,
    staged_experts: int = 0,
    prefill_bytes: int = 0,
    disk: Disk | None = None,
    table: TableTier = "device",
    ngram_table: TableTier = "host",
    ngram_rows: int = 0,
    readers: Disk | None = None,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    shard: Shard = ALONE,
) -> Weights:
    """Load the weights of a checked checkpoint, or a shard of them: all on the device, or, with a link, the first
    `num_resident` layers on the device and the others on the host, from where they cross in `link_bits` bits a weight.
    Experts are on the device, or on the host with `expert_slots` slots of each layer on the device, if that is not 0;
    those of `cpu_experts` layers are run by the CPU, or with `shares_experts` some of those that are in no slot. With a
    disk, only `expert_places` of each layer are in memory; it reads the others from the checkpoint's files as they are
    wanted.
    staged_experts, prefill_bytes: see `Placement`.
    The embedding's table is where `table` says; in the file, it is read by rows and takes no memory. Tables of n-grams
    are where `ngram_table` says; in the file, `readers` reads rows as they are chosen, and `ngram_rows` of each are
    kept. The ledger lists them under `name`. Only rank 0 has the head.

    `on_bytes` is called with each layer's bytes as it is loaded. Peak memory: the placed weights, one tensor's mapping,
    a copy of a layer's queries and keys if heads are reordered, and with fewer than 16 bits two layers of each layout
    on the host. Raises ModelError, DoesNotFit; UsageError if kernels are missing.
    """

    loader = _Loader(checkpoint, config, memory, dtype, name, on_bytes, shard)
    resident = loader.resident(config.num_layers if link is None else num_resident)
    layers: Layers
    if len(resident) == config.num_layers:
        layers = ResidentLayers(resident, sum(layout.num_bytes for layout in loader.layouts))
    else:
        assert link is not None
        layers = loader.streamed(resident, link, num_staging, link_bits)
    experts = load_experts(
        checkpoint,
        config,
        memory,
        dtype=dtype,
        name=name,
        link=link,
        slots=expert_slots,
        on_cpu=cpu_experts,
        shared=shares_experts,
        places=expert_places,
        staged=staged_experts,
        prefill_bytes=prefill_bytes,
        disk=disk,
        on_bytes=on_bytes,
        shard=shard,
    )
    names = config.names
    rows = loader.table(names.embeddings, config.table, table)
    head = None
    if shard.rank == 0:
        head = Linear(rows if config.tie_embeddings else loader.table(names.head, config.head), None)
    ngrams = loader.ngrams(ngram_table, ngram_rows, readers)
    embedding, scoring = Embedding(rows, memory.device, dtype), tuple(loader.scoring)
    return Weights(embedding, layers, loader.last(), head, scoring, experts, loader.inputs(), ngrams)
