"""What a pass moves and attends to, in bytes and tiles, and what a device has to say of the seconds that it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from offload.formats.layout import CACHED_SHARE
from offload.plan.composition import Composition
from offload.plan.pass_times import UNKNOWN, Times
from offload.plan.placement import Placement
from offload.plan.sizing import Sizing


@dataclass(frozen=True)
class SumCosts:
    """Of sums over the ranks, in which each gathers what the others have of the same rows. seconds: of a sum of few
    bytes with a single other rank; it grows with that power of the number of others. rate: bytes per second that come
    in at each rank."""

    seconds: float
    power: int
    rate: float

    def total(self, number: int, num_bytes: float, others: int) -> float:
        """Seconds of `number` sums, in which `num_bytes` come in from each of the `others`."""
        return number * self.seconds * others**self.power + others * num_bytes / self.rate if others else 0.0


NETWORK = SumCosts(1e-4, 1, 1.1e9)  # between hosts, over 10 Gbit/s: estimated


@dataclass(frozen=True)
class Passes:
    """Of one composition of levels in its placement, over a full cache of `capacity` tokens. times: of passes on a CPU,
    as far as they were measured. Where several sequences run at a time, passes are those that they share."""

    sizing: Sizing
    placement: Placement
    capacity: int
    composition: Composition
    times: Times = UNKNOWN

    @property
    def num_sequences(self) -> int:
        """That run at a time."""
        return self.sizing.num_sequences

    @property
    def link_rate(self) -> float:
        return self.sizing.link_rate

    @property
    def proposes_quantised(self) -> bool:
        """Whether the target proposes to itself with quantised weights."""
        return self.composition.weight_bits < 16

    @cached_property
    def num_tiles(self) -> int:
        """Tiles of all layers."""
        return self.sizing.num_growing * self.sizing.num_tiles(self.capacity)

    @cached_property
    def cache_bytes(self) -> int:
        """Keys and values of all sequences' full caches."""
        return self.num_sequences * self.capacity * self.sizing.kv_bytes_per_token

    @cached_property
    def window_bytes(self) -> int:
        """Keys and values that a row of each sequence sees in layers with a window."""
        return self.num_sequences * self.sizing.seen_window_bytes(self.capacity)

    def tiles_bytes(self, number: int) -> float:
        """Of so many tiles of each sequence."""
        return self.cache_bytes * number / self.num_tiles if self.num_tiles else 0.0

    @property
    def share_on_host(self) -> float:
        """Of the tiles."""
        return 1 - self.placement.resident_tiles / self.num_tiles if self.num_tiles else 0.0

    @property
    def link_share(self) -> float:
        """Of the bytes of cached numbers, what crosses the link."""
        return CACHED_SHARE[self.placement.link_bits]

    @property
    def streamed_layers(self) -> int:
        return self.sizing.target.num_layers - self.placement.resident_layers

    @cached_property
    def streamed_weights(self) -> int:
        """Bytes over each device's link for the layers that cross it in a pass."""
        return self.sizing.homes_bytes(self.placement.resident_layers, self.placement.weight_link_bits)

    @property
    def opened_weights(self) -> int:
        """Bytes of the same layers once they are opened."""
        return self.sizing.all_layers_bytes - self.sizing.layers_bytes(self.placement.resident_layers)

    @property
    def streamed_cache_bytes(self) -> float:
        """Keys and values that cross the link in a pass over the full cache, as they are before they are packed."""
        return self.tiles_bytes(self.num_tiles - self.placement.resident_tiles)

    @property
    def retrieved_bytes(self) -> int:
        """Keys and values of all sequences' retrieved tokens, in 16 bits or more."""
        return self.num_sequences * self.composition.budget * self.sizing.kv_bytes_per_token

    @cached_property
    def full_link_bytes(self) -> float:
        """Bytes over each device's link in a pass over the full cache."""
        return self.streamed_weights + self.streamed_cache_bytes * self.link_share

    @cached_property
    def full_link_seconds(self) -> float:
        """Seconds in which what a pass over the full cache needs crosses each device's link."""
        return self.full_link_bytes / self.link_rate


@dataclass(frozen=True)
class DevicePasses(ABC):
    """Seconds of the parts of `passes` on one kind of device."""

    passes: Passes

    @abstractmethod
    def full(self, rows: int, *, masses: bool) -> float:
        """Of a pass over the full cache, with its sums, but for what the link brings."""

    @abstractmethod
    def retrieval(self, rows: int) -> float:
        """Of a pass at the level where the target proposes to itself."""

    @abstractmethod
    def draft(self) -> float:
        """Of a pass of the draft, which there is."""

    @abstractmethod
    def prefill(self, num_tokens: int) -> float:
        """Of the products and attention of a prefill."""

    @abstractmethod
    def refresh(self) -> float:
        """Of choosing chunks and fetching them, but for those that change and cross the link."""

    @property
    @abstractmethod
    def refresh_link_share(self) -> float:
        """Of the bytes of fetched chunks, what crosses the link."""

    @property
    @abstractmethod
    def unpacking(self) -> float:
        """Of unpacking what streams of the cache."""

    @property
    @abstractmethod
    def restoring(self) -> float:
        """In which weights that crossed the link quantised become what they are."""

    @property
    @abstractmethod
    def rank_sums(self) -> SumCosts:
        """Of sums over ranks of one host."""

    @abstractmethod
    def padded(self, rows: int) -> int:
        """Rows that are computed for so many."""

    def sums(self, rows: int, blocks: int = 1) -> float:
        """Seconds of the sums over the ranks in a pass: two a layer and block, of its part of [rows, hidden], and a
        small one where heads are normed together."""
        sizing = self.passes.sizing
        hardware, target = sizing.hardware, sizing.target
        sums = NETWORK if hardware.num_hosts > 1 else self.rank_sums
        row_bytes = target.hidden_size * sizing.itemsize
        number = 2 + target.block.attention.norms_whole
        return sums.total(
            number * target.num_layers * blocks, 2 * target.num_layers * rows * row_bytes, hardware.num_devices - 1
        )

    def full_sums(self, rows: int) -> float:
        """Seconds of the sums over the ranks in a full pass."""
        return self.sums(self.padded(self.passes.num_sequences * rows))

    def beside_weights(self, seconds: float) -> float:
        """A pass that takes so many seconds to propose, while the weights that it needs cross the link."""
        if self.passes.proposes_quantised:
            return seconds
        return max(seconds + self.restoring, self.passes.streamed_weights / self.passes.link_rate)
