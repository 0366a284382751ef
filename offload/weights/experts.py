"""The experts of a layer: resident on the device; on the host, from where they cross the link into a few slots; or on
the host, where the CPU runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from offload.config.block import Block
from offload.config.matrices import expert_matrices, expert_vectors
from offload.config.model import ModelConfig
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import Bank, Batch, ExpertHomes, ExpertWeights, Matrix, Room
from offload.metrics import ExpertStats
from offload.plan.shards import ALONE, Shard
from offload.speed.routing import SHARED_SLOTS, cpu_layers
from offload.transfer.disk import Disk
from offload.transfer.link import Link
from offload.transfer.memory import Memory, Tier, sent
from offload.weights.checkpoint import Checkpoint
from offload.weights.expert_file import ExpertFile, LayerExperts, ModelFiles
from offload.weights.expert_homes import CachedHomes, FileHomes, Homes, HostHomes
from offload.weights.expert_slots import Expert, ExpertSlots
from offload.weights.layout import LayerLayout, matrix_name

_MATRICES = ("gate", "up", "down")
_AT_ONCE = 8  # experts that are used together as they arrive


def layout_of(config: ModelConfig, dtype: torch.dtype) -> LayerLayout:
    """The layout of one expert of the layer `config.block` in a flat buffer."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    stored = dict[str, str]()
    for name, part in expert_matrices(config.block, config.hidden_size).items():
        view = matrix_name(name, 0, part.encoding)
        tensors[view] = (part.outputs, part.inputs), dtype
        if part.encoding:
            stored[view] = part.encoding
            tensors[view] = (part.outputs, ENCODINGS[part.encoding].row_bytes(part.inputs)), torch.uint8
    tensors |= {name: ((size,), dtype) for name, size in expert_vectors(config.block, config.hidden_size).items()}
    packed = LayerLayout.pack(tensors)
    return LayerLayout(packed.views, packed.num_bytes, stored=stored)


def bank_of(layout: LayerLayout, content: Tensor) -> Bank:
    """The places of `content`, uint8 [places, layout.num_bytes]."""
    return Bank([_bound(layout, each) for each in content], content)


def _bound(layout: LayerLayout, buffer: Tensor) -> ExpertWeights:
    tensors = layout.tensors(buffer)

    def matrix(name: str) -> Matrix | None:
        if (kind := layout.stored.get(f"{name}.stored")) is not None:
            return StoredMatrix(tensors[f"{name}.stored"], ENCODINGS[kind])
        return tensors.get(f"{name}.weight")

    gate, up, down = map(matrix, _MATRICES)
    assert up is not None
    assert down is not None
    return ExpertWeights(gate, up, down, tensors.get("gate_up.bias"), tensors.get("down.bias"))


class ResidentExperts:
    """A layer's experts on the device, each in the place of its number."""

    room = None

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self._places = torch.arange(len(bank.places), dtype=torch.int32, device=bank.content.device)

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        """See `ExpertHomes`. All experts are in one batch."""
        yield Batch(self.bank, self._places)


class StreamedExperts:
    """A layer's experts, which are copied from their homes to slots as they are wanted. A layer has slots of its own
    for passes, since layers come in turns: where a pass wants more than all slots hold, slots that layers shared would
    have lost every expert when its layer comes again."""

    def __init__(
        self, homes: Homes, slots: ExpertSlots, layout: LayerLayout, layer: int = 0, room: Room | None = None
    ) -> None:
        """layer: its number, other than that of each layer with the same slots. room: of all layers; by default its
        own."""
        self.bank, self.stats, self.room = bank_of(layout, slots.content), ExpertStats(), room or Room()
        self._homes, self._slots, self._layer = homes, slots, layer

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        """See `ExpertHomes`. The first batch has the experts that are in slots, while the others arrive; each further
        one has a few of the others. Where slots are too few for all, each has a few, whose slots the next ones take
        while others are used."""
        for slots in self._batches(chosen.cpu().unique().tolist()):
            places = torch.full((len(self._homes),), -1, dtype=torch.int32)
            places[[number for _, number in slots]] = torch.tensor([*slots.values()], dtype=torch.int32)
            yield Batch(self.bank, sent(places, self._slots.content.device))

    def _batches(self, chosen: Sequence[int]) -> Iterator[dict[Expert, int]]:
        """The slots of the experts of each batch."""
        wanted = [(self._layer, number) for number in chosen if number < len(self._homes)]
        hits = self._slots.used(wanted)
        missing = sorted(
            (expert for expert in wanted if expert not in hits), key=lambda own: self._homes.is_far(own[1])
        )
        self.stats += ExpertStats(len(hits), len(missing), len(missing) * self._homes.num_bytes)
        coming = self._fetch(missing[: len(self._slots) - len(hits)])
        left = missing[len(coming) :]
        if hits and not left:
            yield self._slots.arrived(hits)
        waiting = hits | coming if left else coming
        while waiting:  # in the order in which they leave their slots: the least recently used first
            group = dict(islice(waiting.items(), _AT_ONCE))
            yield self._slots.arrived(group)
            waiting = {expert: slot for expert, slot in waiting.items() if expert not in group}
            coming = self._fetch(left[: len(self._slots) - len(waiting)])
            left, waiting = left[len(coming) :], waiting | coming

    def _fetch(self, experts: Sequence[Expert]) -> dict[Expert, int]:
        return self._slots.fetch({expert: self._homes.fill(expert[1]) for expert in experts})


class HostExperts:
    """A layer's experts on the host, where the CPU runs them in a pass. in_prefill: the same experts in a prefill,
    whose many rows run on the device."""

    room = None

    def __init__(self, own: ResidentExperts | StreamedExperts, in_prefill: StreamedExperts) -> None:
        """own: with their bank on the host."""
        self.bank, self.own, self.in_prefill = own.bank, own, in_prefill

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        return self.own.batches(chosen)


def load_experts(
    checkpoint: Checkpoint,
    config: ModelConfig,
    memory: Memory,
    *,
    dtype: torch.dtype,
    name: str,
    link: Link | None,
    slots: int,
    on_bytes: Callable[[int], None],
    on_cpu: int = 0,
    places: int = 0,
    disk: Disk | None = None,
    shard: Shard = ALONE,
) -> tuple[ExpertHomes | None, ...]:
    """The experts of each layer of the whole model `config`, () if no layer has any: on the device, or, if `slots` is
    not 0, on the host, from where they cross `link` to so many slots of each layer. on_cpu: the number of layers whose
    experts the CPU runs, see `cpu_layers`; in a prefill they share SHARED_SLOTS slots. places: of each layer, for
    experts in host memory, if they are not there all; `disk` then reads the others from the checkpoint's files, which
    it keeps open. See `load_weights`."""
    own = shard.config(config)
    layouts = {kind.block: layout_of(kind, dtype) for kind, _ in own.kinds if kind.block.experts is not None}
    of_cpu, room = cpu_layers(own, on_cpu), Room()
    files = ModelFiles(checkpoint, disk) if disk is not None and layouts else None

    def made_slots(count: int, num_bytes: int) -> ExpertSlots:
        return ExpertSlots(memory.allocate((count, num_bytes), torch.uint8, tier="device", purpose="expert slots"))

    def of_layer(index: int, block: Block) -> ExpertHomes | None:
        if block.experts is None:
            return None
        layout, count = layouts[block], block.experts.count
        held = min(places, count) if files is not None else count
        content = memory.allocate((held, layout.num_bytes), torch.uint8, tier=_tier(slots), purpose=f"{name} experts")
        inside = LayerExperts(checkpoint, config, layout, index, shard, dtype)
        on_bytes(count * layout.num_bytes)
        if files is None or held == count:
            inside.read_all(content)
            return streamed(ResidentExperts(bank_of(layout, content)), partial(HostHomes, content), index, layout)
        found, kept = FileHomes(ExpertFile(inside, files)), ExpertSlots(content)
        here = StreamedExperts(found, kept, layout, index, room)
        return streamed(here, partial(CachedHomes, found, kept, index), index, layout)

    def streamed(
        here: ResidentExperts | StreamedExperts, homes: Callable[[Link], Homes], index: int, layout: LayerLayout
    ) -> ExpertHomes:
        """The experts of a layer that are `here`, on the host if there are slots."""
        if not slots:
            return here
        assert link is not None
        found = homes(link)
        if index in of_cpu:
            assert shared is not None
            return HostExperts(here, StreamedExperts(found, shared, layout, index, room))
        return StreamedExperts(found, made_slots(min(slots, len(found)), layout.num_bytes), layout, index, room)

    largest = max((layout.num_bytes for layout in layouts.values()), default=0)
    shared = made_slots(min(SHARED_SLOTS, own.experts.count), largest) if own.experts and of_cpu else None
    return tuple(of_layer(index, block) for index, block in enumerate(own.blocks)) if layouts else ()


def in_prefill(homes: ExpertHomes | None) -> ExpertHomes | None:
    """The experts of a layer for a prefill: streamed where the CPU runs them in a pass, else `homes` as they are."""
    return homes.in_prefill if isinstance(homes, HostExperts) else homes


def _tier(slots: int) -> Tier:
    return "host" if slots else "device"
