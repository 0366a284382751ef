"""The share of streamed tiles that the CPU attends to on the host instead, so that link and CPU end a pass
over the full cache at the same time."""

from __future__ import annotations

from dataclasses import replace

from offload.plan.cost import Cost
from offload.plan.hardware import Hardware
from offload.plan.placement import shortage, with_host_tiles
from offload.plan.sizing import host_slowdown

_WORTH_IT = 0.95  # times the full pass without it
_DESKTOP = 60 / 25  # what a desktop's memory gives the CPU beside a link, as a multiple of the link's rate
_LEAST = 0.1  # of what memory gives, that the CPU has even where links could take all


def shared(cost: Cost) -> Cost:
    """`cost` with tiles attended to on the host: as many as the user says, or on a CPU, where both rates are given, as
    many as are best for passes over what it drafts, if that is worth it. On a GPU nobody but the user chooses: there
    the CPU's last bits are not the GPU's (docs/exactness.md)."""
    options, hardware = cost.sizing.options, cost.sizing.hardware
    if "kv" not in cost.placement.offload:
        return cost
    if options.host_attention is not None:
        return _attending(cost, round(options.host_attention * _num_streamed(cost)))
    if not hardware.is_cpu or options.link_gbps is None or options.host_gbps is None:
        return cost
    return _better(cost) or cost


def worth_a_share(cost: Cost) -> tuple[float, float] | None:
    """(share, times as fast): what `--host-attention` would make of a full pass on a GPU whose rates were measured,
    at best. None: nothing to speak of, or it was said already."""
    options, hardware = cost.sizing.options, cost.sizing.hardware
    one_gpu = hardware.num_devices == 1 and not hardware.is_cpu
    spare = hardware.rates.measured and _memory_rate(hardware) > hardware.link_rate
    possible = one_gpu and spare and options.host_attention is None and "kv" in cost.placement.offload
    better = _better(cost) if possible else None
    if better is None:
        return None
    rows = cost.gamma + 1
    return better.placement.host_tiles / _num_streamed(cost), cost.full_pass(rows) / better.full_pass(rows)


def _better(cost: Cost) -> Cost | None:
    """With the best number of tiles, if that fits and is worth it: on the host they lie as they are."""
    rows, number = cost.gamma + 1, _best_number(cost)
    changed = _attending(cost, number)
    fits = shortage(cost.sizing, changed.placement) is None
    return changed if number and fits and changed.full_pass(rows) <= _WORTH_IT * cost.full_pass(rows) else None


def _attending(cost: Cost, number: int) -> Cost:
    """`cost` with `number` tiles of all layers attended to on the host."""
    if not number:
        return cost
    sizing, placement = cost.sizing, with_host_tiles(cost.sizing, cost.capacity, cost.placement, number)
    host_bytes = dict(placement.host_bytes)
    if not sizing.hardware.is_cpu:
        most = min(-(-number // sizing.num_growing) + 1, sizing.num_tiles(cost.capacity))
        needed = sizing.host_attention_bytes(cost.capacity, cost.composition, most)
        host_bytes |= sizing.of_all({"host attention": needed})
    placed = replace(
        placement,
        attended_bytes=number * sizing.tile_bytes(cost.capacity) * sizing.num_devices * sizing.num_sequences,
        host_bytes=host_bytes,
        host_bytes_per_second=_host_rate(cost),
    )
    return replace(cost, placement=placed)


def _best_number(cost: Cost) -> int:
    """Tiles of all layers together, with which link and host end a pass at the same time."""
    rows, tile_bytes, num_streamed = cost.gamma + 1, cost.cache_bytes / cost.num_tiles, _num_streamed(cost)
    link, rate = cost.link_rate / cost.link_share, _host_rate(cost)  # in bytes of tiles as they lie there
    if not rate or not num_streamed:
        return 0
    host = rate / host_slowdown(rows, cost.sizing.group)
    # What the link would take for all, in tiles, less what it moves while the host has nothing to attend to: at the sum
    # of both rates, of which the host has its part. On a GPU that host waits for a tile a layer.
    attending = replace(cost, placement=replace(cost.placement, host_tiles=num_streamed))
    total = (
        num_streamed
        + (cost.streamed_weights / cost.link_share - link * attending.device.besides_attention(rows)) / tile_bytes
    )
    return min(max(round(total * host / (link + host)), 0), num_streamed)


def _num_streamed(cost: Cost) -> int:
    """Tiles of all layers that would stream."""
    return cost.num_tiles - cost.placement.resident_tiles


def _host_rate(cost: Cost) -> float | None:
    """Bytes per second of its memory that each rank's CPU has beside the links. On a CPU None: as fast as it
    goes."""
    options, hardware = cost.sizing.options, cost.sizing.hardware
    if not hardware.is_cpu:
        return max(_memory_rate(hardware) - hardware.link_rate, _LEAST * _memory_rate(hardware))
    if options.host_gbps is not None:
        return options.host_gbps * 1e9 / hardware.ranks_per_host
    return None if options.link_gbps is None else options.link_gbps * 1e9 * _DESKTOP / hardware.ranks_per_host


def _memory_rate(hardware: Hardware) -> float:
    """Bytes per second that a GPU's host memory gives CPU and links together."""
    return hardware.rates.host_read if hardware.rates.links is None else hardware.rates.links
