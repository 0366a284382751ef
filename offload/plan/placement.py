"""Placement: layers and tiles on the device as far as they fit, the rest on the host.

Weights come first, since the retrieval level reads all of them in every inner pass; tiles take the remaining memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from offload.config.model import ModelConfig
from offload.fields import LATER
from offload.plan.bits import link_bits, weight_link_bits
from offload.plan.composition import Composition
from offload.plan.expert_placement import (
    LEAST_SLOTS,
    best_slots,
    expert_rows,
    least_staged,
    prefill_bytes,
    slots_bytes,
    staged_experts,
)
from offload.plan.fixed_bytes import fixed_bytes
from offload.plan.options import PAGE_TOKENS
from offload.plan.sizing import BLOCK_SHARE, NUM_ROW_SLOTS, NUM_STAGING, PREFILL_BLOCK, Sizing

TableTier = Literal["device", "host", "file"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of weights and caches, and the pieces in which they are moved and computed.

    offload: the parts, "weights" or "kv", that may be on the host. resident_layers, resident_tiles: the number of
    layers with weights on the device, without their experts, and of tiles of all layers together. expert_slots: of
    each layer, for experts on the device; 0 if all are there. cpu_experts: the number of layers whose experts the CPU
    may run in a pass, the last ones that have some; shares_experts: whether it runs some of those that no slot has, as
    is soonest done, and not all. expert_places: of each layer, for experts in host memory, or on a CPU in its memory; 0
    if all are there, else the others are read from the model's file. prefill_bytes: of the slots' memory, which a
    prefill has until its end; staged_experts: slots of no layer in it, through which experts pass. The rest crosses the
    link. Bytes are by purpose:
    of the first device, of each other device if there are several, and of all ranks on the hosts. They are for all
    sequences that run at a time; each has that number of tiles. Sizes of pages and tiles are in tokens.
    """

    offload: tuple[str, ...]
    resident_layers: int
    resident_tiles: int
    device_bytes: dict[str, int]
    other_device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    page_tokens: int
    tile_tokens: int
    rows: int  # the prompt's last tokens, left to the first full pass; on a GPU also the rows of a block
    prefill_block: int  # rows
    fused_prefill: bool  # prefill attention uses torch's fused kernel
    link_bytes_per_second: float | None  # set, or measured; None: not known
    link_bits: int = 16  # of a cached number of a whole page that crosses the link; 12: packed at home;
    # 9: a residual, whose code is on the device
    raw_pages: int = 0  # room on each rank's host for raw (not packed) pages of a layer, per sequence
    weight_link_bits: int = 16  # of a weight that crosses the link; 12: packed, 9 or 8: a residual of its code
    staging_tiles: int = NUM_STAGING  # staging slots of each sequence, through which tiles stream
    window_pages: int = 0  # per layer with a window, sequence and device
    checkpoints: int = field(default=0, metadata={LATER: True})  # of each sequence's states
    expert_slots: int = field(default=0, metadata={LATER: True})  # on each device
    cpu_experts: int = field(default=0, metadata={LATER: True})
    shares_experts: bool = field(default=False, metadata={LATER: True})
    expert_places: int = field(default=0, metadata={LATER: True})
    expert_rows: int = field(default=PREFILL_BLOCK, metadata={LATER: True})  # of a prefill, run at once
    staged_experts: int = field(default=0, metadata={LATER: True})
    prefill_bytes: int = field(default=0, metadata={LATER: True})
    block_slots: int = field(default=0, metadata={LATER: True})  # of each layer with an indexer, and of a sequence
    ngram_table: TableTier = field(default="host", metadata={LATER: True})  # where tables of n-grams are
    ngram_rows: int = field(default=0, metadata={LATER: True})  # of each in host memory, where it is in its file
    table: TableTier = "device"  # of the embedding's table a pass reads only a few rows

    @property
    def rounding(self) -> dict[str, object]:
        """The sizes that decide, beside those of pages and tiles, how a prefill's sums round."""
        return {"block": self.prefill_block, "ring": self.window_pages, "fused": self.fused_prefill}

    def experts_held(self, layer: ModelConfig, itemsize: int) -> int:
        """Bytes of the experts of a layer that are in memory, in slots or not."""
        return layer.experts_bytes(itemsize, self.expert_places)

    @property
    def is_for_one_capacity(self) -> bool:
        """Whether weights are where they leave room for a cache of one capacity."""
        return bool(self.offload) or self.expert_places > 0

    @property
    def total_device_bytes(self) -> int:
        return sum(self.device_bytes.values())

    @property
    def total_other_device_bytes(self) -> int:
        return sum(self.other_device_bytes.values())

    @property
    def total_host_bytes(self) -> int:
        return sum(self.host_bytes.values())


def place(sizing: Sizing, capacity: int, composition: Composition, cpu_experts: int = 0) -> Placement:
    """The placement that offloads least: the parts that the user named, else nothing, the KV cache, or weights too.
    cpu_experts: see `Placement`, where experts are on the host.

    It may exceed the machine's memory, see `shortage`.
    """
    if sizing.options.offload is not None:
        return _Filling(sizing, capacity, composition, sizing.options.offload, cpu_experts).placement()
    choices = [frozenset[str](), frozenset({"kv"}), frozenset({"weights", "kv"})]
    if sizing.num_experts:  # of which a token reads a few, while it reads all of its cache
        choices[1] = frozenset({"weights"})
    if sizing.target.indexer is not None:  # a pass reads as much of a cache on the host whatever its length
        choices = [frozenset[str](), frozenset({"weights", "kv"})]
    if not sizing.num_growing:  # no tiles to offload
        choices = [frozenset[str](), frozenset({"weights"})]
    if sizing.hardware.is_cpu and sizing.options.device_memory is None:
        choices = choices[:1]  # one memory: offloading frees nothing
    for offload in choices[:-1]:
        if _least_device_bytes(sizing, capacity, offload) <= device_room(sizing):
            placement = _Filling(sizing, capacity, composition, offload, cpu_experts).placement()
            if shortage(sizing, placement) is None:
                return placement
    return _Filling(sizing, capacity, composition, choices[-1], cpu_experts).placement()


def _least_device_bytes(sizing: Sizing, capacity: int, offload: frozenset[str]) -> int:
    """The least device bytes if only the parts in `offload` may be on the host."""
    layers = 0 if "weights" in offload else sizing.all_layers_bytes + sizing.experts_bytes()
    tiles = 0 if "kv" in offload else sizing.num_growing * sizing.num_tiles(capacity) * sizing.num_sequences
    return layers + tiles * sizing.tile_bytes(capacity)


def shortage(sizing: Sizing, placement: Placement) -> str | None:
    """The memory that is short: "12.1 GB of device memory, 8.0 GB are free". None if the placement fits."""
    hardware = sizing.hardware
    tiers = [
        ("device memory", placement.total_device_bytes, device_room(sizing)),
        ("host memory", placement.total_host_bytes, sizing.host_room),
    ]
    if hardware.is_cpu:
        others = placement.total_other_device_bytes * (hardware.num_devices - 1)
        total = placement.total_device_bytes + others + placement.total_host_bytes
        tiers = [("memory", total, sizing.host_room)]
        if sizing.options.device_memory is not None:
            tiers.insert(0, ("device memory", placement.total_device_bytes, device_room(sizing)))
    for name, needed, free in tiers:
        if needed > free:
            return f"{needed / 1e9:.3g} GB of {name}, {free / 1e9:.3g} GB are free"
    return None


def device_room(sizing: Sizing) -> int:
    """Bytes that may be used on each device."""
    cap = sizing.options.device_memory
    free = sizing.hardware.device_free_bytes
    return free if cap is None else min(free, int(cap * 1e9))


@dataclass(frozen=True)
class _Filling:
    """A device filled with as much of a request as fits; the parts in `offload` may be on the host. Layers and slots
    are counted once for the model, tiles for each sequence. on_cpu: see `Placement.cpu_experts`."""

    sizing: Sizing
    capacity: int
    composition: Composition
    offload: frozenset[str]
    on_cpu: int

    def placement(self) -> Placement:
        sizing, layers = self.sizing, self._most_layers()
        tiles, slots = self._all_tiles, self._most_slots(layers)
        if "kv" in self.offload and not self._block_slots:
            slots = self._best_slots(layers, slots) if slots else 0
            tiles = self._most_tiles(layers, slots)
        tiles = 0 if self._block_slots else tiles
        bits, places = self._link_bits, self._most_places(layers, tiles, slots)
        staged = staged_experts(sizing, self._expert_rows, self._slots_bytes(slots, first=False)) if slots else 0
        several = sizing.num_devices > 1
        return Placement(
            offload=tuple(sorted(self.offload)),
            resident_layers=layers,
            resident_tiles=tiles,
            device_bytes=self._device(layers, tiles, slots, places),
            other_device_bytes=self._device(layers, tiles, slots, places, first=False) if several else {},
            host_bytes=self._host(layers, tiles, slots, places),
            page_tokens=PAGE_TOKENS,
            window_pages=sizing.window_pages(self.capacity),
            checkpoints=sizing.num_checkpoints,
            tile_tokens=sizing.tile_tokens(self.capacity),
            rows=sizing.rows,
            prefill_block=PREFILL_BLOCK,
            fused_prefill=sizing.fused_prefill,
            link_bytes_per_second=sizing.known_link_rate,
            link_bits=bits,
            raw_pages=sizing.raw_pages(self.capacity, tiles) if bits < 16 else 0,
            weight_link_bits=self._weight_link_bits(layers),
            staging_tiles=NUM_STAGING,
            expert_slots=slots,
            cpu_experts=self._cpu_experts,
            shares_experts=self._cpu_experts > 0 and sizing.shares_experts,
            expert_places=places,
            expert_rows=self._expert_rows,
            staged_experts=staged,
            prefill_bytes=prefill_bytes(sizing, self._expert_rows, staged) if slots else 0,
            block_slots=self._block_slots,
            ngram_table="file" if sizing.reads_ngrams else "host",
            ngram_rows=sizing.ngram_rows if sizing.reads_ngrams else 0,
            table="host" if self._table else "file" if sizing.maps_table else "device",
        )

    def _most_layers(self) -> int:
        """The first layers that stay, without their experts: all of them if they have room, which need no staging."""
        every, least_tiles = self.sizing.target.num_layers, self._least_tiles
        if "weights" not in self.offload:
            return every
        if not self._streams and self._total(every, least_tiles, self._least_slots) <= device_room(self.sizing):
            return every
        others = self._total(0, least_tiles, self._least_slots)
        return self._most(every - 1, others, self.sizing.layers_bytes)

    def _most_slots(self, layers: int) -> int:
        """Slots for the experts of each layer beside so many layers and the fewest tiles; 0 if all experts stay."""
        if not self._least_slots:
            return 0
        others = self._total(layers, self._least_tiles, self._least_slots) - self._slots_bytes(self._least_slots)
        return max(self._least_slots, self._most(self.sizing.num_experts, others, self._slots_bytes))

    def _most_places(self, layers: int, tiles: int, slots: int) -> int:
        """Places for the experts of each layer in host memory, or on a CPU in its memory: 0 if all have room there or
        are on the device, and no fewer than a token uses."""
        sizing, hardware = self.sizing, self.sizing.hardware
        experts, others = sizing.target.experts, sizing.num_devices - 1
        if experts is None or not (slots or hardware.is_cpu):
            return 0

        def fits(places: int) -> bool:
            used = sum(self._host(layers, tiles, slots, places).values())
            if hardware.is_cpu:
                used += sum(self._device(layers, tiles, slots, places).values())
                used += others * sum(self._device(layers, tiles, slots, places, first=False).values()) if others else 0
            return used <= sizing.host_room

        least = max(experts.used, LEAST_SLOTS)
        return 0 if fits(0) or least >= experts.count else max(least, largest(fits, experts.count - 1))

    def _most_tiles(self, layers: int, slots: int) -> int:
        """Tiles that have room beside so many layers and slots."""
        others = self._total(layers, 0, slots) - sum(self._of_tiles(0).values())
        return self._most(self._all_tiles, others, lambda number: sum(self._of_tiles(number).values()))

    def _best_slots(self, layers: int, most: int) -> int:
        """The number of slots, up to `most`, beside tiles for what they leave."""
        share, tile = 1.0 - self._whole / self.sizing.target.num_expert_layers, self.sizing.tile_bytes(self.capacity)

        def streamed(slots: int) -> int:
            return (self._all_tiles - self._most_tiles(layers, slots)) * tile

        return best_slots(self.sizing, self.composition, share, self._least_slots, most, streamed)

    def _most(self, total: int, others: int, used: Callable[[int], int]) -> int:
        """The largest number, up to `total`, that fits beside `others` bytes."""
        room = device_room(self.sizing) - others
        return 0 if self._streams else largest(lambda number: used(number) <= room, total)

    def _total(self, layers: int, tiles: int, slots: int) -> int:
        return sum(self._device(layers, tiles, slots).values())

    def _device(self, layers: int, tiles: int, slots: int, places: int = 0, *, first: bool = True) -> dict[str, int]:
        """Bytes by purpose of the first device, or of each other one."""
        sizing, bits = self.sizing, self._weight_link_bits(layers)
        sizes = {**(self._fixed if first else self._fixed_of_others)}
        sizes["target layers"] = sizing.layers_bytes(layers)
        sizes["expert slots"] = self._slots_bytes(slots, first=first)
        sizes["target experts"] = 0 if slots else sizing.experts_bytes(places)
        if first and self._of_head(1):
            sizes["draft experts"] = 0 if slots else self._of_head(places)
        sizes["target embeddings"] -= self._table
        if layers < sizing.target.num_layers:
            opened = sizing.layer_bytes if bits < 16 else 0
            sizes["weight staging"] = NUM_STAGING * sizing.home_bytes(bits) + opened
        if self._block_slots:
            beside = sizing.beside_blocks_bytes(self.capacity, self._block_slots)
            sizes["block cache"] = sizing.block_cache_bytes(self._block_slots) + beside
        elif "kv" in self.offload:
            sizes["kv staging"] = (NUM_STAGING + (self._link_bits < 16)) * sizing.tile_bytes(self.capacity)
        if "kv" in self.offload:
            sizes["hidden rows"] = sizing.hidden_bytes(NUM_ROW_SLOTS * self._expert_rows)
        return _some(sizing.of_all(sizes) | self._of_tiles(tiles))

    def _of_tiles(self, tiles: int) -> dict[str, int]:
        """Device bytes that depend on the number of resident tiles."""
        sizing, moved = self.sizing, 0
        rows = self.capacity
        if "kv" in self.offload:
            rows, moved = 0, sizing.num_tiles(self.capacity) - tiles // sizing.num_growing
        arena = sizing.arena_bytes(self.capacity, self.composition, rows=rows, prefill_tiles=moved)
        return sizing.of_all({"arena": arena, "kv cache": tiles * sizing.tile_bytes(self.capacity)})

    def _slots_bytes(self, slots: int, *, first: bool = True) -> int:
        of_layers = slots_bytes(self.sizing, slots, self._whole, self._least_prefill)
        return of_layers + (slots * self._of_head(1) if first else 0)

    def _host(self, layers: int, tiles: int, slots: int, places: int) -> dict[str, int]:
        """Bytes by purpose on the hosts, for all devices."""
        sizing, streams_cache = self.sizing, "kv" in self.offload
        each = {
            "state checkpoints": sizing.checkpoint_bytes,
            "target layers": sizing.homes_bytes(layers, self._weight_link_bits(layers)),
            "target experts": sizing.experts_bytes(places) if slots else 0,
            "target embeddings": self._table,
            "n-gram tables": 0 if sizing.reads_ngrams else sizing.ngram_tables_bytes,
            "n-gram rows": sizing.ngram_rows_bytes if sizing.reads_ngrams else 0,
            "hidden rows": sizing.hidden_bytes(self.capacity) if streams_cache else 0,
            "gathered chunks": self._gathered if streams_cache else 0,
            **sizing.host_cache_bytes(self.capacity, tiles, self._link_bits),
        }
        host = {name: size * sizing.num_devices for name, size in each.items()}
        return _some(sizing.of_all(host | {"draft experts": self._of_head(places) if slots else 0}))

    @property
    def _gathered(self) -> int:
        """Bytes of parts of the cache that are gathered on the host, for each device."""
        if self._block_slots:
            return self.sizing.gathered_bytes(self._block_slots)
        return self.sizing.fetched_bytes(self.capacity, self.composition)

    @cached_property
    def _block_slots(self) -> int:
        """Slots of each layer for blocks of a cache on the host from which rows choose; 0 without such."""
        if "kv" not in self.offload or self.sizing.target.indexer is None:
            return 0
        return self.sizing.block_slots(self.capacity, device_room(self.sizing) // BLOCK_SHARE)

    @cached_property
    def _streams(self) -> bool:
        """Whether all named parts are on the host: on a CPU whose device has no bytes of its own."""
        return self.sizing.hardware.is_cpu and self.sizing.options.device_memory is None

    @cached_property
    def _link_bits(self) -> int:
        return link_bits(self.sizing, self.composition) if "kv" in self.offload else 16

    def _weight_link_bits(self, layers: int) -> int:
        return self._fewest_weight_bits if layers < self.sizing.target.num_layers else 16

    @cached_property
    def _fewest_weight_bits(self) -> int:
        return weight_link_bits(self.sizing, self.composition) if "weights" in self.offload else 16

    @cached_property
    def _table(self) -> int:
        """Bytes of the embedding's table if it is on the host."""
        return self.sizing.table_bytes if self.offload and self.sizing.may_embed_on_host else 0

    @property
    def _expert_rows(self) -> int:
        return expert_rows(self.sizing, self.capacity, streamed="weights" in self.offload)

    @cached_property
    def _least_prefill(self) -> int:
        return prefill_bytes(self.sizing, self._expert_rows, least_staged(self.sizing))

    @cached_property
    def _fixed(self) -> dict[str, int]:
        return fixed_bytes(self.sizing, self.capacity, self.composition, streamed="weights" in self.offload)

    @cached_property
    def _fixed_of_others(self) -> dict[str, int]:
        streamed = "weights" in self.offload
        return fixed_bytes(self.sizing, self.capacity, self.composition, first=False, streamed=streamed)

    def _of_head(self, most: int) -> int:
        """Bytes of the experts of the next-token head, see `Sizing.head_experts`."""
        return self.sizing.head_experts(self.composition, most)

    @property
    def _all_tiles(self) -> int:
        return self.sizing.num_growing * self.sizing.num_tiles(self.capacity)

    @property
    def _least_tiles(self) -> int:
        return 0 if "kv" in self.offload else self._all_tiles

    @cached_property
    def _least_slots(self) -> int:
        return min(LEAST_SLOTS, self.sizing.num_experts) if "weights" in self.offload else 0

    @cached_property
    def _cpu_experts(self) -> int:
        return self.on_cpu if self._least_slots else 0

    @property
    def _whole(self) -> int:
        """The layers whose experts the CPU runs, all of them."""
        return 0 if self.sizing.shares_experts else self._cpu_experts


def _some(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that are not 0."""
    return {name: size for name, size in sizes.items() if size}


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, by bisection that tries the limit first; 0 if none fits."""
    low, high, middle = 0, limit, limit
    while low < high:
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return low
