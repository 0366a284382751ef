"""The experts of a layer: resident on the device; on the host, from where they cross the link into a few slots; or on
the host, where the CPU runs them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

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
from offload.speed.split import Split
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory, Tier, sent
from offload.weights.checkpoint import Checkpoint
from offload.weights.fp16 import check_range
from offload.weights.layout import LayerLayout, matrix_name
from offload.weights.tensors import expert_sources

_MATRICES = ("gate", "up", "down")
_AT_ONCE = 8  # experts that are used together as they arrive
Expert = tuple[int, int]  # its layer, and its number there
Fetch = Callable[[Sequence[Expert]], object]


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


def _read(
    checkpoint: Checkpoint,
    whole: ModelConfig,
    layout: LayerLayout,
    index: int,
    content: Tensor,
    shard: Shard,
    dtype: torch.dtype,
) -> None:
    """Read a shard of all experts of a layer of the model `whole` into `content`, uint8 [experts, layout.num_bytes],
    which is zeroed."""
    own, layer = whole.layer(index), whole.layer_name(index)
    for number, buffer in enumerate(content):
        for name, view in layout.views.items():
            target, row, kind = view.of(buffer), 0, layout.stored.get(name)
            read = checkpoint.read_stored if kind else checkpoint.read_into
            for source in expert_sources(own, shard, number, name.replace(".stored", ".weight")):
                rows = target[row : row + len(source.rows)]
                read(layer + source.name, rows, rows=source.rows, columns=source.columns)
                row += len(source.rows)
            held = StoredMatrix(target, ENCODINGS[kind]) if kind else target
            check_range(held, f"expert {number} of layer {index}", dtype)


class ResidentExperts:
    """A layer's experts on the device, each in the place of its number."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.room: Room | None = None
        self._places = torch.arange(len(bank.places), dtype=torch.int32, device=bank.content.device)

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        """See `ExpertHomes`. All experts are in one batch."""
        yield Batch(self.bank, self._places)


class ExpertSlots:
    """Slots for experts on the device, of one layer or shared by several. An expert that is in no slot takes the slot
    of the least recently used one."""

    def __init__(self, content: Tensor, link: Link) -> None:
        """content: uint8 [slots, bytes of the largest expert] on the device."""
        self.content, self.link = content, link
        self._held = OrderedDict[Expert, int]()  # expert -> slot, the least recently used first
        self._free = [*range(len(content))]
        self._arriving = dict[int, Event]()  # by slot: copies that no computation has waited for

    def __len__(self) -> int:
        return len(self.content)

    def used(self, experts: Iterable[Expert]) -> dict[Expert, int]:
        """The slot of each of `experts` that is in one. Such an expert counts as used now."""
        hits = {expert: self._held[expert] for expert in experts if expert in self._held}
        for expert in hits:
            self._held.move_to_end(expert)
        return hits

    def fetch(self, experts: Mapping[Expert, Tensor]) -> dict[Expert, int]:
        """Begin to fetch experts that are in no slot from their homes, at most as many as there are slots. Returns
        their slots. Each copy waits for all computation issued so far, since that may read the slot."""
        found = dict[Expert, int]()
        for expert, home in experts.items():
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1]
            self._free.append(slot)  # should the copy fail
            after = (self.link.record(),)
            self._arriving[slot] = self.link.to_device(self.content[slot, : len(home)], home, after)
            self._held[expert] = found[expert] = self._free.pop()
        return found

    def arrived(self, slots: dict[Expert, int]) -> dict[Expert, int]:
        """Make computation issued from now on wait for the copies to `slots`. Returns `slots`."""
        for slot in slots.values():
            if (event := self._arriving.get(slot)) is not None:
                event.wait()
                del self._arriving[slot]
        return slots


class Behind:
    """The experts that the CPU has run in a pass, of all layers: they cross the link when it is idle, to be in slots
    when their layer comes again."""

    def __init__(self) -> None:
        self._waiting = OrderedDict[int, tuple[list[Expert], Fetch]]()  # by layer, that which comes next first

    def put(self, layer: int, experts: Sequence[Expert], fetch: Fetch) -> None:
        """Have a layer's `experts` wait in place of those that still do."""
        self._waiting.pop(layer, None)
        if experts:
            self._waiting[layer] = [*experts], fetch

    def fetch(self, count: int) -> None:
        """Begin to fetch up to `count` experts."""
        while count > 0 and self._waiting:
            layer, (experts, fetch) = next(iter(self._waiting.items()))
            fetch(experts[:count])
            count -= len(experts)
            del experts[: len(experts) + min(count, 0)]
            if not experts:
                del self._waiting[layer]


class StreamedExperts:
    """A layer's experts on the host, from where they cross the link to slots. A layer has slots of its own for passes,
    since layers come in turns: where a pass wants more than all slots hold, slots that layers shared would have lost
    every expert when its layer comes again."""

    def __init__(
        self,
        homes: Tensor,
        slots: ExpertSlots,
        layout: LayerLayout,
        layer: int = 0,
        room: Room | None = None,
        split: Split | None = None,
        behind: Behind | None = None,
    ) -> None:
        """homes: uint8 [experts, layout.num_bytes] on the host. layer: its number, other than that of each layer with
        the same slots. room: of all layers; by default its own. split: which missed experts the CPU runs in a pass;
        None: none. behind: of all layers with the same link; by default its own."""
        self.bank, self.stats, self.room = bank_of(layout, slots.content), ExpertStats(), room or Room()
        self._homes, self._slots, self._layer, self._split = homes, slots, layer, split
        self._behind = behind or Behind()
        self._at_home = None if split is None else bank_of(layout, homes)
        self.in_prefill = self if split is None else StreamedExperts(homes, slots, layout, layer, self.room)

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        """See `ExpertHomes`. The first batch has the experts that are in slots, while others cross the link; then come
        those that the CPU runs; each further batch has a few of those that have arrived."""
        wanted = self._wanted(chosen)
        hits = self._slots.used(wanted)
        missing = sorted((each for each in wanted if each not in hits), key=lambda each: -wanted[each])
        room = len(self._slots) - len(hits)
        crossing, own, more = self._shared(missing, [wanted[each] for each in missing], room)
        self.stats += ExpertStats(len(hits), len(missing), 0, len(own))
        coming = self._fetch(crossing[:room])
        if hits:
            yield self._arrived(hits)
        self._behind.fetch(more)
        if own:
            yield from self._by_cpu(own, [wanted[each] for each in own])
        while crossing:
            for group in _in_groups(coming):
                yield self._arrived(group)
            crossing = crossing[len(coming) :]
            coming = self._fetch(crossing[: len(self._slots)])  # whose experts have been used

    def _wanted(self, chosen: Tensor) -> dict[Expert, int]:
        """The experts that are chosen, each with its number of rows."""
        numbers, rows = (each.tolist() for each in chosen.cpu().unique(return_counts=True))
        found = {(self._layer, number): own for number, own in zip(numbers, rows, strict=True)}
        found.pop((self._layer, len(self._homes)), None)  # no expert
        return found

    def _shared(
        self, missing: Sequence[Expert], rows: Sequence[int], room: int
    ) -> tuple[Sequence[Expert], Sequence[Expert], int]:
        """The missed experts that cross the link now, those that the CPU runs, and how many of these and of other
        layers' can cross the link meanwhile. rows: of each. room: slots that no expert of this pass has."""
        if (split := self._split) is None:
            return missing, (), 0
        split.began()
        num_bytes = self._homes.shape[1]
        pace = self._slots.link.pace(num_bytes)
        count = split.crossing(rows, num_bytes, pace)
        after = replace(pace, ahead=pace.ahead + count * pace.each)
        self._behind.put(self._layer, missing[count:][: max(room - count, 0)], self._fetch)
        return missing[:count], missing[count:], split.following(rows[count:], num_bytes, after)

    def _by_cpu(self, experts: Sequence[Expert], rows: Sequence[int]) -> Iterator[Batch]:
        """The batch that the CPU runs, which is timed."""
        assert self._at_home is not None
        assert self._split is not None
        began = time.perf_counter()
        yield Batch(self._at_home, self._places({expert: expert[1] for expert in experts}))
        self._split.ran(rows, self._homes.shape[1], time.perf_counter() - began)
        self._split.ended()

    def _arrived(self, slots: dict[Expert, int]) -> Batch:
        """The batch of experts in slots, from when they have arrived."""
        places = self._places(self._slots.arrived(slots))
        return Batch(self.bank, sent(places, self._slots.content.device))

    def _places(self, places: Mapping[Expert, int]) -> Tensor:
        of_all = torch.full((len(self._homes),), -1, dtype=torch.int32)
        of_all[[number for _, number in places]] = torch.tensor([*places.values()], dtype=torch.int32)
        return of_all

    def _fetch(self, experts: Sequence[Expert]) -> dict[Expert, int]:
        self.stats += ExpertStats(fetched_bytes=len(experts) * self._homes.shape[1])
        return self._slots.fetch({expert: self._homes[expert[1]] for expert in experts})


def _in_groups(slots: dict[Expert, int]) -> Iterator[dict[Expert, int]]:
    """Some experts at a time, so that the first ones are used while the others arrive."""
    every = [*slots.items()]
    for first in range(0, len(every), _AT_ONCE):
        yield dict(every[first : first + _AT_ONCE])


class HostExperts(ResidentExperts):
    """A layer's experts on the host, where the CPU runs them in a pass. in_prefill: the same experts in a prefill,
    whose many rows run on the device."""

    def __init__(self, bank: Bank, in_prefill: StreamedExperts) -> None:
        super().__init__(bank)
        self.in_prefill, self.room = in_prefill, in_prefill.room


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
    shard: Shard = ALONE,
) -> tuple[ExpertHomes | None, ...]:
    """The experts of each layer of the whole model `config`, () if no layer has any: on the device, or, if `slots` is
    not 0, on the host, from where they cross `link` to so many slots of each layer. on_cpu: the number of layers whose
    experts the CPU runs, see `cpu_layers`: with `shared` some of those that are in no slot, else all, and in a prefill
    these layers share SHARED_SLOTS slots. See `load_weights`."""
    own = shard.config(config)
    layouts = {kind.block: layout_of(kind, dtype) for kind, _ in own.kinds if kind.block.experts is not None}
    of_cpu, room, split = cpu_layers(own, on_cpu), Room(), Split() if shared else None

    def made_slots(count: int, num_bytes: int) -> ExpertSlots:
        assert link is not None
        content = memory.allocate((count, num_bytes), torch.uint8, tier="device", purpose="expert slots")
        return ExpertSlots(content, link)

    def of_layer(index: int, block: Block) -> ExpertHomes | None:
        if block.experts is None:
            return None
        layout, count, tier = layouts[block], block.experts.count, _tier(slots)
        content = memory.allocate((count, layout.num_bytes), torch.uint8, tier=tier, purpose=f"{name} experts")
        _read(checkpoint, config, layout, index, content, shard, dtype)
        on_bytes(content.nbytes)
        if not slots:
            return ResidentExperts(bank_of(layout, content))
        if index in of_cpu and split is None:
            assert of_prefill is not None
            return HostExperts(bank_of(layout, content), StreamedExperts(content, of_prefill, layout, index, room))
        places, own_split = made_slots(min(slots, count), layout.num_bytes), split if index in of_cpu else None
        return StreamedExperts(content, places, layout, index, room, own_split)

    largest = max((layout.num_bytes for layout in layouts.values()), default=0)
    in_turn = own.experts is not None and of_cpu and split is None
    of_prefill = made_slots(min(SHARED_SLOTS, own.experts.count), largest) if own.experts and in_turn else None
    return tuple(of_layer(index, block) for index, block in enumerate(own.blocks)) if layouts else ()


def in_prefill(homes: ExpertHomes | None) -> ExpertHomes | None:
    """The experts of a layer for a prefill: streamed where the CPU runs them in a pass, else `homes` as they are."""
    return homes.in_prefill if isinstance(homes, HostExperts | StreamedExperts) else homes


def _tier(slots: int) -> Tier:
    return "host" if slots else "device"
