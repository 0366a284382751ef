"""An upper bound of the gain of token trees over chains, from the positions that benchmarks/acceptance.py measured.

usage: python benchmarks/trees.py acceptance.jsonl [...] [--costs full:token:row,...]

A tree has two candidates per position, drawn without replacement. It is built with knowledge that no program has: the
probabilities that the first candidate is accepted, and that the second is after the first was rejected. Nodes are added
by falling probability of being reached; a chain has first candidates only. Both are compared at the same number of
drafted tokens, and in seconds per token, each at its best size, for costs in milliseconds: of a full pass, of a drafted
token, of another row of the full pass. "siblings free": tokens of one depth are drafted together for the cost of one.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from report import about, emit, read

SIZES = (8, 16, 24, 32, 48, 64)
_THRESHOLDS = [0.97**power for power in range(1, 130)]  # nodes with a lower reach are not drafted
_SAMPLES = 400


@dataclass(frozen=True)
class Position:
    """Probabilities that the first candidate is accepted, and that the second is after the first was rejected."""

    first: float
    second: float


@dataclass(frozen=True)
class Node:
    """A drafted token: the probability that it and all tokens before it are accepted, and its depth (from 1)."""

    reach: float
    depth: int


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a full pass of one row, of a drafted token, and of another row of the full pass."""

    full: float
    token: float
    row: float

    def of(self, nodes: Sequence[Node], *, siblings_free: bool) -> float:
        steps = max((node.depth for node in nodes), default=0) if siblings_free else len(nodes)
        return self.full + self.token * steps + self.row * len(nodes)


def chain(positions: Sequence[Position]) -> Iterator[Node]:
    reach = 1.0
    for depth, position in enumerate(positions, 1):
        reach *= position.first
        yield Node(reach, depth)


def tree(positions: Sequence[Position]) -> Iterator[Node]:
    """Nodes by falling reach. A second candidate follows its first, which must have been rejected."""
    waiting: list[tuple[float, int, int, float]] = []  # -reach, depth, candidate, reach of the parent

    def wait(depth: int, candidate: int, parent: float) -> None:
        if depth <= len(positions):
            here = positions[depth - 1]
            chance = here.first if candidate == 0 else (1.0 - here.first) * here.second
            heapq.heappush(waiting, (-parent * chance, depth, candidate, parent))

    wait(1, 0, 1.0)
    while waiting:
        negative, depth, candidate, parent = heapq.heappop(waiting)
        yield Node(-negative, depth)
        wait(depth + 1, 0, -negative)
        if candidate == 0:
            wait(depth, 1, parent)


SHAPES = {"chain": chain, "tree": tree}


def sample(positions: Sequence[Position], seed: int) -> list[list[Position]]:
    """Runs of consecutive positions from random starts, as long as the largest size needs."""
    places, twice = random.Random(seed), [*positions, *positions]
    starts = [places.randrange(len(positions)) for _ in range(_SAMPLES)]
    return [twice[start : start + min(SIZES[-1], len(positions))] for start in starts]


def tokens_by_size(runs: Sequence[Sequence[Position]], shape: str) -> dict[int, float]:
    """Expected tokens of a full pass by the number of drafted tokens."""
    drafted = [[node.reach for node in islice(SHAPES[shape](run), SIZES[-1])] for run in runs]
    return {size: 1.0 + sum(sum(reach[:size]) for reach in drafted) / len(runs) for size in SIZES}


def seconds_per_token(
    runs: Sequence[Sequence[Position]], shape: str, costs: Costs, *, siblings_free: bool = False
) -> float:
    """Time per token in the units of `costs`, with the threshold that is best on average."""
    drafted = [list(islice(SHAPES[shape](run), 4 * SIZES[-1])) for run in runs]

    def at(threshold: float) -> float:
        kept = [list(takewhile(lambda node: node.reach >= threshold, nodes)) for nodes in drafted]
        seconds = sum(costs.of(nodes, siblings_free=siblings_free) for nodes in kept)
        return seconds / sum(1.0 + sum(node.reach for node in nodes) for nodes in kept)

    return min(map(at, _THRESHOLDS))


def positions_of(path: Path) -> list[Position]:
    shared, _ = read(path.read_text(encoding="utf-8"))
    recorded = shared["base"]["positions"]
    pairs = zip(recorded["acceptance"].split(), recorded["second"].split(), strict=True)
    return [Position(min(float(first), 1.0), float(second)) for first, second in pairs]


def compare(runs: Sequence[Sequence[Position]], costs: Sequence[Costs]) -> dict[str, Any]:
    chains, trees = (tokens_by_size(runs, shape) for shape in SHAPES)
    by_cost = []
    for cost in costs:
        plain = seconds_per_token(runs, "chain", cost)
        own, free = (seconds_per_token(runs, "tree", cost, siblings_free=choice) for choice in (False, True))
        by_cost.append(
            {
                "full": cost.full, "token": cost.token, "row": cost.row, "chain": round(plain, 3),
                "tree": round(plain / own, 3), "tree, siblings free": round(plain / free, 3),
            }
        )  # fmt: skip
    return {
        "tokens_of_chain": {size: round(value, 2) for size, value in chains.items()},
        "tokens_of_tree": {size: round(value, 2) for size, value in trees.items()},
        "milliseconds": by_cost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", default="400:7:0.5,100:5:0.5,28:4.5:2,1680:20:1", help="milliseconds full:token:row")
    args = parser.parse_args()
    costs = [Costs(*map(float, item.split(":"))) for item in args.costs.split(",")]
    measured, rows = [], []
    for path in args.documents:
        result = compare(sample(positions_of(path), args.seed), costs)
        gains = [result["tokens_of_tree"][size] / result["tokens_of_chain"][size] for size in SIZES]
        faster = [f"{cost['tree']:.2f}x {cost['tree, siblings free']:.2f}x" for cost in result["milliseconds"]]
        measured.append({"positions": path.stem} | result)
        rows.append([path.stem, *(f"{gain:.2f}x" for gain in gains), *faster])
    columns = [
        "positions",
        *(f"{size} tokens" for size in SIZES),
        *(f"{c.full:g}:{c.token:g}:{c.row:g} ms" for c in costs),
    ]
    title = "trees over chains: tokens of a pass by drafted tokens; tokens per second by costs (siblings paid, free)"
    emit(columns, rows, about(title, args.seed), measured)


if __name__ == "__main__":
    main()
