"""The homes of a layer's experts, from where they are copied into slots: pinned host memory, or the model's file, with
places in host memory before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from offload.speed.split import LinkPace
from offload.transfer.link import Done, Event, Link
from offload.weights.expert_file import ExpertFile
from offload.weights.expert_slots import Expert, ExpertSlots, Fill


class Homes(Protocol):
    """The homes of a layer's experts. num_bytes: of an expert."""

    @property
    def num_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def is_far(self, number: int) -> bool:
        """Whether an expert is to be read from the file first, so that others are there sooner."""
        ...

    def fill(self, number: int) -> Fill:
        """The function that begins to copy an expert into a slot, uint8 [bytes], once an event has happened, the end of
        the computation that reads the slot; None: of all that has been issued by then."""
        ...

    def computed(self) -> Event:
        """The end of the computation issued so far."""
        ...


class NearHomes(Homes, Protocol):
    """Homes of which some or all are in host memory, `content`, uint8 [places, bytes], behind a link."""

    @property
    def content(self) -> Tensor: ...

    def in_memory(self, numbers: Sequence[int]) -> Mapping[int, int]:
        """The places of those of some experts that are in host memory, where they stay until all of `numbers` have been
        used. Such an expert counts as used now."""
        ...

    def pace(self) -> LinkPace:
        """The pace of the link, see `Link.pace`."""
        ...


class HostHomes:
    """Homes in host memory, from where experts cross the link."""

    def __init__(self, content: Tensor, link: Link) -> None:
        """content: uint8 [experts, bytes]."""
        self.content, self._link = content, link

    @property
    def num_bytes(self) -> int:
        return self.content.shape[1]

    def __len__(self) -> int:
        return len(self.content)

    def in_memory(self, numbers: Sequence[int]) -> Mapping[int, int]:
        return {number: number for number in numbers}

    def pace(self) -> LinkPace:
        return self._link.pace(self.num_bytes)

    def is_far(self, number: int) -> bool:
        return False

    def fill(self, number: int) -> Fill:
        home = self.content[number]
        return lambda slot, end: self._link.to_device(slot[: len(home)], home, (end or self._link.record(),))

    def computed(self) -> Event:
        return self._link.record()


class FileHomes:
    """Homes in the model's file, from where experts are read into places in host memory. The CPU computes with one
    before the next one is asked for, so a place that is given away is read by nobody."""

    def __init__(self, file: ExpertFile) -> None:
        self._file, self.num_bytes = file, file.num_bytes

    def __len__(self) -> int:
        return len(self._file)

    def is_far(self, number: int) -> bool:
        return True

    def fill(self, number: int) -> Fill:
        return lambda slot, end: self._file.begin(number, slot)

    def computed(self) -> Event:
        return Done()


class CachedHomes:
    """Homes in the model's file behind places in host memory, from where experts cross the link. places: of this layer
    alone, whose experts are here by its number."""

    def __init__(self, homes: FileHomes, places: ExpertSlots, layer: int, link: Link) -> None:
        self._homes, self._places, self._layer, self._link = homes, places, layer, link

    @property
    def num_bytes(self) -> int:
        return self._homes.num_bytes

    @property
    def content(self) -> Tensor:
        return self._places.content

    def __len__(self) -> int:
        return len(self._homes)

    def in_memory(self, numbers: Sequence[int]) -> Mapping[int, int]:
        if len(numbers) > len(self._places):  # some would leave their places to others
            return {}
        held = self._places.used([(self._layer, number) for number in numbers])
        return {number: place for (_, number), place in held.items() if self._places.has_arrived(place)}

    def pace(self) -> LinkPace:
        return self._link.pace(self.num_bytes)

    def is_far(self, number: int) -> bool:
        return (self._layer, number) not in self._places

    def fill(self, number: int) -> Fill:
        return partial(self._begin, (self._layer, number))

    def computed(self) -> Event:
        return self._link.record()

    def _begin(self, expert: Expert, slot: Tensor, end: Event | None) -> Event:
        held = self._places.used([expert]) or self._places.fetch({expert: self._homes.fill(expert[1])})
        place = held[expert]
        content = self._places.content[place]
        copy = partial(self._link.to_device, slot[: len(content)], content, (end or self._link.record(),))
        arrival = _Arrival(partial(self._places.arrived, held), copy)
        if self._places.has_arrived(place):
            arrival.begin()
        self._places.leaves(place, arrival)
        return arrival


class _Arrival:
    """The event of a copy from a place, which begins when the place has been filled. The host waits for that, since no
    copy can be issued to a GPU that waits for a file."""

    def __init__(self, filled: Callable[[], object], copy: Callable[[], Event]) -> None:
        """filled: waits until the place has been filled with its expert, or raises an error. copy: begins the copy."""
        self._filled, self._copy = filled, copy
        self._copied: Event | None = None

    def begin(self) -> Event:
        if self._copied is None:
            self._filled()
            self._copied = self._copy()
        return self._copied

    def wait(self) -> None:
        self.begin().wait()

    def synchronize(self) -> None:
        self.begin().synchronize()
