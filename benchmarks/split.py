"""Missed experts over the link, by the CPU, or by both: milliseconds of a token, at one scheduler and three policies.

usage: python benchmarks/split.py [--tokens 150] [--layers 6] [--slow 10] [--expert-mb 1.8] [--link-gbps 25]
                                  [--cpu-gbps 45,25,12] [--rows 1]

The program's own experts in slots choose what crosses a paced link and what the CPU runs. The link, the CPU, the GPU
and attention take their time by waiting, `--slow` times as long as the rates say, so that a busy machine does not show.
A row's experts are drawn by how long ago they were used, with the hits that plans assume (offload/speed/routing.py).
"link": all misses cross it. "layers": the CPU runs all experts of the last layers, which have no slots, of a quarter,
half, three quarters or all of the layers as is the fastest. "split": misses go where they are soonest done.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from report import about, emit, say

from offload.config.model import llama_shaped
from offload.config.networks import Experts, FeedForward
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
from offload.weights.streamed_experts import Behind, Sharing, StreamedExperts

EXPERTS = Experts(FeedForward(32), 128, 8)
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


def choices(tokens: int, layers: int, rows: int, seed: int = 0) -> list[list[Choice]]:
    """The experts that each layer's rows choose, pass by pass."""
    dice = random.Random(seed)
    recent = [dice.sample(range(EXPERTS.count), EXPERTS.count) for _ in range(layers)]  # the last used first
    within = [hit_rate(EXPERTS, slots, 1) for slots in range(1, EXPERTS.count + 1)]

    def row(order: list[int]) -> Choice:
        found: set[int] = set()
        while len(found) < EXPERTS.used:
            drawn = dice.random()
            found.add(order[next(place for place, share in enumerate(within) if drawn <= share)])
        order[:] = [*found, *(expert for expert in order if expert not in found)]
        return [*found]

    return [[[each for _ in range(rows) for each in row(order)] for order in recent] for _ in range(tokens)]


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


def layers_of(count: int, link: PacedLink, share: float, on_cpu: int, split: Split | None) -> list[ExpertHomes]:
    """Layers with as many slots in all as a share of all experts; `on_cpu` of them have none."""
    model = llama_shaped("llama", 99, 64, 64, 1, 4, 4, 16, 99).mapped(lambda block: replace(block, experts=EXPERTS))
    layout = layout_of(model, torch.bfloat16)
    slots = min(round(share * EXPERTS.count * count / max(count - on_cpu, 1)), EXPERTS.count)
    behind = Behind()
    homes = HostHomes(torch.zeros(EXPERTS.count, layout.num_bytes, dtype=torch.uint8), link)
    sharing = None if split is None else Sharing(homes, split, behind)

    def streamed(layer: int, number: int) -> StreamedExperts:
        content = torch.zeros(number, layout.num_bytes, dtype=torch.uint8)
        return StreamedExperts(homes, ExpertSlots(content), layout, layer, sharing=sharing)

    here = [streamed(layer, slots) for layer in range(count - on_cpu)]
    on_host = ResidentExperts(bank_of(layout, homes.content))
    return [*here, *(HostExperts(on_host, streamed(layer, 1)) for layer in range(on_cpu))]


def bytes_of_expert() -> int:
    model = llama_shaped("llama", 99, 64, 64, 1, 4, 4, 16, 99).mapped(lambda block: replace(block, experts=EXPERTS))
    return layout_of(model, torch.bfloat16).num_bytes


def measured(
    rates: Rates, passes: Sequence[Sequence[Choice]], share: float, on_cpu: int = 0, split: Split | None = None
) -> dict[str, Any]:
    """Milliseconds of a pass after the first quarter, which fills the slots, and what was counted in all."""
    link = PacedLink(bytes_of_expert() / (rates.slow * rates.link))
    layers, machine, began = layers_of(len(passes[0]), link, share, on_cpu, split), Machine(rates), 0.0
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
        "fetched": stats.fetched_bytes // bytes_of_expert(), "cpu_layers": on_cpu,
    }  # fmt: skip


def policies(rates: Rates, passes: Sequence[Sequence[Choice]], share: float) -> Iterator[tuple[str, dict[str, Any]]]:
    count = len(passes[0])
    yield "link", measured(rates, passes, share)
    by_layers = [measured(rates, passes, share, max(count * step // 4, 1)) for step in range(1, 5)]
    yield "layers", min(by_layers, key=lambda each: each["milliseconds"])
    yield "split", measured(rates, passes, share, split=Split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--expert-mb", type=float, default=1.8)
    parser.add_argument("--link-gbps", type=float, default=25.0)
    parser.add_argument("--cpu-gbps", default="45,25,12")
    parser.add_argument("--rows", type=int, default=1)
    args = parser.parse_args()
    runs, rows = [], []
    passes = choices(args.tokens, args.layers, args.rows)
    for cpu in map(float, args.cpu_gbps.split(",")):
        rates = Rates(args.expert_mb / args.link_gbps / 1e3, args.expert_mb / cpu / 1e3, args.slow)
        for share in SHARES:
            found = dict(policies(rates, passes, share))
            best = min(found["link"]["milliseconds"], found["layers"]["milliseconds"])
            say(f"CPU {cpu:g} GB/s, {share:.0%} in slots: {found}")
            for name, run in found.items():
                runs.append({"cpu_gbps": cpu, "share": share, "policy": name, **run})
            own = found["split"]
            rows.append([
                f"{cpu:g} GB/s, {share:.0%}", *(f"{each['milliseconds']:.2f}" for each in found.values()),
                f"{own['milliseconds'] / best:.2f}", f"{found['link']['hit_rate']:.0%}", f"{own['hit_rate']:.0%}",
                f"{own['by_cpu'] / max(own['misses'], 1):.0%}",
            ])  # fmt: skip
    title = (
        f"Missed experts of {args.expert_mb:g} MB, a link of {args.link_gbps:g} GB/s, {args.layers} layers, ms a pass"
    )
    columns = ["CPU, in slots", "link", "layers", "split", "of the better", "hits", "hits, split", "by the CPU"]
    emit(columns, rows, about(title, 0, rows=args.rows), runs)


if __name__ == "__main__":
    main()
