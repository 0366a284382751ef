"""The experts of a model's layers, loaded to where a plan has them: resident on the device, copied to slots as they are
wanted, or in host memory, where the CPU runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from offload.config.block import Block
from offload.config.model import ModelConfig
from offload.kernels.experts import Bank, Batch, ExpertHomes, Room
from offload.plan.shards import ALONE, Shard
from offload.speed.routing import BANK, cpu_layers
from offload.speed.split import Split
from offload.transfer.disk import Disk
from offload.transfer.link import Link
from offload.transfer.memory import Memory, Tier
from offload.weights.checkpoint import Checkpoint
from offload.weights.expert_file import ExpertFile, LayerExperts, ModelFiles
from offload.weights.expert_homes import CachedHomes, FileHomes, HostHomes, NearHomes
from offload.weights.expert_layout import bank_of, layout_of
from offload.weights.expert_slots import ExpertSlots
from offload.weights.layout import LayerLayout
from offload.weights.prefill_experts import PrefillExperts
from offload.weights.slot_memory import SlotMemory
from offload.weights.streamed_experts import Behind, Sharing, StreamedExperts


class ResidentExperts:
    """A layer's experts on the device, each in the place of its number."""

    room: Room | None = None
    on_host = False

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.whole = Batch(bank, torch.arange(len(bank.places), dtype=torch.int32, device=bank.content.device))

    def ahead(self, then: ExpertHomes | None = None, *, is_last: bool = True, busy: int = 0) -> None:
        """See `ExpertHomes`. All experts are there."""

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        """See `ExpertHomes`. All experts are in one batch."""
        yield self.whole


class HostExperts:
    """A layer's experts on the host, where the CPU runs them in a pass. in_prefill: the same experts in a prefill,
    whose many rows run on the device."""

    on_host = True

    def __init__(
        self, own: ResidentExperts | StreamedExperts, in_prefill: ExpertHomes, room: Room | None = None
    ) -> None:
        """own: with their bank on the host. room: of passes; None: the same as that of `in_prefill`."""
        self.bank, self.own, self.in_prefill, self.room = own.bank, own, in_prefill, room or in_prefill.room
        self.whole = own.whole

    def ahead(self, then: ExpertHomes | None = None, *, is_last: bool = True, busy: int = 0) -> None:
        self.own.ahead(then, is_last=is_last, busy=busy)

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
    shared: bool = False,
    places: int = 0,
    disk: Disk | None = None,
    staged: int = 0,
    prefill_bytes: int = 0,
    shard: Shard = ALONE,
) -> tuple[ExpertHomes | None, ...]:
    """The experts of each layer of the whole model `config`, () if no layer has any: on the device, or, if `slots` is
    not 0, on the host, from where they cross `link` to so many slots of each layer. on_cpu: the number of layers whose
    experts the CPU runs, see `cpu_layers`: with `shared` some of those that are in no slot, else all. places: of each
    layer, for experts in host memory, if they are not there all; `disk` then reads the others from the checkpoint's
    files, which it keeps open. staged, prefill_bytes: see `Placement`; 0: a prefill's experts take the slots of their
    layers. See `load_weights`."""
    own = shard.config(config)
    layouts = {kind.block: layout_of(kind, dtype) for kind, _ in own.kinds if kind.block.experts is not None}
    of_cpu, room = cpu_layers(own, on_cpu), Room()
    split, behind = Split() if shared else None, Behind()
    files = ModelFiles(checkpoint, disk) if disk is not None and layouts else None

    without = {*of_cpu} if split is None else set[int]()  # layers that have no slots
    counts = {
        index: 0 if index in without else min(slots, block.experts.count)
        for index, block in enumerate(own.blocks)
        if block.experts is not None
    }
    slot_memory: SlotMemory | None = None
    if slots and own.experts is not None:
        of_layers = [(count, layouts[own.blocks[index]].num_bytes) for index, count in counts.items()]
        slot_memory = SlotMemory(memory, own.experts, of_layers, min(staged, own.experts.count), prefill_bytes)

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
        here: ResidentExperts | StreamedExperts, homes: Callable[[Link], NearHomes], index: int, layout: LayerLayout
    ) -> ExpertHomes:
        """The experts of a layer that are `here`, on the host if there are slots."""
        if slot_memory is None:
            return here
        assert link is not None
        found, count, own_slots = homes(link), counts[index], None
        if count:
            sharing = None if split is None or index not in of_cpu else Sharing(found, split, behind)
            own_slots = StreamedExperts(found, slot_memory.slots(count, layout.num_bytes), layout, index, room, sharing)
        if not (staged := slot_memory.num_staged):
            assert own_slots is not None
            return own_slots
        at_once = max(min(staged // 2, BANK), 1)
        passing = StreamedExperts(found, slot_memory.staged, layout, index, room, at_once=at_once)
        many = PrefillExperts(None if own_slots is None else own_slots.alone, passing, slot_memory)
        if own_slots is None:
            return HostExperts(here, many, room)
        own_slots.in_prefill = many
        return own_slots

    return tuple(of_layer(index, block) for index, block in enumerate(own.blocks)) if layouts else ()


def in_prefill(homes: ExpertHomes | None) -> ExpertHomes | None:
    """The experts of a layer for a prefill: streamed where the CPU runs them in a pass, else `homes` as they are."""
    return homes.in_prefill if isinstance(homes, HostExperts | StreamedExperts) else homes


def prefill_turn(experts: Sequence[ExpertHomes | None], num_rows: int, at_once: int) -> AbstractContextManager[None]:
    """A context in which a prefill has its part of the memory of slots, if there is one, see `SlotMemory.turn`."""
    found = (own.memory for each in experts if isinstance(own := in_prefill(each), PrefillExperts))
    memory = next(found, None)
    return nullcontext() if memory is None else memory.turn(num_rows, at_once)


def _tier(slots: int) -> Tier:
    return "host" if slots else "device"
