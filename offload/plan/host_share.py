"""The share of streamed tiles that the processor attends to on the host instead, so that link and processor end a pass
over the full cache at the same time."""

from __future__ import annotations

from dataclasses import replace

from offload.plan.cost import Cost
from offload.plan.options import Options
from offload.plan.sizing import host_slowdown

_WORTH_IT = 0.95  # times the full pass without it
_DESKTOP = 60 / 25  # what a desktop's memory gives the processor beside a link, as a multiple of the link's rate


def shared(cost: Cost) -> Cost:
    """`cost` with tiles attended to on the host: as many as the user says, or as many as are best for passes over what
    it drafts, if that is worth it. Only on a CPU, where it is chosen if both rates are given."""
    options, placement = cost.sizing.options, cost.placement
    number = _number(cost, cost.num_tiles - placement.resident_tiles)
    if "kv" not in placement.offload or not cost.sizing.hardware.is_cpu or not number:
        return cost
    given, sizing = _host_rate(options), cost.sizing
    placed = replace(
        placement,
        host_tiles=number,
        attended_bytes=number * sizing.tile_bytes(cost.capacity) * sizing.num_devices,
        host_bytes_per_second=given and given / sizing.hardware.ranks_per_host,
    )
    changed = replace(cost, placement=placed)
    if options.host_attention is not None:
        return changed
    rows = cost.gamma + 1
    return changed if changed.full_pass(rows) <= _WORTH_IT * cost.full_pass(rows) else cost


def _number(cost: Cost, num_streamed: int) -> int:
    """Tiles of all layers together, of `num_streamed` that would stream."""
    options = cost.sizing.options
    if options.host_attention is not None:
        return round(options.host_attention * num_streamed)
    if options.link_gbps is None or options.host_gbps is None:
        return 0
    rows, tile_bytes = cost.gamma + 1, cost.cache_bytes / cost.num_tiles
    slowdown = cost.sizing.hardware.ranks_per_host * host_slowdown(rows, cost.sizing.group)
    link, host = options.link_gbps * 1e9, options.host_gbps * 1e9 / slowdown
    # What the link would take for all, in tiles, less what it moves while the host has nothing to attend to: at the sum
    # of both rates, of which the host has its part.
    total = num_streamed + (cost.streamed_weights - link * cost.besides_attention(rows)) / tile_bytes
    return min(max(round(total * host / (link + host)), 0), num_streamed)


def _host_rate(options: Options) -> float | None:
    """Bytes per second of one host's memory beside its paced links; None: as fast as it goes."""
    if options.host_gbps is not None:
        return options.host_gbps * 1e9
    return None if options.link_gbps is None else options.link_gbps * 1e9 * _DESKTOP
