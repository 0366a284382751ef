"""Slots for experts on a device, or places in host memory, that the least recently used ones leave to others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress

from torch import Tensor

from offload.errors import ModelError
from offload.transfer.link import Event

Expert = tuple[int, int]  # its layer, and its number there
Fill = Callable[[Tensor, Event | None], Event]  # see `Homes.fill`


class ExpertSlots:
    """Slots for experts on the device, or places in host memory, of one layer or shared by several. An expert that is
    in no slot takes the slot of the least recently used one. Slots may be lent (`transfer.arena.Lender`): meanwhile
    they are none, and then they are empty."""

    def __init__(self, content: Tensor) -> None:
        """content: uint8 [slots, bytes of the largest expert]."""
        self.content = content
        self._held = OrderedDict[Expert, int]()  # expert -> slot, the least recently used first
        self._free: list[int] = [*range(len(content))]
        self._lent = set[int]()
        self._arriving = dict[int, Event]()  # by slot: copies to it that nobody has waited for
        self._leaving = dict[int, Event]()  # by slot: the last copy from it
        self._computed = dict[int, Event]()  # by slot: the end of the computation with its last expert, if it is known

    def __len__(self) -> int:
        return len(self.content) - len(self._lent)

    @property
    def num_free(self) -> int:
        """The number of slots of no expert."""
        return len(self._free)

    def __contains__(self, expert: object) -> bool:
        return expert in self._held

    def used(self, experts: Iterable[Expert]) -> dict[Expert, int]:
        """The slot of each of `experts` that is in one. Such an expert counts as used now."""
        hits = {expert: self._held[expert] for expert in experts if expert in self._held}
        for expert in hits:
            self._held.move_to_end(expert)
        return hits

    def held(self, experts: Container[Expert]) -> list[Expert]:
        """The experts among `experts` that are in slots, the least recently used first."""
        return [expert for expert in self._held if expert in experts]

    def fetch(self, experts: Mapping[Expert, Fill]) -> dict[Expert, int]:
        """Begin to fill slots with experts that are in none, at most as many as there are slots. Returns their
        slots."""
        found = dict[Expert, int]()
        for expert, fill in experts.items():
            slot = self._made_free()
            self._arriving[slot] = fill(self.content[slot], self._computed.get(slot))
            self._held[expert] = found[expert] = self._free.pop()
        return found

    def arrived(self, slots: dict[Expert, int]) -> dict[Expert, int]:
        """Make computation issued from now on wait for the copies to `slots`. Returns `slots`. An expert whose copy
        failed is in none any more, and the copy's error is raised."""
        for expert, slot in slots.items():
            self._wait(expert, slot, lambda event: event.wait())
        return slots

    def computed(self, slots: Iterable[int], end: Event | None) -> None:
        """Have later copies to `slots` wait for `end`, after which computation reads what is there no more. None: for
        all computation that has been issued when they are asked for."""
        for slot in slots:
            if end is None:
                self._computed.pop(slot, None)
            else:
                self._computed[slot] = end

    def has_arrived(self, slot: int) -> bool:
        """Whether somebody has waited for what was copied to `slot`."""
        return slot not in self._arriving

    def leaves(self, slot: int, event: Event) -> None:
        """Let the expert in `slot` stay until `event`, the end of a copy from it, later than those before."""
        self._leaving[slot] = event

    def lend(self, num_bytes: int) -> None:
        """See `Lender`. The experts there are in no slot any more."""
        lent = {*range(min(-(-num_bytes // self.content.shape[1]), len(self.content)))} - self._lent
        self._lent |= lent
        self._free = [slot for slot in self._free if slot not in lent]
        for expert in [own for own, slot in self._held.items() if slot in lent]:
            del self._held[expert]
        for slot in lent:
            for events in (self._leaving, self._arriving):
                if (event := events.pop(slot, None)) is not None:
                    with suppress(ModelError):  # of a copy that nobody waited for: the expert has gone
                        event.wait()

    def take_back(self, most: int | None = None) -> None:
        """See `Lender`. Later copies to the slots that were lent wait for all computation issued when they begin.
        most: of the first slots, which alone come back; None: all."""
        back = {*range(len(self.content) if most is None else most)} & self._lent
        self.computed(back, None)
        self._free += back
        self._lent -= back

    def _made_free(self) -> int:
        """A slot of no expert, which nothing is copied to or from."""
        while not self._free:
            expert, slot = next(iter(self._held.items()))
            with suppress(ModelError):  # of a copy that nobody waited for: the expert has gone
                if (event := self._leaving.pop(slot, None)) is not None:
                    event.synchronize()
                self._wait(expert, slot, lambda event: event.synchronize())
                del self._held[expert]
                self._free.append(slot)
        return self._free[-1]

    def _wait(self, expert: Expert, slot: int, wait: Callable[[Event], None]) -> None:
        if self._held.get(expert) != slot:
            raise ModelError(f"expert {expert[1]} of layer {expert[0]} was not read, as another one failed before it")
        if (event := self._arriving.get(slot)) is None:
            return
        try:
            wait(event)
        except Exception:
            self._lose(expert)
            self._lose_others()
            raise
        del self._arriving[slot]

    def _lose(self, expert: Expert) -> None:
        """Forget an expert whose copy failed, and the copy from its slot that was to follow."""
        slot = self._held.pop(expert)
        del self._arriving[slot]
        self._leaving.pop(slot, None)
        self._free.append(slot)

    def _lose_others(self) -> None:
        """Forget the experts whose copies fail beside one that failed. The pass is over, and a later one that finds
        them would get an error of long ago."""
        for expert, slot in [*self._held.items()]:
            if (event := self._arriving.get(slot)) is not None:
                try:
                    event.synchronize()
                except ModelError:
                    self._lose(expert)
