"""A plan as tables and as JSON. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload.units import size
from triforce_cli import __version__
from triforce_cli.ground.text import (
    NOTHING,
    counted,
    duration,
    gigabytes,
    latency,
    lengths_of,
    levels_of,
    line_text,
)

if TYPE_CHECKING:
    from offload.config.model import ModelConfig
    from offload.plan.cost import Prediction
    from offload.plan.planner import Plan
    from offload.plan.request import Request

_BAR, _BESIDE_BAR = 40, 21  # columns of the bar, and of the text beside it
_LEAST_BAR = 10
_PURPOSE = 17  # columns of the longest purpose in sizing.py
_ALL = "all"  # the row of sums
_LEAST_REMARK = 14  # columns; with fewer, remarks go below their table


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The findings of `triforce plan`. link_given, host_given: the user set the rate of the link, and of host memory.
    longest_context: with --fit. in_16_bits: the prediction for
    the same request in 16 bits everywhere, if the plan uses fewer bits."""

    model: Path
    request: Request
    plan: Plan
    link_given: bool
    host_given: bool
    longest_context: int | None = None
    in_16_bits: Prediction | None = None

    @property
    def origin(self) -> str:
        """The origin of the rates."""
        return "measured" if self.request.hardware.rates.measured else "typical"

    @property
    def link_origin(self) -> str:
        return "given" if self.link_given else self.origin

    @property
    def host_origin(self) -> str:
        return "given" if self.host_given else self.origin

    @property
    def devices(self) -> list[tuple[str, dict[str, int]]]:
        """(title, bytes by purpose) of the first rank's device, and with several ranks of each other one."""
        placement, number = self.plan.placement, self.plan.request.num_devices
        if number == 1:
            return [("device", placement.device_bytes)]
        others = "rank 1" if number == 2 else f"ranks 1-{number - 1}"
        return [("rank 0", placement.device_bytes), (others, placement.other_device_bytes)]

    @property
    def graphs(self) -> tuple[str, ...]:
        """The levels whose passes run as CUDA graphs."""
        from offload.plan.passes import graph_levels

        plan, request = self.plan, self.request
        return graph_levels(plan.composition, plan.placement, request.hardware, request.target, plan.request.dtype)


def report(planned: Planned, *, width: int) -> RenderableType:
    """The report of `triforce plan` in `width` columns."""
    parts = [
        Text("\n".join(_head(planned))),
        _memory(planned, width),
        _bars(planned, width),
        _speed(planned, width),
    ]
    parts += [_labelled("note", note) for note in planned.plan.notes]
    return Group(*[piece for part in parts for piece in (part, Text())][:-1])


def sentence(plan: Plan, device: str) -> str:
    """The plan in a sentence. device: its name."""
    composition, each = plan.composition, latency(plan.predicted.seconds_per_token)
    drafts = f", {lengths_of(composition)}" if composition.gamma else ""
    return (
        f"On {device}: {levels_of(composition)}{drafts}; {_streamed(plan) or 'nothing'} streamed in a full pass; "
        f"predicted {each} a token."
    )


def document(planned: Planned) -> dict[str, Any]:
    """The report as JSON, in bytes and bytes per second."""
    hardware, fit = planned.request.hardware, None
    origin = {"link": planned.link_origin, "host": planned.host_origin, "others": planned.origin}
    if planned.longest_context is not None:
        fit = {"longest_context": planned.longest_context, "limit": planned.request.target.context_limit}
    return {
        "plan": planned.plan.as_dict(),
        "hardware": asdict(hardware) | {"link_rate": hardware.link_rate, "origin": origin},
        "ranks": _ranks(planned.plan),
        "graphs": planned.graphs,
        "fit": fit,
        "in_16_bits": asdict(planned.in_16_bits) if planned.in_16_bits else None,
        "model": str(planned.model),
        "stored_in": list(planned.request.target.stored_in),
        "version": __version__,
    }


def _ranks(plan: Plan) -> list[dict[str, int]]:
    """Each rank's bytes: on its device, on the host, and over its link in a full pass."""
    placement, number = plan.placement, plan.request.num_devices
    devices = [placement.total_device_bytes, *[placement.total_other_device_bytes] * (number - 1)]
    own = {"host_bytes": placement.total_host_bytes // number, "full_link_bytes": plan.predicted.full_link_bytes}
    return [{"rank": rank, "device_bytes": num_bytes} | own for rank, num_bytes in enumerate(devices)]


def _head(planned: Planned) -> Iterator[str]:
    request, hardware = planned.plan.request, planned.request.hardware
    gpus = f"{hardware.num_devices} x {hardware.device_name}" if hardware.num_devices > 1 else hardware.device_name
    tokens = f"{request.capacity:,} tokens ({request.max_tokens:,} of them new)"
    *stored, last = planned.request.target.stored_in or ("",)
    names = f"{', '.join(stored)} and {last}" if stored else last
    dtype = f"{request.dtype} over weights in {names}" if last else request.dtype
    yield f"{line_text(planned.model.name)}, {tokens}, {dtype}, on {gpus}"
    if planned.longest_context is not None:
        limit = planned.request.target.context_limit
        why = "as long as the model knows" if planned.longest_context == limit else f"the model knows {limit:,}"
        yield f"this is the longest context that fits ({why})"
    link, read = gigabytes(hardware.rates.to_device), gigabytes(hardware.rates.device_read)
    if planned.link_origin == planned.origin:
        yield f"link {link}/s, device memory {read}/s ({planned.origin} rates)"
    else:
        yield f"link {link}/s ({planned.link_origin}), device memory {read}/s ({planned.origin})"
    if hardware.link_rate < hardware.rates.to_device:
        yield f"host memory slows each link to {gigabytes(hardware.link_rate)}/s ({planned.host_origin})"


def _memory(planned: Planned, width: int) -> RenderableType:
    """A table of bytes by purpose and memory."""
    plan, hardware = planned.plan, planned.request.hardware
    host, remarks, number = plan.placement.host_bytes, _residency(planned), plan.request.num_devices
    titles, devices = zip(*planned.devices, strict=True)
    tiers = [*devices, host]
    purposes = sorted(devices[0] | host, key=lambda name: -devices[0].get(name, 0) - host.get(name, 0))
    rows = [
        (purpose, *(_size(tier.get(purpose, 0)) for tier in tiers), remarks.get(purpose, "")) for purpose in purposes
    ]
    rows.append((_ALL, *(_size(sum(tier.values())) for tier in tiers), ""))
    if number > 1:
        rows.append(("each rank", *("" for _ in devices), _size(sum(host.values()) // number), ""))
    free = "the same" if hardware.is_cpu else size(hardware.host_free_bytes)
    rows.append(("free", *(size(hardware.device_free_bytes) for _ in devices), free, ""))
    return _table(("bytes", *titles, "host", "on the device"), rows, width)


def _residency(planned: Planned) -> dict[str, str]:
    """The shares of weights and cache that are resident on the device; the rest is streamed."""
    plan, target = planned.plan, planned.request.target
    tiles = len(target.growing) * -(-plan.request.capacity // plan.placement.tile_tokens)
    here, window = min(plan.placement.resident_tiles, tiles), min(target.window, plan.request.capacity)
    arena = "prefill, then retrieved chunks" if plan.composition.budget else "prefill"
    return {
        "arena": arena,
        "hidden rows": f"blocks of {plan.placement.expert_rows} rows in a prefill",
        "target layers": f"{plan.placement.resident_layers} of {target.num_layers} layers",
        "expert slots": _slots(plan, target),
        "target experts": _held(plan, target),
        "window cache": f"{len(target.windowed)} layers' last {window:,} tokens and more",
        "states": f"of {len(target.stateful)} layers, and what came after them",
        "state checkpoints": f"{plan.placement.checkpoints} places to come back to",
        "kv cache": f"{here} of {tiles} tiles of {plan.placement.tile_tokens:,} tokens",
    }


def _held(plan: Plan, target: ModelConfig) -> str:
    """The remark on the bytes of experts in memory; "" for a model without any."""
    if target.experts is None or not (places := plan.placement.expert_places):
        return f"{sum(block.experts.count for block in target.blocks if block.experts):,} experts"
    return f"{places:,} of each layer's {target.experts.count:,} experts, the others in the file"


def _slots(plan: Plan, target: ModelConfig) -> str:
    """The remark on the bytes of expert slots; "" for a model without experts."""
    if target.experts is None:
        return ""
    if plan.placement.cpu_experts == target.num_expert_layers and not plan.placement.shares_experts:
        return "of a prefill"
    return f"{plan.placement.expert_slots:,} of each layer's {target.experts.count:,} experts"


def _bars(planned: Planned, width: int) -> RenderableType:
    """A bar for the use of each memory. A CPU has one memory."""
    hardware = planned.request.hardware
    host = planned.plan.placement.total_host_bytes
    if hardware.is_cpu:
        used = sum(rank["device_bytes"] for rank in _ranks(planned.plan)) + host
        return _bar("memory", used / max(hardware.host_free_bytes, 1), width)
    free = max(hardware.device_free_bytes, 1)
    tiers = [(title, sum(device.values()) / free) for title, device in planned.devices]
    if host:
        tiers.append(("host", host / max(hardware.host_free_bytes, 1)))
    return Group(*(_bar(title, share, width) for title, share in tiers))


def _bar(title: str, share: float, width: int) -> Text:
    columns = max(min(_BAR, width - _BESIDE_BAR), _LEAST_BAR)
    filled = min(round(columns * share), columns)
    full = ("#" * filled, "yellow" if share > 0.9 else "green")
    return Text.assemble(f"{title:<12} [", full, "." * (columns - filled), f"] {share:4.0%}")


def _speed(planned: Planned, width: int) -> RenderableType:
    plan = planned.plan
    rows = [
        _labelled("levels", levels_of(plan.composition)),
        _labelled("drafts", lengths_of(plan.composition)),
        _labelled("streams", _streams(plan)),
        *(_labelled("link", found) for found in _packed(plan)),
        *(_labelled("experts", found) for found in _hits(plan)),
        *(_labelled("experts", found) for found in _read(planned)),
        *(_labelled("graphs", found) for found in _graphs(planned)),
    ]
    columns = ("predicted", "TriForce", "plain", "") if _speculates(plan) else ("predicted", "plain", "", "")
    return Group(*rows, Text(), _table(columns, _predictions(plan, planned.in_16_bits), width))


def _speculates(plan: Plan) -> bool:
    return plan.composition.gamma > 0


def _predictions(plan: Plan, in_16_bits: Prediction | None) -> Iterator[tuple[str, ...]]:
    """Yield (quantity, as planned, without speculation, remark) of each row."""
    predicted = plan.predicted
    yield "first token", duration(predicted.first_token_seconds)
    if not _speculates(plan):
        yield "a token", latency(predicted.seconds_per_token)
        if in_16_bits is not None:
            yield "all in 16 bits", latency(in_16_bits.seconds_per_token)
        return
    times = predicted.plain_seconds_per_token / predicted.seconds_per_token
    own, plain = latency(predicted.seconds_per_token), latency(predicted.plain_seconds_per_token)
    yield "a token", own, plain, f"without speculation {times:.1f} times as long"
    if in_16_bits is not None:
        own, plain = latency(in_16_bits.seconds_per_token), latency(in_16_bits.plain_seconds_per_token)
        times = in_16_bits.seconds_per_token / predicted.seconds_per_token
        yield "all in 16 bits", own, plain, f"{times:.1f} times as long"
    passes = {"full": predicted.full_pass_seconds}
    if (inner := plan.composition.inner) is not None:
        passes[inner] = predicted.retrieval_pass_seconds
    if "draft" in plan.composition.levels:
        passes["draft"] = predicted.draft_pass_seconds
    sums = {"full": predicted.full_sum_seconds, inner: predicted.retrieval_sum_seconds}
    for name, seconds in passes.items():
        summed = f"sums over the ranks {latency(sums[name])}" if sums.get(name) else ""
        yield f"a {name} pass", latency(seconds), "", summed
    drafted = f"{predicted.tokens_drafted} drafted, acceptance {predicted.acceptance:.2f}"
    yield "tokens a full pass", f"{predicted.tokens_per_round:.1f}", "1", drafted


def _streams(plan: Plan) -> str:
    parts = _streamed(plan)
    if not parts:
        return "nothing in a full pass" if plan.placement.cpu_experts else "nothing: nothing is offloaded"
    each = f", {size(plan.predicted.full_link_bytes)} over each link" if plan.request.num_devices > 1 else ""
    return f"{parts} a full pass{each}"


def _streamed(plan: Plan) -> str:
    """The bytes that cross the link in a full pass, by kind; "" for none."""
    placement = plan.placement
    on_host = {name: placement.host_bytes.get(name, 0) for name in ("target layers", "kv cache")}
    number, predicted = plan.request.num_devices, plan.predicted
    layers, experts = on_host["target layers"], predicted.missed_bytes * number
    cache = predicted.full_link_bytes * number - layers - experts if on_host["kv cache"] else 0
    streamed = {"target layers": layers, "experts": experts, "kv cache": cache}
    return " and ".join(f"{size(num_bytes)} of {name}" for name, num_bytes in streamed.items() if num_bytes)


def _hits(plan: Plan) -> Iterator[str]:
    """Yield who runs experts that are on the host, and the assumed share of the others that are on the device when a
    token wants them."""
    number, shares = plan.placement.cpu_experts, plan.placement.shares_experts
    if number and not shares:
        yield f"the CPU runs those of {counted(number, 'layer')}"
    if plan.predicted.missed_bytes:
        others = "of the others " if number and not shares else ""
        share = f"{others}{plan.predicted.hit_rate:.0%} of those wanted"
        yield f"{share} are on the device (estimated; --stats counts them)"
    if shares:
        yield f"in {counted(number, 'layer')} others cross the link or are run by the CPU, whichever is sooner"


def _read(planned: Planned) -> Iterator[str]:
    """Yield the bytes of experts that a token is predicted to read from the model's file."""
    hardware, read = planned.request.hardware, planned.plan.predicted.read_bytes
    if read:
        origin = "measured" if hardware.disk_measured else "assumed"
        rate = f"{gigabytes(hardware.disk_read)}/s, {origin}"
        yield f"{size(read)} a token from the model's file ({latency(read / hardware.disk_read)} at {rate})"


def _packed(plan: Plan) -> Iterator[str]:
    """Yield the share of the numbers' bits that crosses the link, if it is not all."""
    bits = {"cache's": plan.placement.link_bits, "weights'": plan.placement.weight_link_bits}
    fewer = [(number, whose) for whose, number in bits.items() if number < 16]
    if fewer:
        first, *others = (f"{number} of the {whose}" for number, whose in fewer)
        yield " and ".join([f"{first} 16 bits", *others]) + ", none is lost"


def _graphs(planned: Planned) -> Iterator[str]:
    """Yield the levels whose passes are launched as one, on a GPU."""
    if not planned.request.hardware.is_cpu:
        levels = " and ".join(planned.graphs)
        launches = "one for each layer" if planned.plan.placement.expert_slots else "one launch"
        yield f"a pass of {levels} is {launches}" if levels else "none: kernels are launched one by one"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> RenderableType:
    """A table whose first column has the same width in all tables. Last cells are remarks: they wrap, or go below the
    table if `width` leaves too little room. Rows may be short: missing cells are empty."""
    cells = [(*row, *[""] * (len(columns) - len(row))) for row in rows]
    taken = sum(max(map(len, column)) + 2 for column in list(zip(columns, *cells, strict=True))[:-1])
    beside = width - taken >= _LEAST_REMARK
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(columns[0], min_width=_PURPOSE, no_wrap=True)
    for name in columns[1:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    if beside:
        table.add_column(columns[-1], overflow="fold")
    for row in cells:
        table.add_row(*(row if beside else row[:-1]), style="bold" if row[0] == _ALL else None)
    below = [] if beside else [_labelled(row[0], f"{row[-1]} {columns[-1]}") for row in cells if row[-1]]
    return Group(table, *below)


def _labelled(label: str, value: str) -> Table:
    """A label with a value beside it that wraps."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_PURPOSE)
    table.add_column(overflow="fold")
    table.add_row(Text(label, "bold"), value)
    return table


def _size(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes else NOTHING
