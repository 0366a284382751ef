"""The memory of slots for experts on a device, of which a prefill has a part in turns with the passes: a layer's slots
are of little use while its rows want all experts, and what experts make of thousands of rows is of none in a pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.config.networks import Experts
from offload.kernels.experts import Room
from offload.speed.routing import wants_nearly_all
from offload.transfer.arena import Arena
from offload.transfer.memory import Memory
from offload.weights.expert_slots import ExpertSlots

_BANKS = 4  # of all staging slots: one of them is enough for rows that run at once


class SlotMemory:
    """The memory of all layers' slots for experts. A prefill takes from its beginning on, so from the last layers, what
    it needs until its turn is over. staged: slots of no layer, through which experts pass; there are some within a
    turn. room: for what experts make of a prefill's rows."""

    def __init__(
        self,
        memory: Memory,
        experts: Experts,
        layers: Sequence[tuple[int, int]],
        num_staged: int = 0,
        prefill_bytes: int = 0,
    ) -> None:
        """layers: the number of slots, and the bytes of each, of every layer with experts. Where one has none, there
        are staging slots in every prefill; else where its rows want nearly all experts. num_staged, prefill_bytes: see
        `Placement`. Raises DoesNotFit."""
        self._experts, self._always = experts, not all(count for count, _ in layers)
        self._shape = max(num_staged, int(self._always)), max(size for _, size in layers)
        need = sum(count * size for count, size in layers), math.prod(self._shape), prefill_bytes
        self._arena = Arena(memory, max(need), purpose="expert slots")
        self._arena.begin(lambda: None)
        self.staged = ExpertSlots(self._arena.take(self._shape, torch.uint8))  # where they are in every turn
        self._arena.end()
        self.staged.lend(self.staged.content.nbytes)
        self.room = _LentRoom(self._arena)

    def slots(self, count: int, num_bytes: int) -> ExpertSlots:
        """The slots of the next layer, of `num_bytes` each. Layers come in their order."""
        return self._arena.own((count, num_bytes), ExpertSlots)

    @property
    def num_staged(self) -> int:
        return len(self.staged.content)

    @property
    def stages(self) -> bool:
        """Whether the prefill under way has staging slots."""
        return len(self.staged) > 0

    @contextmanager
    def turn(self, num_rows: int, at_once: int) -> Iterator[None]:
        """Have the memory of a prefill of `num_rows` rows, of which up to `at_once` run through experts at once. Those
        that follow find experts in staging slots, which therefore take the place of as many other slots as there are;
        of rows that run at once, staging slots have what crosses ahead of them, and more of the others stay."""
        self._arena.begin(self._give_up)
        try:
            if self._always or wants_nearly_all(self._experts, min(num_rows, at_once)):
                count, size = self._shape
                staged = count if num_rows > at_once else -(-count // _BANKS)
                self._arena.take((staged, size), torch.uint8)
                self.staged.take_back(staged)
            yield
        finally:
            self._arena.end()

    def _give_up(self) -> None:
        self.room.clear()
        self.staged.lend(self.staged.content.nbytes)


class _LentRoom(Room):
    """Room in an arena during one turn. What is taken again by the same name is in the same place."""

    is_lent = True

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena, self._blocks = arena, dict[str, Tensor]()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if (block := self._blocks.get(name)) is None or block.nbytes < num_bytes:
            block = self._blocks[name] = self._arena.take((num_bytes,), torch.uint8)
        assert block.device == device
        return block[:num_bytes].view(dtype).view(shape)

    def clear(self) -> None:
        self._blocks.clear()
