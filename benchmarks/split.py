"""Missed experts over the link, by the CPU, or by both: milliseconds of a token, at one scheduler and three policies.

usage: python benchmarks/split.py [--tokens 150] [--layers 6] [--slow 10] [--expert-mb 1.8] [--link-gbps 25]
                                  [--cpu-gbps 45,25,12] [--rows 1] [--choices FILE]

The program's own experts in slots choose what crosses a paced link and what the CPU runs. The link, the CPU, the GPU
and attention take their time by waiting, `--slow` times as long as the rates say, so that a busy machine does not show.
--choices: rows choose as those of texts did that routing.py has recorded. Without it a row's experts, 8 of 128, are
drawn by how long ago they were used, with the hits that plans assume (offload/speed/routing.py).
"link": all misses cross it. "layers": the CPU runs all experts of the last layers, which have no slots, of a quarter,
half, three quarters or all of the layers as is the fastest. "split": misses go where they are soonest done.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import recordings
import torch
from report import about, emit, say

from offload.config.model import llama_shaped
from offload.config.networks import Experts, FeedForward
from offload.errors import UsageError
from offload.kernels.experts import ExpertHomes
from offload.metrics import ExpertStats
from offload.speed.routing import hit_rate
from offload.speed.split import Split
from offload.transfer.link import PacedLink
from offload.transfer.pace import sleep_until
from offload.weights.expert_homes import HostHomes
from offload.weights.expert_layout import bank_of, layout_of
from offload.weights.expert_slots import ExpertSlots
from offload.weights.experts import HostExperts, ResidentExperts
from offload.weights.layout import LayerLayout
from offload.weights.streamed_experts import Behind, Sharing, StreamedExperts

ASSUMED = Experts(FeedForward(32), 128, 8)
LAYERS = 6  # where none are recorded
SHARES = (0.2, 0.4, 0.6)
GPU_SECONDS, BETWEEN_SECONDS = 2e-6, 1e-4  # of an expert, and of attention and what else a layer has
CPU_ROW = 0.3  # of an expert's seconds, for each further row
Choice = list[int]  # of each row, one after the other


@dataclass(frozen=True)
class Rates:
    """Seconds of one expert over the link and by the CPU, and how many times as long everything takes here."""

    link: float
    cpu: float
    slow: float


@dataclass(frozen=True)
class Routing:
    """The experts that each layer's rows choose, pass by pass. experts: of a layer."""

    experts: Experts
    passes: list[list[Choice]]


def assumed(tokens: int, layers: int, rows: int, seed: int = 0) -> Routing:
    """Random choices, with the hits that plans assume."""
    dice = random.Random(seed)
    recent = [dice.sample(range(ASSUMED.count), ASSUMED.count) for _ in range(layers)]  # the last used first
    within = [hit_rate(ASSUMED, slots, 1) for slots in range(1, ASSUMED.count + 1)]

    def row(order: list[int]) -> Choice:
        found: set[int] = set()
        while len(found) < ASSUMED.used:
            drawn = dice.random()
            found.add(order[next(place for place, share in enumerate(within) if drawn <= share)])
        order[:] = [*found, *(expert for expert in order if expert not in found)]
        return [*found]

    passes = [[[each for _ in range(rows) for each in row(order)] for order in recent] for _ in range(tokens)]
    return Routing(ASSUMED, passes)


def recorded(path: Path, tokens: int, rows: int) -> dict[str, Routing]:
    """The choices of each recorded text's first rows, by its name."""
    found = dict[str, Routing]()
    for name, recording in recordings.load(path).items():
        if len(recording.chosen) < tokens * rows:
            raise UsageError(
                f"{path} has {len(recording.chosen)} rows of {name}, {tokens} passes of {rows} rows are asked for; "
                f"try --tokens {len(recording.chosen) // rows}"
            )
        passes = recording.chosen[: tokens * rows].unflatten(0, (tokens, rows)).transpose(1, 2).flatten(2)
        found[name] = Routing(recording.experts, passes.tolist())
    return found


class Machine:
    """A GPU, whose work the host does not wait for, and a CPU that runs experts."""

    def __init__(self, rates: Rates) -> None:
        self._rates, self._until = rates, 0.0

    def launch(self, seconds: float) -> None:
        self._until = max(self._until, time.perf_counter()) + self._rates.slow * seconds

    def wait(self) -> None:
        sleep_until(self._until)

    def run(self, homes: ExpertHomes, chosen: Choice) -> None:
        """A layer: its router's choice is awaited, its experts are run."""
        self.launch(BETWEEN_SECONDS)
        self.wait()
        for batch in homes.batches(torch.tensor(chosen)):
            own = [expert for expert, place in enumerate(batch.places.tolist()) if place >= 0]
            if isinstance(homes, HostExperts) or batch.bank is not homes.bank:
                work = sum(1 + CPU_ROW * (chosen.count(expert) - 1) for expert in own if expert in chosen)
                sleep_until(time.perf_counter() + self._rates.slow * self._rates.cpu * work)
            else:
                self.launch(GPU_SECONDS * len(own))


def layers_of(routing: Routing, link: PacedLink, share: float, on_cpu: int, split: Split | None) -> list[ExpertHomes]:
    """Layers with as many slots in all as a share of all experts; `on_cpu` of them have none."""
    layout, experts, count, behind = layout_with(routing.experts), routing.experts, len(routing.passes[0]), Behind()
    slots = min(round(share * experts.count * count / max(count - on_cpu, 1)), experts.count)
    homes = HostHomes(torch.zeros(experts.count, layout.num_bytes, dtype=torch.uint8), link)
    sharing = None if split is None else Sharing(homes, split, behind)

    def streamed(layer: int, number: int) -> StreamedExperts:
        content = torch.zeros(number, layout.num_bytes, dtype=torch.uint8)
        return StreamedExperts(homes, ExpertSlots(content), layout, layer, sharing=sharing)

    here = [streamed(layer, slots) for layer in range(count - on_cpu)]
    on_host = ResidentExperts(bank_of(layout, homes.content))
    return [*here, *(HostExperts(on_host, streamed(layer, 1)) for layer in range(on_cpu))]


def layout_with(experts: Experts) -> LayerLayout:
    model = llama_shaped("llama", 99, 64, 64, 1, 4, 4, 16, 99).mapped(lambda block: replace(block, experts=experts))
    return layout_of(model, torch.bfloat16)


def measured(
    rates: Rates, routing: Routing, share: float, on_cpu: int = 0, split: Split | None = None
) -> dict[str, Any]:
    """Milliseconds of a pass after the first quarter, which fills the slots, and what was counted in all."""
    passes, num_bytes = routing.passes, layout_with(routing.experts).num_bytes
    link = PacedLink(num_bytes / (rates.slow * rates.link))
    layers, machine, began = layers_of(routing, link, share, on_cpu, split), Machine(rates), 0.0
    for number, of_layers in enumerate(passes):
        if number == len(passes) // 4:
            began = time.perf_counter()
        for homes, chosen in zip(layers, of_layers, strict=True):
            machine.run(homes, chosen)
    machine.wait()
    seconds = (time.perf_counter() - began) / (len(passes) - len(passes) // 4) / rates.slow
    link.close()
    stats = sum((each.stats for each in layers if isinstance(each, StreamedExperts)), start=ExpertStats())
    return {
        "milliseconds": 1000 * seconds, "hit_rate": stats.hit_rate, "misses": stats.misses, "by_cpu": stats.by_cpu,
        "fetched": stats.fetched_bytes // num_bytes, "cpu_layers": on_cpu,
    }  # fmt: skip


def policies(rates: Rates, routing: Routing, share: float) -> Iterator[tuple[str, dict[str, Any]]]:
    count = len(routing.passes[0])
    yield "link", measured(rates, routing, share)
    by_layers = [measured(rates, routing, share, max(count * step // 4, 1)) for step in range(1, 5)]
    yield "layers", min(by_layers, key=lambda each: each["milliseconds"])
    yield "split", measured(rates, routing, share, split=Split())


def cells(found: dict[str, dict[str, Any]]) -> list[str]:
    """The cells of the table of what the policies took."""
    own, link = found["split"], found["link"]
    best = min(link["milliseconds"], found["layers"]["milliseconds"])
    return [
        *(f"{each['milliseconds']:.2f}" for each in found.values()),
        f"{own['milliseconds'] / best:.2f}", f"{link['hit_rate']:.0%}", f"{own['hit_rate']:.0%}",
        f"{own['by_cpu'] / max(own['misses'], 1):.0%}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--layers", type=int, help=f"default: {LAYERS}, or as many as are recorded")
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--expert-mb", type=float, default=1.8)
    parser.add_argument("--link-gbps", type=float, default=25.0)
    parser.add_argument("--cpu-gbps", default="45,25,12")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--choices", type=Path)
    args = parser.parse_args()
    if args.choices and args.layers:
        parser.error("--layers is for assumed choices; recorded ones have the layers of their model")
    if args.choices:
        routings = recorded(args.choices, args.tokens, args.rows)
    else:
        routings = {"assumed": assumed(args.tokens, args.layers or LAYERS, args.rows)}
    runs, rows = [], []
    for (text, routing), cpu, share in product(routings.items(), map(float, args.cpu_gbps.split(",")), SHARES):
        rates = Rates(args.expert_mb / args.link_gbps / 1e3, args.expert_mb / cpu / 1e3, args.slow)
        found = dict(policies(rates, routing, share))
        case = {"text": text, "cpu_gbps": cpu, "share": share}
        say(f"{text}, CPU {cpu:g} GB/s, {share:.0%} in slots: {found}")
        runs += [case | {"policy": policy, **run} for policy, run in found.items()]
        rows.append([text, f"{cpu:g} GB/s, {share:.0%}", *cells(found)])
    layers = {len(each.passes[0]) for each in routings.values()}.pop()
    title = f"Missed experts of {args.expert_mb:g} MB, a link of {args.link_gbps:g} GB/s, {layers} layers, ms a pass"
    columns = ["text", "CPU, in slots", "link", "layers", "split", "of the better", "hits", "hits, split", "by the CPU"]
    emit(columns, rows, about(title, 0, rows=args.rows), runs)


if __name__ == "__main__":
    main()
