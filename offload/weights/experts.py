"""The experts of a layer: resident on the device, or on the host, from where they cross the link into slots that all
layers share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.config.matrices import expert_matrices, expert_vectors
from offload.config.model import ModelConfig
from offload.formats.layout import encoding
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import Bank, ExpertHomes, ExpertWeights, Matrix
from offload.metrics import ExpertStats
from offload.plan.shards import ALONE, Shard
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory, Tier, sent
from offload.weights.checkpoint import Checkpoint
from offload.weights.fp16 import check_range
from offload.weights.layout import LayerLayout, matrix_name
from offload.weights.tensors import expert_sources

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
            tensors[view] = (part.outputs, encoding(part.encoding).row_bytes(part.inputs)), torch.uint8
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
            return StoredMatrix(tensors[f"{name}.stored"], encoding(kind))
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
    own, body = whole.layer(index), f"{whole.names.body}layers.{index}."
    for number, buffer in enumerate(content):
        for name, view in layout.views.items():
            target, row, kind = view.of(buffer), 0, layout.stored.get(name)
            read = checkpoint.read_stored if kind else checkpoint.read_into
            for source in expert_sources(own, shard, number, name.replace(".stored", ".weight")):
                rows = target[row : row + len(source.rows)]
                read(body + source.name, rows, rows=source.rows, columns=source.columns)
                row += len(source.rows)
            held = StoredMatrix(target, encoding(kind)) if kind else target
            check_range(held, f"expert {number} of layer {index}", dtype)


class ResidentExperts:
    """A layer's experts on the device, each in the place of its number."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self._places = torch.arange(len(bank.places), dtype=torch.int32, device=bank.content.device)

    def batches(self, chosen: Tensor) -> Iterator[Tensor]:
        """See `ExpertHomes`: all in one batch."""
        yield self._places


class ExpertSlots:
    """Slots on the device for the experts of all layers, which are on the host: an expert that is not there takes the
    slot of the least recently used one."""

    def __init__(self, content: Tensor, layout: LayerLayout, link: Link) -> None:
        """content: uint8 [slots, layout.num_bytes] on the device."""
        self.bank, self.stats = bank_of(layout, content), ExpertStats()
        self._content, self._link = content, link
        self._held = OrderedDict[tuple[int, int], int]()  # (layer, expert) -> slot, the least recently used first
        self._free = [*range(len(content))]
        self._arriving = dict[int, Event]()  # by slot: copies that no computation has waited for

    def batches(self, layer: int, homes: Tensor, wanted: Sequence[int]) -> Iterator[dict[int, int]]:
        """The slots of the `wanted` experts of a layer: first of those that are there, while the others cross the link
        from their homes, uint8 [experts, bytes]; then of these, a few at a time."""
        there = {expert: self._held[layer, expert] for expert in wanted if (layer, expert) in self._held}
        missing = [expert for expert in wanted if expert not in there]
        self.stats += ExpertStats(len(there), len(missing), len(missing) * homes.shape[1])
        for expert in there:
            self._held.move_to_end((layer, expert))
        coming = self._fetch(layer, homes, missing[: len(self._content) - len(there)])
        if there:
            yield self._arrived(there)
        while missing:
            for group in _in_groups(coming):
                yield self._arrived(group)
            missing = missing[len(coming) :]
            coming = self._fetch(layer, homes, missing[: len(self._content)])  # whose experts have been used

    def _fetch(self, layer: int, homes: Tensor, experts: Sequence[int]) -> dict[int, int]:
        """Begin to fetch experts that are not there, as many as there are slots: their slots. Each copy waits for all
        computation issued so far, since that may read the slot."""
        found = dict[int, int]()
        for expert in experts:
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1]
            self._free.append(slot)  # should the copy fail
            self._arriving[slot] = self._link.to_device(self._content[slot], homes[expert], (self._link.record(),))
            self._held[layer, expert] = found[expert] = self._free.pop()
        return found

    def _arrived(self, slots: dict[int, int]) -> dict[int, int]:
        """The same slots; computation issued from now on runs after their copies."""
        for slot in slots.values():
            if (event := self._arriving.get(slot)) is not None:
                event.wait()
                del self._arriving[slot]
        return slots


def _in_groups(slots: dict[int, int]) -> Iterator[dict[int, int]]:
    """Some experts at a time, so that the first ones are used while the others arrive."""
    every = [*slots.items()]
    for first in range(0, len(every), _AT_ONCE):
        yield dict(every[first : first + _AT_ONCE])


@dataclass(frozen=True)
class StreamedExperts:
    """A layer's experts on the host, uint8 [experts, bytes], and the slots that they cross the link to."""

    layer: int
    homes: Tensor
    slots: ExpertSlots

    @property
    def bank(self) -> Bank:
        return self.slots.bank

    def batches(self, chosen: Tensor) -> Iterator[Tensor]:
        """See `ExpertHomes`."""
        for slots in self.slots.batches(self.layer, self.homes, self._wanted(chosen)):
            places = torch.full((len(self.homes),), -1, dtype=torch.int32)
            places[list(slots)] = torch.tensor([*slots.values()], dtype=torch.int32)
            yield sent(places, self.bank.content.device)

    def _wanted(self, chosen: Tensor) -> list[int]:
        return [expert for expert in chosen.cpu().unique().tolist() if expert < len(self.homes)]


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
    shard: Shard = ALONE,
) -> tuple[ExpertHomes | None, ...]:
    """The experts of each layer of the whole model `config`, () if no layer has any: on the device, or, if `slots` is
    not 0, on the host, from where they cross `link` to so many slots. See `load_weights`."""
    own, homes = shard.config(config), list[ExpertHomes | None]()
    if own.experts is None:
        return ()
    layouts = {kind.block: layout_of(kind, dtype) for kind, _ in own.kinds if kind.block.experts is not None}
    shared = None
    if slots:
        assert link is not None
        widest = max(layouts.values(), key=lambda layout: layout.num_bytes)
        assert all(layout == widest for layout in layouts.values())
        content = memory.allocate((slots, widest.num_bytes), torch.uint8, tier="device", purpose="expert slots")
        shared = ExpertSlots(content, widest, link)
    for index, block in enumerate(own.blocks):
        if block.experts is None:
            homes.append(None)
            continue
        tier: Tier = "host" if slots else "device"
        layout = layouts[block]
        shape = block.experts.count, layout.num_bytes
        content = memory.allocate(shape, torch.uint8, tier=tier, purpose=f"{name} experts")
        _read(checkpoint, config, layout, index, content, shard, dtype)
        on_bytes(content.nbytes)
        homes.append(StreamedExperts(index, content, shared) if shared else ResidentExperts(bank_of(layout, content)))
    return tuple(homes)
