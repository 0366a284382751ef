"""The bytes and tiles that a pass moves and attends to, and the interface for a device's seconds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from offload.config.mixers import Attention
from offload.config.model import ModelConfig
from offload.formats.layout import CACHED_SHARE, WIDEST_GPU_HALF, WIDEST_GPU_HEAD
from offload.plan.composition import Composition
from offload.plan.placement import Placement
from offload.plan.sizing import Sizing
from offload.speed.hardware import Hardware
from offload.speed.routing import hit_rate, layers_wanted_bytes


@dataclass(frozen=True)
class SumCosts:
    """The costs of sums over the ranks, in which each rank gathers the others' parts of the same rows. seconds: of a
    small sum with one other rank, multiplied by (number of others)^power. rate: bytes per second received by each
    rank."""

    seconds: float
    power: int
    rate: float

    def total(self, number: int, num_bytes: float, others: int) -> float:
        """Seconds of `number` sums, in which a rank receives `num_bytes` from each of the `others`."""
        return number * self.seconds * others**self.power + others * num_bytes / self.rate if others else 0.0


def graph_levels(
    composition: Composition, placement: Placement, hardware: Hardware, target: ModelConfig, dtype: str
) -> tuple[str, ...]:
    """The levels whose passes run as CUDA graphs: all that they use stays on one GPU, or is brought there by its
    kernels, as chosen blocks of keys and values are, and kernels know its heads. Of experts that is not asked: where
    they are on the host, a pass is several graphs, with the host's work between. But kernels have to run them, which
    those for fp32 do not. dtype: of the rows."""
    by_kernels = hardware.has_kernels and dtype != "fp32"
    if hardware.is_cpu or (target.experts is not None and not by_kernels):
        return ()
    attentions = {block.attention for block in target.blocks if block.attends}
    fits = hardware.has_kernels and all(_is_known(each, by_kernels=by_kernels) for each in attentions)
    resident = placement.resident_layers == target.num_layers and hardware.num_devices == 1
    by_blocks = target.indexer is not None and hardware.reads_host
    whole = resident and ("kv" not in placement.offload or by_blocks) and fits
    own = composition.weight_bits < 16 and hardware.num_devices == 1
    copies = (resident or own) and (fits or not target.windowed)
    runs = {"draft": True, composition.inner: copies if composition.keeps_copies else whole, "target": whole}
    return tuple(name for name in composition.levels if runs[name])


def _is_known(attention: Attention, *, by_kernels: bool) -> bool:
    """Whether a GPU's kernels know the heads. by_kernels: rows have 16 bits."""
    if attention.latent is not None:
        return by_kernels and attention.head_dim % 32 == 0 and attention.kv_dim <= WIDEST_GPU_HALF
    return attention.head_dim % 16 == 0 and attention.head_dim <= WIDEST_GPU_HEAD


_BLOCK_MISSES = 0.77, -1.1  # of the blocks that a row chooses, a * x^b in x times as many slots (docs/memory.md)
_FIRST_MISSES = 0.01  # where every block has a slot: each crosses once
CPU_TURN = 1e-4  # seconds in which a layer's rows go to the host and come back, beside the CPU's work: estimated
NETWORK = SumCosts(1e-4, 1, 1.1e9)  # between hosts, over 10 Gbit/s: estimated


@dataclass(frozen=True)
class Passes:
    """The passes of one composition in its placement, over a full cache of `capacity` tokens. If several sequences run
    at a time, they share these passes."""

    sizing: Sizing
    placement: Placement
    capacity: int
    composition: Composition

    @property
    def num_sequences(self) -> int:
        """Sequences that run at a time."""
        return self.sizing.num_sequences

    @property
    def link_rate(self) -> float:
        return self.sizing.link_rate

    @property
    def proposes_quantised(self) -> bool:
        """Whether the target proposes to itself with quantised weights."""
        return self.composition.weight_bits < 16

    @cached_property
    def graphs(self) -> Collection[str]:
        """The levels whose passes run as CUDA graphs."""
        sizing = self.sizing
        return graph_levels(self.composition, self.placement, sizing.hardware, sizing.target, sizing.dtype)

    @cached_property
    def num_tiles(self) -> int:
        """Tiles of all layers."""
        return self.sizing.num_growing * self.sizing.num_tiles(self.capacity)

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of all sequences' full caches."""
        return self.num_sequences * self.capacity * self.sizing.kv_bytes_per_token

    @cached_property
    def read_cache_bytes(self) -> int:
        """Bytes of them that a row of each sequence reads in a pass, for each layer that reads them, and of the keys by
        which it chooses them."""
        sizing, tokens = self.sizing, self.sizing.attended(self.capacity)
        return self.num_sequences * (tokens * sizing.read_kv_bytes + sizing.index_keys_bytes(self.capacity))

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of keys and values that a row of each sequence sees in layers with a window."""
        return self.num_sequences * self.sizing.seen_window_bytes(self.capacity)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes that a pass reads and writes of all sequences' states."""
        return 2 * self.num_sequences * self.sizing.shard.state_bytes()

    def tiles_bytes(self, number: int) -> float:
        """Bytes of `number` tiles of each sequence."""
        return self.cache_bytes * number / self.num_tiles if self.num_tiles else 0.0

    @property
    def share_on_host(self) -> float:
        """The share of the tiles that is on the host."""
        return 1 - self.placement.resident_tiles / self.num_tiles if self.num_tiles else 0.0

    @property
    def link_share(self) -> float:
        """The bytes that cross the link for cached numbers, as a share of their exact bytes."""
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
        """Bytes of the streamed layers' weights after they are decoded."""
        return self.sizing.all_layers_bytes - self.sizing.layers_bytes(self.placement.resident_layers)

    @property
    def streamed_cache_bytes(self) -> float:
        """Bytes, before packing, of the keys and values that cross the link in a pass over the full cache, for each
        layer that reads them. Of a cache from which rows choose: the blocks of a row that are in no slot."""
        if self.placement.block_slots:
            rows = self.num_sequences * self.sizing.attended(self.capacity)
            return self.block_misses * rows * self.sizing.read_kv_bytes
        once = self.tiles_bytes(self.num_tiles - self.placement.resident_tiles)
        return once * self.sizing.num_readers / max(self.sizing.num_growing, 1)

    @property
    def block_misses(self) -> float:
        """The share of the blocks that a row chooses which are in no slot."""
        indexer, slots = self.sizing.target.indexer, self.placement.block_slots
        assert indexer is not None
        if slots * indexer.ratio >= self.capacity:
            return _FIRST_MISSES
        share, power = _BLOCK_MISSES
        return min(share * math.pow(slots / indexer.most_blocks, power), 1.0)

    @property
    def retrieved_bytes(self) -> int:
        """Bytes of keys and values of all sequences' retrieved tokens, in 16 bits or more."""
        return self.num_sequences * self.composition.budget * self.sizing.read_kv_bytes

    @cached_property
    def full_link_bytes(self) -> float:
        """Bytes over each device's link in a pass over the full cache, without those of experts."""
        return self.streamed_weights + self.streamed_cache_bytes * self.link_share

    @cached_property
    def full_link_seconds(self) -> float:
        """Seconds of the transfers of `full_link_bytes`."""
        return self.full_link_bytes / self.link_rate

    @property
    def hit_rate(self) -> float:
        """The share of a token's experts that are on the device."""
        experts, slots = self.sizing.target.experts, self.placement.expert_slots
        return hit_rate(experts, slots, 1) if experts and slots else 1.0

    def missed_bytes(self, rows: int) -> float:
        """Bytes of experts in a pass of `rows` rows of each sequence that no slot has: they cross each device's link,
        or the CPU runs some in their place."""
        if not (slots := self.placement.expert_slots):
            return 0.0
        wanted = layers_wanted_bytes(self.sizing.shard, self.sizing.itemsize, self.num_sequences * rows, slots)
        return wanted * (1.0 - self.share_on_cpu)

    def read_bytes(self, rows: int) -> float:
        """Bytes of experts that all ranks of a host read from the model's file in a pass of `rows` rows of each
        sequence."""
        if not (places := self.placement.expert_places):
            return 0.0
        sizing = self.sizing
        wanted = layers_wanted_bytes(sizing.shard, sizing.itemsize, self.num_sequences * rows, places)
        return sizing.hardware.ranks_per_host * wanted

    @property
    def share_on_cpu(self) -> float:
        """The share of the layers with experts whose experts the CPU runs, all of them."""
        whole = 0 if self.placement.shares_experts else self.placement.cpu_experts
        return whole / max(self.sizing.target.num_expert_layers, 1)

    def awaiting_experts(self, rows: int) -> float:
        """Seconds in which layers wait for experts in a pass, since only a layer's router says which ones: until they
        have been read from the disk, until they have crossed the link, or until the CPU has run them. On a CPU that is
        part of a pass anyway."""
        reading = self.read_bytes(rows) / self.sizing.hardware.disk_read
        fetching, number = self.missed_bytes(rows) / self.link_rate, self.placement.cpu_experts
        if self.placement.shares_experts:
            saved = number * self._saved_by_cpu(rows, fetching / self.sizing.target.num_expert_layers)
            return reading + fetching - saved
        fetching += reading
        if self.sizing.hardware.is_cpu or not number:
            return fetching
        each = CPU_TURN + self._experts_by_cpu(self.num_sequences * rows) / self.sizing.hardware.num_hosts
        return fetching + number * each

    def _saved_by_cpu(self, rows: int, fetching: float) -> float:
        """Seconds less than `fetching` that a layer waits where the CPU runs some of its missed experts while the
        others cross the link, so that both end together; 0 where that takes longer."""
        all_rows, hosts = self.num_sequences * rows, self.sizing.hardware.num_hosts
        wanted = layers_wanted_bytes(self.sizing.shard, self.sizing.itemsize, all_rows)
        missed = self.missed_bytes(rows) / wanted if wanted else 0.0
        running, turn = missed * self._experts_by_cpu(all_rows) / hosts, CPU_TURN * (not self.sizing.hardware.is_cpu)
        both = fetching * running / (fetching + running) if fetching else 0.0
        return max(fetching - both - turn, 0.0)

    def _experts_by_cpu(self, rows: int) -> float:
        """The mean seconds of a layer's experts by all threads of a host."""
        return self.sizing.target_passes[16].experts(rows) / self.sizing.target.num_expert_layers

    @property
    def draft_fetching(self) -> float:
        """Seconds of fetching experts in the draft's passes: those of a next-token head are where the target's are."""
        draft, placement, hardware = self.sizing.draft, self.placement, self.sizing.hardware
        if draft is None or not draft.is_head:
            return 0.0
        ways = (placement.expert_slots, self.link_rate), (placement.expert_places, hardware.disk_read)
        of_pass = (layers_wanted_bytes(draft, self.sizing.itemsize, 1, count) / rate for count, rate in ways if count)
        return self.num_sequences * sum(of_pass)


@dataclass(frozen=True)
class DevicePasses(ABC):
    """Seconds of the parts of `passes` on one kind of device."""

    passes: Passes

    @abstractmethod
    def full(self, rows: int, *, masses: bool) -> float:
        """Seconds of a pass over the full cache with its sums, without waits for the link."""

    @abstractmethod
    def retrieval(self, rows: int) -> float:
        """Seconds of a pass at the level where the target proposes to itself."""

    @abstractmethod
    def draft(self) -> float:
        """Seconds of a pass of the draft; only if there is one."""

    @abstractmethod
    def prefill(self, num_tokens: int) -> float:
        """Seconds of the products and attention of a prefill."""

    @abstractmethod
    def refresh(self) -> float:
        """Seconds of choosing and fetching chunks, without the transfers of changed chunks over the link."""

    @property
    @abstractmethod
    def refresh_link_share(self) -> float:
        """The bytes that cross the link for fetched chunks, as a share of their exact bytes."""

    @property
    @abstractmethod
    def unpacking(self) -> float:
        """Seconds of unpacking the streamed part of the cache."""

    @property
    @abstractmethod
    def restoring(self) -> float:
        """Seconds of restoring the exact weights from the bytes that crossed the link."""

    @property
    @abstractmethod
    def rank_sums(self) -> SumCosts:
        """The costs of sums over the ranks of one host."""

    @abstractmethod
    def padded(self, rows: int) -> int:
        """The number of computed rows, with padding, for `rows` rows."""

    def sums(self, rows: int, blocks: int = 1) -> float:
        """Seconds of the sums over the ranks in a pass: in each block one of each layer's mixer and one of its network,
        each of its part of [rows, hidden], and a small one if heads are normed together."""
        sizing = self.passes.sizing
        hardware, target = sizing.hardware, sizing.target
        sums = NETWORK if hardware.num_hosts > 1 else self.rank_sums
        row_bytes = target.hidden_size * sizing.itemsize
        number = target.num_parts + target.block.attention.norms_whole * target.num_layers
        return sums.total(number * blocks, target.num_parts * rows * row_bytes, hardware.num_devices - 1)

    def full_sums(self, rows: int) -> float:
        """Seconds of the sums over the ranks in a full pass."""
        return self.sums(self.padded(self.passes.num_sequences * rows))

    def beside_weights(self, seconds: float, rows: int) -> float:
        """Seconds of a proposing pass of `rows` rows that takes `seconds` to compute, while its weights cross the
        link."""
        if self.passes.proposes_quantised:
            return seconds
        streamed = self.passes.streamed_weights / self.passes.link_rate
        return max(seconds + self.restoring, streamed) + self.passes.awaiting_experts(rows)
