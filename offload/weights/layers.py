"""The layers of a model: resident on the device, or on the host and streamed over the link, one copy per layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from offload.transfer.link import Event, Link
from offload.weights.homes import BesideCodes, Home
from offload.weights.layout import LayerLayout, LayerWeights


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
