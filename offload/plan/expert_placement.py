"""The placement of experts in bytes: their slots on a device, and what a prefill has of these (docs/memory.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from offload.config.model import ModelConfig
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.plan.composition import Composition
from offload.plan.sizing import PREFILL_BLOCK, Sizing
from offload.speed.cpu_pass import runs_experts
from offload.speed.routing import layers_wanted_bytes

LEAST_SLOTS = 2  # one is used while an expert crosses the link to the other
CPU_EXPERT_ROWS = 4096  # of a prefill, over which a layer's experts run at once, at most
GPU_EXPERT_ROWS = 8192
_ROWS_OF_EXPERT = 256  # for which a CPU makes an expert's numbers once: more would hardly pay
_EXPERT_ROOM = 2**29  # bytes of what experts make of these rows, at most
_STAGING_ROOM = 2**28  # bytes of the fewest staging slots, at most: half of them are some milliseconds of a link
_LEAST_STAGED = 64  # staging slots, if they have no more bytes
_PANEL_ROWS = 64 * 64  # of experts' matrices that up to 64 threads of a CPU decode at a time
_ALIGNMENT = 256  # bytes, of the parts of a prefill's memory
_SPLITS = 16  # splits of a device's memory between experts and cache that are compared


def expert_rows(sizing: Sizing, capacity: int, *, streamed: bool = False) -> int:
    """Rows of a prefill over which a layer's experts run at once: whole blocks, on a CPU so many that experts are
    decoded seldom, on a GPU so many that they are fetched seldom, if they are `streamed`. A block where torch's
    operators run them: other rows would change a row's bits."""
    experts, hardware = sizing.shard.experts, sizing.hardware
    if experts is None:
        return PREFILL_BLOCK
    if hardware.is_cpu:
        runs, most = runs_experts(sizing.shard, hardware), CPU_EXPERT_ROWS
        most = min(most, _ROWS_OF_EXPERT * experts.count // experts.used)
    else:
        runs, most = streamed and _run_by_a_gpu(sizing), GPU_EXPERT_ROWS
    made = experts.used * (experts.network.size + experts.row_size(sizing.shard.hidden_size)) * sizing.itemsize
    blocks = min(most, _EXPERT_ROOM // made) // PREFILL_BLOCK
    return PREFILL_BLOCK * (max(min(blocks, -(-capacity // PREFILL_BLOCK)), 1) if runs else 1)


def least_staged(sizing: Sizing) -> int:
    """The fewest staging slots of a prefill: two banks, each of which fills while the other is used."""
    most = _STAGING_ROOM // max(sizing.largest_expert_bytes, 1)
    return min(max(most, LEAST_SLOTS), _LEAST_STAGED, sizing.num_experts)


def staged_experts(sizing: Sizing, rows: int, num_bytes: int) -> int:
    """Staging slots of a prefill in the memory of slots, `num_bytes`, beside what experts make of `rows` rows: one for
    each of a layer's experts, if there is room. Each saves a copy in every layer for all later rows; a slot of a layer
    saves one in that layer."""
    room = num_bytes - prefill_bytes(sizing, rows, 0)
    return max(min(room // max(sizing.largest_expert_bytes, 1), sizing.num_experts), least_staged(sizing))


def slots_bytes(sizing: Sizing, slots: int, cpu_experts: int, prefill: int) -> int:
    """Bytes of slots for experts on each device: so many of each layer, but for the layers whose experts the CPU runs,
    and no less than a prefill has in its turn. 0 without slots."""
    return max(slots * sizing.first_experts(sizing.target.num_expert_layers - cpu_experts), prefill) if slots else 0


def prefill_bytes(sizing: Sizing, rows: int, staged: int) -> int:
    """Bytes that a prefill has of the slots' memory: `staged` slots, and what experts make of `rows` rows at once."""
    of_slots = -(-staged * sizing.largest_expert_bytes // _ALIGNMENT) * _ALIGNMENT
    kinds = [dict(_made(sizing, kind, rows)) for kind, _ in sizing.shard.kinds]
    made = {name: max(kind.get(name, 0) for kind in kinds) for name in ("inner", "both", "made", "scratch")}
    return of_slots + sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in made.values())


def made_bytes(sizing: Sizing, layer: ModelConfig, rows: int) -> int:
    """Bytes of what the experts of `layer.block` make of a prefill's `rows` rows, where kernels run them: on a GPU
    without scores and sums, on a CPU with everything."""
    return sum(size for _, size in _made(sizing, layer, rows))


def _made(sizing: Sizing, layer: ModelConfig, rows: int) -> Iterator[tuple[str, int]]:
    """The parts of `made_bytes` as kernels take them from a prefill's room."""
    if (experts := layer.block.experts) is None:
        return
    size, row = experts.network.size, experts.row_size(layer.hidden_size)
    pairs, item = rows * experts.used, sizing.itemsize
    if _run_by_a_gpu(sizing):
        yield "inner", pairs * size * item
        yield "made", pairs * row * item
        if len({*layer.block.encodings.experts[:-1]}) > 1:  # gate and up in two encodings are multiplied apart
            yield "both", pairs * 2 * size * item
    elif sizing.hardware.packs and sizing.hardware.is_cpu:
        lines = pairs + min(pairs, experts.count) * (EXPERT_ALIGNMENT - 1)
        lists = 12 * pairs + 8 * (lines + experts.count) + 4 * rows * (layer.hidden_size + experts.num_scores)
        laid = rows * row * item + _PANEL_ROWS * max(size, row) * item
        yield "scratch", lines * (size + row) * item + lists + laid + 12 * 64  # each part of a whole line


def _run_by_a_gpu(sizing: Sizing) -> bool:
    return sizing.hardware.has_kernels and not sizing.hardware.is_cpu and sizing.itemsize == 2


def best_slots(
    sizing: Sizing, composition: Composition, share: float, least: int, most: int, streamed: Callable[[int], int]
) -> int:
    """The number of slots, from `least` to `most`, with which the fewest bytes cross the link in a round: experts in
    every pass with the target's weights, the cache once. share: of the layers with experts that have slots. streamed:
    bytes of the cache beside so many slots."""
    drafted = composition.gamma if composition.inner is not None else 0

    def crossing(slots: int) -> float:
        of_row, of_rows = (layers_wanted_bytes(sizing.shard, sizing.itemsize, rows, slots) for rows in (1, drafted + 1))
        return share * (drafted * of_row + of_rows) + streamed(slots)

    tried = [least + (most - least) * step // _SPLITS for step in range(_SPLITS + 1)]
    return min(reversed(tried), key=crossing)
