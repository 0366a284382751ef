"""A plan as text: pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from triforce_cli.render import duration, gigabytes, latency, lengths_of, levels_of

if TYPE_CHECKING:
    from offload.plan.config import ModelConfig
    from offload.plan.hardware import Hardware
    from offload.plan.planner import Plan

_BAR = 40  # characters


def report(plan: Plan, target: ModelConfig, hardware: Hardware, *, name: str) -> str:
    """What `triforce plan` prints: at most 80 columns, but for the notes."""
    return "\n".join([*_head(plan, hardware, name), "", *_memory(plan, target, hardware), "", *_speed(plan)]) + "\n"


def _head(plan: Plan, hardware: Hardware, name: str) -> Iterator[str]:
    cards = f"{hardware.num_devices} x {hardware.device_name}" if hardware.num_devices > 1 else hardware.device_name
    yield f"{name}, {plan.capacity:,} tokens ({plan.max_tokens:,} of them new), {plan.dtype}, on {cards}"
    rates = hardware.rates
    kind = "measured" if rates.measured else "typical"
    yield f"link {gigabytes(rates.to_device)}/s, device memory {gigabytes(rates.device_read)}/s ({kind} rates)"


def _memory(plan: Plan, target: ModelConfig, hardware: Hardware) -> Iterator[str]:
    title = "each device" if plan.num_devices > 1 else "device"
    yield from _tier(title, plan.device_bytes, hardware.device_free_bytes, _residency(plan, target))
    if plan.host_bytes:
        yield from _tier("host", plan.host_bytes, hardware.host_free_bytes, {})
    else:
        yield "host         nothing: nothing is offloaded and nothing streams"


def _tier(title: str, sizes: dict[str, int], free: int, remarks: dict[str, str]) -> Iterator[str]:
    used = sum(sizes.values())
    filled = min(round(_BAR * used / max(free, 1)), _BAR)
    yield f"{title:<13}{gigabytes(used):>9} of {gigabytes(free)}  [{'#' * filled}{'.' * (_BAR - filled)}]"
    for purpose, size in sorted(sizes.items(), key=lambda item: -item[1]):
        yield f"  {purpose:<20}{gigabytes(size):>9}  {remarks.get(purpose, '')}".rstrip()


def _residency(plan: Plan, target: ModelConfig) -> dict[str, str]:
    """What share of it is on the device."""
    tiles = target.num_layers * -(-plan.capacity // plan.tile_tokens)
    return {
        "target layers": f"{plan.resident_layers} of {target.num_layers} layers",
        "kv cache": f"{min(plan.resident_tiles, tiles)} of {tiles} tiles of {plan.tile_tokens:,} tokens",
    }


def _speed(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    yield f"levels       {levels_of(plan)}"
    if plan.gamma:
        yield f"{'':13}{lengths_of(plan)}"
    first, rate = duration(predicted.first_token_seconds), latency(predicted.seconds_per_token)
    yield f"predicted    first token {first}, then {rate} a token"
    if len(plan.levels) > 1:
        times = predicted.plain_seconds_per_token / predicted.seconds_per_token
        plain = latency(predicted.plain_seconds_per_token)
        yield f"             without speculation {plain} a token: {times:.1f} times as long"
        passes = [f"full pass {latency(predicted.full_pass_seconds)}"]
        if "retrieval" in plan.levels:
            passes.append(f"retrieval {latency(predicted.retrieval_pass_seconds)}")
        if "draft" in plan.levels:
            passes.append(f"draft {latency(predicted.draft_pass_seconds)}")
        yield f"             {', '.join(passes)}"
        yield f"             {predicted.tokens_per_round:.1f} tokens a full pass, {predicted.tokens_drafted} drafted"
    for note in plan.notes:
        yield f"note         {note}"
