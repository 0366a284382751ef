"""Placement: layers and tiles on the device as far as they fit, the rest on the host.

Weights come first, since the retrieval level reads all of them in every inner pass; tiles take the remaining memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offload.fields import LATER
from offload.plan.bits import link_bits, weight_link_bits
from offload.plan.composition import Composition
from offload.plan.fixed import fixed_bytes
from offload.plan.options import PAGE_TOKENS
from offload.plan.routing import layers_wanted_bytes
from offload.plan.sizing import NUM_ROW_SLOTS, NUM_STAGING, PREFILL_BLOCK, Sizing

LEAST_SLOTS = 2  # one is used while an expert crosses the link to the other
_SPLITS = 16  # splits of a device's memory between experts and cache that are compared


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of weights and caches, and the pieces in which they are moved and computed.

    offload: the parts, "weights" or "kv", that may be on the host. resident_layers, resident_tiles: the number of
    layers with weights on the device, without their experts, and of tiles of all layers together. expert_slots: of
    each layer, for experts on the device; 0 if all are there. cpu_experts: the number of layers whose experts the CPU
    runs in a pass, the last ones that have some. The rest crosses the link. Bytes are by
    purpose: of the first device, of each other device if there are several, and of all ranks on the hosts. They are for
    all sequences that run at a time; each has that number of tiles. Sizes of pages and tiles are in tokens.
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
    embeds_on_host: bool = False  # of the embedding's table a pass reads only a few rows

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
        return _fill(sizing, capacity, composition, sizing.options.offload, cpu_experts)
    choices = [frozenset[str](), frozenset({"kv"}), frozenset({"weights", "kv"})]
    if sizing.num_experts:  # of which a token reads a few, while it reads all of its cache
        choices[1] = frozenset({"weights"})
    if not sizing.num_growing:  # no tiles to offload
        choices = [frozenset[str](), frozenset({"weights"})]
    if sizing.hardware.is_cpu and sizing.options.device_memory is None:
        choices = choices[:1]  # one memory: offloading frees nothing
    for offload in choices[:-1]:
        if _least_device_bytes(sizing, capacity, offload) <= device_room(sizing):
            placement = _fill(sizing, capacity, composition, offload, cpu_experts)
            if shortage(sizing, placement) is None:
                return placement
    return _fill(sizing, capacity, composition, choices[-1], cpu_experts)


def _least_device_bytes(sizing: Sizing, capacity: int, offload: frozenset[str]) -> int:
    """The least device bytes if only the parts in `offload` may be on the host."""
    layers = 0 if "weights" in offload else sizing.all_layers_bytes + sizing.experts_bytes
    tiles = 0 if "kv" in offload else sizing.num_growing * sizing.num_tiles(capacity) * sizing.num_sequences
    return layers + tiles * sizing.tile_bytes(capacity)


def shortage(sizing: Sizing, placement: Placement) -> str | None:
    """The memory that is short: "12.1 GB of device memory, 8.0 GB are free". None if the placement fits."""
    hardware = sizing.hardware
    tiers = [
        ("device memory", placement.total_device_bytes, device_room(sizing)),
        ("host memory", placement.total_host_bytes, hardware.host_free_bytes * hardware.num_hosts),
    ]
    if hardware.is_cpu:
        others = placement.total_other_device_bytes * (hardware.num_devices - 1)
        total = placement.total_device_bytes + others + placement.total_host_bytes
        tiers = [("memory", total, hardware.host_free_bytes * hardware.num_hosts)]
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


def _fill(
    sizing: Sizing, capacity: int, composition: Composition, offload: frozenset[str], cpu_experts: int
) -> Placement:
    """The placement with as much on the device as fits; the parts in `offload` may be on the host. Layers are counted
    once for the model, tiles for each sequence."""
    num_layers, growing, count = sizing.target.num_layers, sizing.num_growing, sizing.num_tiles(capacity)
    tile = sizing.tile_bytes(capacity)
    streams = sizing.hardware.is_cpu and sizing.options.device_memory is None  # then all named parts are offloaded

    bits = link_bits(sizing, composition) if "kv" in offload else 16
    weight_bits = weight_link_bits(sizing, composition) if "weights" in offload else 16
    home = sizing.home_bytes(weight_bits)
    table = sizing.table_bytes if offload and sizing.may_embed_on_host else 0
    fixed = fixed_bytes(sizing, capacity, composition)
    experts_of_head, slot_of_head = sizing.head_experts(composition)

    def of_tiles(tiles: int) -> dict[str, int]:
        """Device bytes that depend on the number of resident tiles."""
        rows, moved = (0, count - tiles // growing) if "kv" in offload else (capacity, 0)
        arena = sizing.arena_bytes(capacity, composition, rows=rows, prefill_tiles=moved)
        return sizing.of_all({"arena": arena, "kv cache": tiles * tile})

    least_slots = min(LEAST_SLOTS, sizing.num_experts) if "weights" in offload else 0
    cpu_experts = cpu_experts if least_slots else 0

    def slots_bytes(slots: int, *, first: bool = True) -> int:
        return sizing.slots_bytes(slots, cpu_experts) + (slots * slot_of_head if first else 0)

    def device(
        layers: int, tiles: int, fixed: Mapping[str, int] = fixed, slots: int = least_slots, *, first: bool = True
    ) -> dict[str, int]:
        sizes = {**fixed, "target layers": sizing.layers_bytes(layers)}
        sizes["expert slots"] = slots_bytes(slots, first=first)
        sizes["target experts"] = 0 if slots else sizing.experts_bytes
        if experts_of_head and first:
            sizes["draft experts"] = 0 if slots else experts_of_head
        sizes["target embeddings"] -= table
        if layers < num_layers:
            sizes["weight staging"] = NUM_STAGING * home + (sizing.layer_bytes if weight_bits < 16 else 0)
        if "kv" in offload:
            sizes["kv staging"] = (NUM_STAGING + (bits < 16)) * tile
            sizes["hidden rows"] = sizing.hidden_bytes(NUM_ROW_SLOTS * PREFILL_BLOCK)
        return {name: size for name, size in (sizing.of_all(sizes) | of_tiles(tiles)).items() if size}

    def most(total: int, others: int, used: Callable[[int], int]) -> int:
        """The largest number, up to `total`, that fits beside `others` bytes."""
        room = device_room(sizing) - others
        return 0 if streams else largest(lambda number: used(number) <= room, total)

    layers, tiles = num_layers, growing * count
    if "weights" in offload:
        least_tiles = 0 if "kv" in offload else tiles
        if streams or sum(device(num_layers, least_tiles).values()) > device_room(sizing):
            layers = most(num_layers - 1, sum(device(0, least_tiles).values()), sizing.layers_bytes)
    weight_bits = weight_bits if layers < num_layers else 16
    slots = least_slots
    if slots:
        least_tiles = 0 if "kv" in offload else tiles
        others = sum(device(layers, least_tiles, slots=0).values()) - sizing.experts_bytes - experts_of_head
        slots = max(slots, most(sizing.num_experts, others, slots_bytes))
    if "kv" in offload:
        beside = sum(device(layers, 0, slots=slots).values()) - slots_bytes(slots)

        def most_tiles(slots: int) -> int:
            others = beside - sum(of_tiles(0).values()) + slots_bytes(slots)
            return most(growing * count, others, lambda number: sum(of_tiles(number).values()))

        def streamed(slots: int) -> int:
            return (growing * count - most_tiles(slots)) * tile

        slots = _best_slots(sizing, composition, least_slots, slots, streamed, cpu_experts) if slots else 0
        tiles = most_tiles(slots)
    devices = sizing.num_devices
    of_others = fixed_bytes(sizing, capacity, composition, first=False) if devices > 1 else {}
    cache = sizing.host_cache_bytes(capacity, tiles, bits)
    host = {
        "state checkpoints": sizing.checkpoint_bytes * devices,
        "target layers": sizing.homes_bytes(layers, weight_bits) * devices,
        "target experts": sizing.experts_bytes * devices if slots else 0,
        "draft experts": experts_of_head if slots else 0,
        "target embeddings": table * devices,
        "hidden rows": sizing.hidden_bytes(capacity) * devices if "kv" in offload else 0,
        "gathered chunks": sizing.fetched_bytes(capacity, composition) * devices if "kv" in offload else 0,
        **{name: size * devices for name, size in cache.items()},
    }
    host = {name: size for name, size in sizing.of_all(host).items() if size}
    return Placement(
        offload=tuple(sorted(offload)),
        resident_layers=layers,
        resident_tiles=tiles,
        device_bytes=device(layers, tiles, slots=slots),
        other_device_bytes=device(layers, tiles, of_others, slots, first=False) if devices > 1 else {},
        host_bytes=host,
        page_tokens=PAGE_TOKENS,
        window_pages=sizing.window_pages(capacity),
        checkpoints=sizing.num_checkpoints,
        tile_tokens=sizing.tile_tokens(capacity),
        rows=sizing.rows,
        prefill_block=PREFILL_BLOCK,
        fused_prefill=sizing.fused_prefill,
        link_bytes_per_second=_link_rate(sizing),
        link_bits=bits,
        raw_pages=sizing.raw_pages(capacity, tiles) if bits < 16 else 0,
        weight_link_bits=weight_bits,
        staging_tiles=NUM_STAGING,
        expert_slots=slots,
        cpu_experts=cpu_experts,
        embeds_on_host=table > 0,
    )


def _best_slots(
    sizing: Sizing, composition: Composition, least: int, most: int, streamed: Callable[[int], int], cpu_experts: int
) -> int:
    """The number of expert slots with which the fewest bytes cross the link in a round: experts in every pass with the
    target's weights, the cache once. streamed: bytes of the cache beside so many slots."""
    drafted = composition.gamma if composition.inner is not None else 0
    share = 1.0 - cpu_experts / sizing.num_expert_layers

    def crossing(slots: int) -> float:
        of_row, of_rows = (layers_wanted_bytes(sizing.shard, sizing.itemsize, rows, slots) for rows in (1, drafted + 1))
        return share * (drafted * of_row + of_rows) + streamed(slots)

    tried = [least + (most - least) * step // _SPLITS for step in range(_SPLITS + 1)]
    return min(reversed(tried), key=crossing)


def _link_rate(sizing: Sizing) -> float | None:
    """Bytes per second over the link, as set by the user or measured for a GPU; None: not known."""
    hardware = sizing.hardware
    if sizing.options.link_gbps is not None:
        return sizing.options.link_gbps * 1e9
    return hardware.link_rate if hardware.rates.measured and not hardware.is_cpu else None


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, by bisection that tries the limit first; 0 if none fits."""
    low, high, middle = 0, limit, limit
    while low < high:
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return low
