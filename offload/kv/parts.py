"""The parts of what a sequence keeps, under one protocol: sessions, the prefix store and ranks know no class behind it.

A part is kept in units, each of which is a file on the disk: a page of rows, the states at a place, the hidden rows of
a text. A unit is named by numbers: the tokens up to which it reaches, then numbers of the part's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.kv.checkpoints import thinned
from offload.pages.tiles import TileShape
from offload.plan.shards import Shard

Unit = tuple[int, ...]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Split:
    """The split of a tensor over the ranks: along `axis`, whose whole size is `size`, by each rank's indices."""

    axis: int
    size: int
    indices: Sequence[slice | Tensor]

    def of_rank(self, rank: int) -> tuple[slice | Tensor, ...]:
        """The index of a rank's numbers in the whole tensor."""
        return (*[slice(None)] * self.axis, self.indices[rank])

    @classmethod
    def of_all(cls, axis: int, size: int, num_ranks: int) -> Split:
        """The split of a tensor of which every rank has all."""
        return cls(axis, size, [slice(0, size)] * num_ranks)

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor. shape: of a rank's."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])


class Part(ABC):
    """A part of what a sequence keeps.

    what: a unit's file, in messages. in_place: units are pages of keys and values in the cache's own memory, and packed
    in files. at_places: a sequence can go back to few lengths only; limit: the reason, or another one for which it
    cannot go back to every length. num_computed: last tokens of a prompt that are computed even if units are stored.
    """

    name: str  # also in names of files and in messages between ranks
    what: ClassVar[str]
    in_place: ClassVar[bool] = False
    at_places: ClassVar[bool] = False
    limit: ClassVar[str] = ""
    num_computed = 0
    length = 0

    @abstractmethod
    def shapes(self, unit: Unit) -> Shapes:
        """The shape and the dtype of each tensor of a unit, by name."""

    @abstractmethod
    def units(self, length: int) -> list[Unit]:
        """The units that a session of the first `length` tokens saves."""

    def shared(self, length: int, page: int) -> list[Unit]:
        """The units of the first `length` tokens that other texts can begin with, at ends of pages of `page` tokens."""
        return self.units(length)

    def needed(self, length: int) -> list[Unit]:
        """The units with which a text can go on after its first `length` tokens, whole pages."""
        return []

    def wanted(self, saved: Sequence[Unit], length: int) -> list[Unit]:
        """The units, among those of a session, that are loaded to go on after `length` tokens."""
        return list(saved)

    def reach(self, units: Sequence[Unit], length: int) -> int:
        """The most tokens, up to `length`, after which a sequence can go on with some of `units`."""
        return length

    def reachable(self, length: int, stop: int | None = None) -> int:
        """The most tokens, up to `length`, that the part can be truncated to. stop: see `Worker.reachable`."""
        return length

    def is_whole(self, length: int) -> bool:
        """Whether the part has all that a prefill of `length` tokens leaves in it."""
        return True

    @abstractmethod
    def tensors(self, unit: Unit) -> list[Tensor]:
        """The tensors of a unit, on the host or the device. Read-only, and valid until the next call."""

    def to_fill(self, unit: Unit) -> list[Tensor]:
        """Tensors for the caller to write those of a unit to. A call of `filled` has to follow."""
        return [torch.empty(shape, dtype=dtype) for shape, dtype in self.shapes(unit).values()]

    @abstractmethod
    def filled(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        """Take over a unit from tensors of `to_fill`. It counts once `restored` is called."""

    def reserve(self, num_tokens: int) -> None:  # noqa: B027
        """Have room for units of `num_tokens` tokens, which are filled next."""

    def wait_home(self) -> None:  # noqa: B027
        """Wait until all units are there to be read or filled."""

    def note_length(self) -> None:  # noqa: B027
        """Have the units that a session of all tokens needs."""

    @abstractmethod
    def restored(self, length: int) -> None:
        """Set the length to `length` tokens, whose units the caller has filled."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens at most."""

    def copy_from(self, other: Self, length: int | None = None) -> None:
        """Hold all tokens that `other` holds, or the first `length` of them, to which it can be truncated."""
        count = other.length if length is None else length
        other.wait_home()
        self.wait_home()
        self.restored(0)
        self.reserve(count)
        for unit in self.wanted(other.units(count), count):
            held = self.to_fill(unit)
            for own, theirs in zip(held, other.tensors(unit), strict=True):
                own.copy_(theirs)
            self.filled(unit, held)
        self.restored(count)

    def splits(self, whole: ModelConfig, shards: Sequence[Shard]) -> Sequence[Split]:
        """The split over the ranks of each tensor of a unit. Empty: rank 0 alone has the part."""
        return ()


class PageUnits(Part):
    """A part that is kept page by page. A unit is a page, named by the tokens up to its last row. num_layers: that have
    rows in a page."""

    num_layers: int

    @property
    @abstractmethod
    def page_tokens(self) -> int:
        """Tokens of a page."""

    @property
    def first_page(self) -> int:
        """The first page present."""
        return 0

    def first_kept(self, length: int) -> int:
        """The first page that has room if `length` tokens are cached."""
        return 0

    def first_seen(self, length: int) -> int:
        """The first page that rows after `length` tokens see."""
        return 0

    def units(self, length: int) -> list[Unit]:
        return self._from(self.first_page, length)

    def needed(self, length: int) -> list[Unit]:
        return self._from(self.first_seen(length), length)

    def wanted(self, saved: Sequence[Unit], length: int) -> list[Unit]:
        first, stop = self.first_kept(length), self._count(length)
        return [unit for unit in saved if first <= self.page_of(unit) < stop]

    def reach(self, units: Sequence[Unit], length: int) -> int:
        present = {self.page_of(unit) for unit in units}
        return length if present.issuperset(range(self.first_seen(length), self._count(length))) else 0

    def page_of(self, unit: Unit) -> int:
        return (unit[0] - 1) // self.page_tokens

    def _count(self, length: int) -> int:
        return -(-length // self.page_tokens) if self.num_layers else 0

    def _from(self, first: int, length: int) -> list[Unit]:
        size = self.page_tokens
        return [(min((number + 1) * size, length),) for number in range(first, self._count(length))]


class PagedPart(PageUnits):
    """A part of keys and values, [2, H_kv, S, D] for each layer of a page."""

    what = "page"
    in_place = True
    shape: TileShape

    @abstractmethod
    def page_of_all(self, number: int) -> list[Tensor]:
        """Page `number` of every layer, first layer first, each half contiguous."""

    @abstractmethod
    def page_to_fill(self, number: int) -> list[Tensor]:
        """Page `number` of every layer, for writing. A call of `page_filled` has to follow."""

    @abstractmethod
    def page_filled(self, number: int) -> None:
        """Called after every row of a page from `page_to_fill` was written."""

    @abstractmethod
    def layers_of(self, whole: ModelConfig) -> Sequence[int]:
        """The layers whose rows these are."""

    @property
    def page_tokens(self) -> int:
        return self.shape.page_tokens

    def shapes(self, unit: Unit) -> Shapes:
        size = (2, self.shape.num_kv_heads, self.shape.page_tokens, self.shape.head_dim)
        return {f"layers.{layer}": (size, self.shape.dtype) for layer in range(self.num_layers)}

    def tensors(self, unit: Unit) -> list[Tensor]:
        return self.page_of_all(self.page_of(unit))

    def to_fill(self, unit: Unit) -> list[Tensor]:
        return self.page_to_fill(self.page_of(unit))

    def filled(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        self.page_filled(self.page_of(unit))

    def splits(self, whole: ModelConfig, shards: Sequence[Shard]) -> Sequence[Split]:
        layers = self.layers_of(whole)
        alike = whole.layer(layers[0]) if layers else whole
        heads = [shard.kv_heads(alike) for shard in shards]
        return [Split(1, alike.num_kv_heads, [slice(own.start, own.stop) for own in heads])] * len(layers)


def first_page_seen(length: int, window: int, page_tokens: int) -> int:
    """The first page that rows after `length` tokens see, where each sees the last `window` tokens, itself among
    them."""
    return max(length + 1 - window, 0) // page_tokens


class PlacedPart(Part):
    """A part that is kept at places: numbers of tokens before them. A unit is all that is kept at one place, by which
    it is named."""

    what = "file of states"
    at_places = True
    limit = "states are at few places"

    @property
    @abstractmethod
    def places(self) -> Sequence[int]:
        """All places, ascending."""

    @property
    @abstractmethod
    def most(self) -> int:
        """The number of places that there is room for."""

    def units(self, length: int) -> list[Unit]:
        return [(place,) for place in self.places if place <= length]

    def shared(self, length: int, page: int) -> list[Unit]:
        return [unit for unit in self.units(length) if unit[0] % page == 0]

    def needed(self, length: int) -> list[Unit]:
        return [(length,)]

    def wanted(self, saved: Sequence[Unit], length: int) -> list[Unit]:
        return [(place,) for place in thinned([place for (place,) in saved if place <= length], self.most)]

    def reach(self, units: Sequence[Unit], length: int) -> int:
        return max((place for (place,) in units if place <= length), default=0)
