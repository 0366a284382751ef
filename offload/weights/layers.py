"""The layers of a model: resident on the device, or on the host and streamed over the link, one copy per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.config.matrices import OPERATORS, Matrix
from offload.config.model import ModelConfig
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import ExpertHomes
from offload.kernels.norms import NormWeights, dtype_of
from offload.kernels.rope import ScoringWeights
from offload.plan.shards import ALONE, Shard
from offload.plan.sizing import NUM_STAGING
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory, Tier
from offload.weights.checkpoint import Checkpoint
from offload.weights.embedding import Embedding
from offload.weights.experts import StreamedExperts, in_prefill, load_experts
from offload.weights.fp16 import check_range
from offload.weights.homes import AsTheyAre, BesideCodes, Home, HomeMaker
from offload.weights.layout import ROTATED, LayerLayout, LayerWeights, scoring_weights
from offload.weights.linear import Linear
from offload.weights.tensors import head_order, sources


def load_layer(
    checkpoint: Checkpoint, whole: ModelConfig, layout: LayerLayout, index: int, buffer: Tensor, shard: Shard = ALONE
) -> None:
    """Read a shard of one layer of the model `whole` directly into `buffer`, which is zeroed."""
    block, own = whole.blocks[index], whole.layer(index)
    order = head_order(block.attention) if block.attends else None
    pending = {name: sources(own, shard, f"{name}.weight") for name in OPERATORS}
    for name, view in layout.views.items():
        target, row, operator = view.of(buffer), 0, name.partition(".")[0]
        is_matrix = operator in OPERATORS and not name.endswith(".bias")
        parts = pending[operator] if is_matrix else sources(own, shard, name)
        if name in layout.norms and parts and parts[0].columns is not None:  # one row per head
            target = target.unflatten(0, (-1, len(parts[0].columns)))
        elif name == "taps":
            target = target.T
        while parts and row < len(target):
            source = parts.pop(0)
            rows = target[row : row + len(source.rows)]
            read = checkpoint.read_stored if name in layout.stored else checkpoint.read_into
            read(whole.layer_name(index) + source.name, rows, rows=source.rows, columns=source.columns)
            if order is not None and source.rotates:
                _order_heads(rows.flatten() if name in layout.norms else rows, order)
            row += len(source.rows)
        norm = layout.norms.get(name)
        if norm is not None and norm.weightless:
            target.fill_(1)
        elif norm is not None and norm.plus_one and not name.endswith(".bias"):
            target += 1
        elif name == "decay" and whole.names.delta.is_log:
            target.exp_().neg_()


def _order_heads(rows: Tensor, order: Tensor) -> None:
    """Reorder the rows of queries and keys, or of their norms' weights, to this program's order within a head, in
    place."""
    heads = rows.view(-1, len(order), *rows.shape[1:])
    heads.copy_(heads[:, order])


class Layers(Protocol):
    """The layers of a model, first to last; each is usable while it is the current one. coded: quantised copies, on the
    device, of the last layers, as far as the transfer of the exact ones needs them. num_wider: the number of streamed
    layers with more bits than planned, since some weight could not be restored from its code."""

    @property
    def coded(self) -> Sequence[LayerWeights]: ...

    @property
    def num_wider(self) -> int: ...

    def __iter__(self) -> Iterator[LayerWeights]: ...

    def nbytes(self) -> int: ...


class ResidentLayers:
    """Layers that are all on the device."""

    coded: Sequence[LayerWeights] = ()
    num_wider = 0

    def __init__(self, layers: Sequence[LayerWeights], nbytes: int) -> None:
        self._layers, self._nbytes = layers, nbytes

    def __iter__(self) -> Iterator[LayerWeights]:
        return iter(self._layers)

    def nbytes(self) -> int:
        return self._nbytes


class StreamedLayers:
    """Layers of which the first are on the device, and the rest on the host. A streamed layer crosses the link into one
    of a few staging slots, and is decoded from there into a further buffer unless its home is raw.

    Weights do not change, so the stream is cyclic: while the last layers are used, the first ones of the next pass are
    in flight.
    """

    def __init__(
        self,
        resident: Sequence[LayerWeights],
        homes: Sequence[Home],
        layouts: Sequence[LayerLayout],
        staging: Sequence[Tensor],
        link: Link,
        *,
        opened: Tensor | None = None,
        coded: Sequence[LayerWeights] = (),
    ) -> None:
        """layouts: of all layers; equal layouts are one object. staging: uint8, each as large as the largest home.
        opened: a flat buffer as large as the largest layer; None if all homes are raw."""
        self._resident, self._homes, self._staging, self._link = resident, homes, staging, link
        self._nbytes = sum(layout.num_bytes for layout in layouts)
        self._opened, self._layouts = opened, layouts[len(resident) :]
        places = staging if opened is None else [opened]
        self._bound = {
            (place, id(layout)): layout.bind(buffer[: layout.num_bytes])
            for place, buffer in enumerate(places)
            for layout in self._layouts
        }
        self._full: list[Event] = []
        self._held: list[int | None] = [None] * len(staging)  # by slot: the home whose content it has or receives
        self._position = 0  # number of streamed layers used since the stream began
        self.coded = coded
        self.num_wider = len(coded) - sum(isinstance(home, BesideCodes) for home in homes)

    def __iter__(self) -> Iterator[LayerWeights]:
        if self._homes and not self._in_order():
            self._restart()
        yield from self._resident
        for home, layout in zip(self._homes, self._layouts, strict=True):
            slot, layer = self._position % len(self._staging), self._position
            self._full[slot].wait()
            if self._opened is None:
                yield self._bound[slot, id(layout)]
            else:
                home.open(self._staging[slot][: len(home.content)], self._opened[: layout.num_bytes])
            self._fetch(layer + len(self._staging))
            self._position = layer + 1
            if self._opened is not None:
                yield self._bound[0, id(layout)]

    def nbytes(self) -> int:
        return self._nbytes

    def _in_order(self) -> bool:
        """Whether the first layers are in their expected slots, which is not so after an interrupted pass."""
        following = [(self._position + ahead) % len(self._staging) for ahead in range(len(self._staging))]
        first = [ahead % len(self._homes) for ahead in range(len(self._staging))]
        return self._position % len(self._homes) == 0 and [self._held[slot] for slot in following] == first

    def _restart(self) -> None:
        for event in self._full:
            event.wait()
        self._position, self._full = 0, [self._link.record()] * len(self._staging)
        for position in range(len(self._staging)):
            self._fetch(position)

    def _fetch(self, position: int) -> None:
        slot, number = position % len(self._staging), position % len(self._homes)
        content, self._held[slot] = self._homes[number].content, None
        buffer = self._staging[slot][: len(content)]
        self._full[slot] = self._link.to_device(buffer, content, (self._link.record(),))
        self._held[slot] = number


@dataclass(frozen=True)
class Weights:
    """The weights of a model, or of a shard. final_norm: the norm of the last hidden rows. head: [V, hidden], the
    embedding's table itself if tied, None on a rank that computes no logits. scoring: of each layer that attends; ()
    if none has any. experts: of each layer; () if no layer has any."""

    embedding: Embedding
    layers: Layers
    final_norm: NormWeights
    head: Linear | None
    scoring: tuple[ScoringWeights, ...] = ()
    experts: tuple[ExpertHomes | None, ...] = ()

    @property
    def streamed_experts(self) -> list[StreamedExperts]:
        """The experts that cross the link, those that do so in a prefill only among them."""
        return [each for each in map(in_prefill, self.experts) if isinstance(each, StreamedExperts)]


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
    embeds_on_host: bool = False,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    shard: Shard = ALONE,
) -> Weights:
    """Load the weights of a checked checkpoint, or a shard of them: all on the device, or, with a link, the first
    `num_resident` layers on the device and the others on the host, from where they cross in `link_bits` bits a weight.
    Experts are on the device, or on the host with `expert_slots` slots of each layer on the device, if that is not 0;
    those of `cpu_experts` layers are run by the CPU.
    The embedding's table is on the host if `embeds_on_host`. The ledger lists them under `name`. Only rank 0 has the
    head.

    `on_bytes` is called with each layer's bytes as it is loaded. Peak memory: the placed weights, one tensor's mapping,
    a copy of a layer's queries and keys if heads are reordered, and with fewer than 16 bits two layers of each layout
    on the host. Raises ModelError, DoesNotFit; UsageError if kernels are missing.
    """

    def place(tensor: str, shape: tuple[int, ...], tier: Tier = "device", kind: torch.dtype = dtype) -> Tensor:
        block = memory.allocate(shape, kind, tier=tier, purpose=f"{name} embeddings")
        checkpoint.read_into(tensor, block)
        check_range(block, tensor, dtype)
        on_bytes(block.nbytes)
        return block

    def place_table(tensor: str, table: Matrix, tier: Tier = "device") -> Tensor | StoredMatrix:
        if not table.encoding:
            return place(tensor, (table.outputs, table.inputs), tier)
        kind = ENCODINGS[table.encoding]
        rows = allocate(tier, f"{name} embeddings", table.nbytes(0))
        rows = rows[: table.outputs * kind.row_bytes(table.inputs)].view(table.outputs, -1)
        checkpoint.read_stored(tensor, rows)
        check_range(StoredMatrix(rows, kind), tensor, dtype)
        on_bytes(rows.nbytes)
        return StoredMatrix(rows, kind)

    def read(index: int, buffer: Tensor) -> Tensor:
        layout = layouts[index]
        load_layer(checkpoint, config, layout, index, buffer, shard)
        for view_name, view in layout.views.items():
            kind, held = layout.stored.get(view_name), view.of(buffer)
            check_range(StoredMatrix(held, ENCODINGS[kind]) if kind else held, f"layer {index}", dtype)
        if (block := config.blocks[index]).attends:
            scoring.append(scoring_weights(block.attention, layout, buffer, memory.device))
            for norm in ROTATED if block.attention.weighs_rotated else ():
                layout.views[norm].of(buffer).fill_(1)
        on_bytes(buffer.nbytes)
        return buffer

    def allocate(tier: Tier, purpose: str, num_bytes: int) -> Tensor:
        return memory.allocate((num_bytes,), torch.uint8, tier=tier, purpose=purpose)

    own, scoring = shard.config(config), list[ScoringWeights]()
    layouts = LayerLayout.of_layers(own, dtype)
    num_resident = config.num_layers if link is None else num_resident

    def placed(index: int, tier: Tier) -> Tensor:
        return read(index, allocate(tier, f"{name} layers", layouts[index].num_bytes))

    resident = [layouts[index].bind(placed(index, "device")) for index in range(num_resident)]
    layers: Layers
    if num_resident == config.num_layers:
        layers = ResidentLayers(resident, sum(layout.num_bytes for layout in layouts))
    else:
        assert link is not None
        others, whole = range(num_resident, config.num_layers), max(layout.num_bytes for layout in layouts)
        if link_bits == 16:
            homes: list[Home] = [AsTheyAre(placed(index, "host")) for index in others]
            coded, opened = list[LayerWeights](), None
        else:
            maker = HomeMaker(memory, link_bits)
            used = {id(layouts[index]): layouts[index] for index in others}
            scratch = {name: torch.zeros(layout.num_bytes, dtype=torch.uint8) for name, layout in used.items()}
            homes = [
                maker.make(read(index, scratch[id(layouts[index])]), layouts[index], own.layer(index))
                for index in others
            ]
            coded, opened = maker.coded, allocate("device", "weight staging", whole)
        largest = max((len(home.content) for home in homes), default=whole)
        staging = [allocate("device", "weight staging", largest) for _ in range(num_staging)]
        layers = StreamedLayers(resident, homes, layouts, staging, link, opened=opened, coded=coded)
    experts = load_experts(
        checkpoint,
        config,
        memory,
        dtype=dtype,
        name=name,
        link=link,
        slots=expert_slots,
        on_cpu=cpu_experts,
        on_bytes=on_bytes,
        shard=shard,
    )
    names, row = config.names, (config.hidden_size,)
    embedding = place_table(names.embeddings, config.table, "host" if embeds_on_host else "device")
    head = None
    if shard.rank == 0:
        head = Linear(embedding if config.tie_embeddings else place_table(names.head, config.head), None)
    kind = dtype_of(config.norm, dtype)
    final = place(f"{names.norm}.weight", row, kind=kind)
    if config.norm.plus_one:
        final += 1
    bias = place(f"{names.norm}.bias", row, kind=kind) if config.norm.bias else None
    return Weights(
        Embedding(embedding, memory.device, dtype),
        layers,
        NormWeights(config.norm, final, bias),
        head,
        tuple(scoring),
        experts,
    )
