"""Experts in slots: which ones the rows of a text choose, how many of them slots hold, and what that saves over a link.

usage: python benchmarks/routing.py --model DIR [--texts FILE,FILE] [--stretches 15] [--length 256] [--gamma 7]
                                    [--link-gbps 0.05] [--prompts 4] [--choices FILE]

Stretches of each text are read as they are, and the first half of each is continued by the model, greedily and at
temperature 1; the experts that each row chooses are recorded. "repeated": the share of a row's experts that the next
row of the layer chooses again. Distinct experts are those of rows that follow each other, in units of one row's;
"power": the plan's (offload/speed/routing.py) that would fit them best. Hits are those of slots for a share of all
experts, shared by the layers as the program does it or apart for each layer, the least recently used one making room;
the first quarter of the passes fills the slots and is not counted. "it wants": the share of all experts that a pass
wants. "by growth": hits that follow from the growth of distinct experts with a power of the rows.

Then the model decodes with its experts behind a link, plainly and with lookups, with two slots of each
layer ("none") and with slots for shares of its experts. --link-gbps 0: not. --choices: a file for what the rows of the
texts choose as they are read, for split.py.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import recordings
import texts
import torch
from report import about, emit, say, table
from torch import Tensor

from offload.config.model import ModelConfig
from offload.config.networks import Experts
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.errors import UsageError
from offload.kernels.experts import Batch
from offload.metrics import ExpertStats
from offload.plan.placement import LEAST_SLOTS
from offload.plan.planner import Options
from offload.speed.routing import distinct_experts, hit_rate
from offload.weights.experts import ResidentExperts

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=1.0)
WAYS = {"read": GREEDY, "greedy": GREEDY, "sampled": SAMPLED}
ROWS = (2, 4, 8, 16, 32, 64)
SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)
POWERS = (0.6, 0.75)  # of rows, for hits by the growth of distinct experts
PASSES = (1, 8)  # rows of the passes for which hits are counted
LINK_SHARES = (0.0, 0.2, 0.4, 0.6)  # 0: the fewest slots
SEED = 0

Wanted = tuple[int, list[int]]  # a layer and the experts that a pass wants of it


class Recorder:
    """The experts that an engine's rows choose, in every layer that has some."""

    def __init__(self, engine: Engine) -> None:
        homes = [home for home in engine.worker.target.weights.experts if isinstance(home, ResidentExperts)]
        self._found: list[list[Tensor]] = [[] for _ in homes]
        for home, found in zip(homes, self._found, strict=True):
            _note(home, found)

    def last(self, num_rows: int) -> Tensor:
        """The choices of the last rows, int64 [rows, layers, used]; what came before is forgotten."""
        every = torch.stack([torch.cat(found) for found in self._found], 1)
        for found in self._found:
            found.clear()
        assert len(every) >= num_rows
        return every[len(every) - num_rows :]


def _note(home: ResidentExperts, found: list[Tensor]) -> None:
    """Have the kernels ask for batches, where they would choose and run all in one call, and note what they ask for."""
    whole = home.whole

    def noted(chosen: Tensor) -> Iterator[Batch]:
        found.append(chosen.to(torch.int64, copy=True))  # the kernels write theirs again
        yield whole

    home.batches, home.whole = noted, None  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Choices:
    """The experts that rows choose, bool [stretches, rows, layers, experts]."""

    of_rows: Tensor

    @classmethod
    def of(cls, chosen: Sequence[Tensor], num_experts: int) -> Choices:
        """chosen: of each stretch, int64 [rows, layers, used]."""
        every = torch.stack(list(chosen))
        empty = torch.zeros(*every.shape[:-1], num_experts, dtype=torch.bool)
        return cls(empty.scatter_(3, every, torch.ones_like(every, dtype=torch.bool)))

    @property
    def used(self) -> float:
        return float(self.of_rows.sum(3).float().mean())

    def repeated(self) -> float:
        """The share of a row's experts that the next row chooses again."""
        both = self.of_rows[:, 1:] & self.of_rows[:, :-1]
        return float(both.sum(3).float().mean()) / self.used

    def between(self, rows: int) -> Tensor:
        """The experts of each `rows` rows that follow each other, bool [stretches, passes, layers, experts]."""
        whole = self.of_rows.shape[1] // rows * rows
        passes: Tensor = self.of_rows[:, :whole].unflatten(1, (-1, rows)).any(2)
        return passes

    def distinct(self, rows: int) -> float:
        """The distinct experts of `rows` rows, in units of one row's."""
        return float(self.between(rows).sum(3).float().mean()) / self.used

    def wanted(self, rows: int) -> list[Wanted]:
        """What passes of `rows` rows want, in the order of the passes and of the layers in each."""
        return [
            (layer, experts.nonzero()[:, 0].tolist())
            for of_pass in self.between(rows).flatten(0, 1)
            for layer, experts in enumerate(of_pass)
        ]


def hits(wanted: Sequence[Wanted], slots: int, first: int = 0) -> ExpertStats:
    """Hits and misses from the pass over a layer `first` on, with so many slots that all layers share."""
    held, found, all_wanted = OrderedDict[tuple[int, int], None](), 0, 0
    for number, (layer, experts) in enumerate(wanted):
        there = [expert for expert in experts if (layer, expert) in held]
        for expert in there:
            held.move_to_end((layer, expert))
        for expert in sorted(set(experts) - set(there)):
            if len(held) == slots:
                held.popitem(last=False)
            held[layer, expert] = None
        if number >= first:
            found, all_wanted = found + len(there), all_wanted + len(experts)
    return ExpertStats(found, all_wanted - found)


def hits_apart(wanted: Sequence[Wanted], slots: int, first: int = 0) -> ExpertStats:
    """The same where each layer has its own part of the slots, as `StreamedExperts` have. tests/test_benchmarks.py
    compares them."""
    layers = 1 + max(layer for layer, _ in wanted)
    own = [[each for each in wanted if each[0] == layer] for layer in range(layers)]
    parts = [hits(each, max(slots // layers, 1), first // layers) for each in own]
    return sum(parts, start=ExpertStats())


SLOTS = {"shared": hits, "of each layer": hits_apart}


def power(pairs: Sequence[tuple[float, float]]) -> float:
    """The power of x that is closest to y, of pairs (x, y), in logarithms."""
    logs = [(math.log(x), math.log(y)) for x, y in pairs]
    return sum(x * y for x, y in logs) / sum(x * x for x, _ in logs)


def independent(experts: Experts, distinct: float) -> float:
    """The number of rows that would have so many distinct experts, in units of one row's, if each chose at random."""
    left = max(1.0 - distinct * experts.used / experts.count, 1e-9)
    return math.log(left) / math.log(1.0 - experts.used / experts.count)


def by_growth(experts: Experts, share: float, rows: int, power: float) -> float:
    """The hits of passes of `rows` rows, from the growth of distinct experts with the rows' power alone: slots hold the
    experts of the last n rows, and hits are those that a pass's rows do not add. A pass that wants more than there are
    slots finds none of them: the first are gone when the last have come."""
    each = math.log(1.0 - experts.used / experts.count)
    held = (math.log(1.0 - share) / each) ** (1.0 / power)
    if held < rows:
        return 0.0
    of_held, of_pass, of_both = (1.0 - math.exp(each * n**power) for n in (held, rows, held + rows))
    return 1.0 - (of_both - of_held) / of_pass


def hits_by_growth(experts: Experts, rows: int, power: float) -> list[float]:
    """The same for each share of slots."""
    return [by_growth(experts, share, rows, power) for share in SHARES]


def planned_hits(experts: Experts, rows: int) -> list[float]:
    """The hits that plans assume, for each share of slots."""
    return [hit_rate(experts, round(share * experts.count), rows) for share in SHARES]


def measured(choices: Choices, experts: Experts, num_experts: int) -> dict[str, Any]:
    """The numbers of one way of one text. num_experts: of all layers."""
    of_rows = {rows: choices.distinct(rows) for rows in ROWS if rows <= choices.of_rows.shape[1]}
    found = dict[str, dict[int, list[float]]]()
    for name, count in SLOTS.items():
        for rows in PASSES:
            wanted = choices.wanted(rows)
            counted = [count(wanted, round(share * num_experts), len(wanted) // 4) for share in SHARES]
            found.setdefault(name, {})[rows] = [each.hit_rate or 0.0 for each in counted]
    return {
        "rows": choices.of_rows.shape[0] * choices.of_rows.shape[1],
        "repeated": choices.repeated(),
        "distinct": of_rows,
        "distinct_power": power([(rows, independent(experts, found)) for rows, found in of_rows.items()]),
        "wanted": {rows: choices.distinct(rows) * experts.used / experts.count for rows in PASSES},
        "hits": found,
    }


def stretches(tokens: Sequence[int], length: int, most: int) -> list[list[int]]:
    """Whole stretches of `length` tokens, at most `most`, spread over the text."""
    count = len(tokens) // length
    if not count:
        raise UsageError(f"a text of {len(tokens)} tokens has no stretch of {length}")
    return [list(tokens[at * length : (at + 1) * length]) for at in range(0, count, -(-count // most))]


def sampling_of(way: str, number: int, min_tokens: int) -> SamplingParams:
    """The sampling of a way's text of that number, which does not end early."""
    return replace(WAYS[way], seed=SEED + number, min_tokens=min_tokens)


def record(engine: Engine, recorder: Recorder, stretch: list[int], way: str, number: int) -> Tensor:
    """The choices for a stretch, or for the tokens with which the model continues its first half."""
    half = len(stretch) // 2
    if way == "read":
        request, rows = GenerationRequest(stretch, WAYS[way], max_tokens=1), len(stretch)
    else:  # the first token comes from the prompt's last row, each other one from a pass of its own
        sampling, rows = sampling_of(way, number, half + 1), half
        request = GenerationRequest(stretch[:half], sampling, max_tokens=half + 1)
    engine.prefix.truncate(0)
    list(engine.generate(request))
    return recorder.last(rows)


def of_texts(model: Path, tokens: dict[str, list[list[int]]]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The numbers of each text and way, and what the rows of each text choose as it is read, int64 [rows, layers,
    used]. tokens: the stretches of each text, by its name."""
    length = max(len(each) for own in tokens.values() for each in own)
    config = read_config(model)
    assert config.experts is not None
    options, runs, chosen = Options(speculation=False, device="cpu"), list[dict[str, Any]](), dict[str, Tensor]()
    plan = plan_request(model, None, options, num_prompt_tokens=length, max_tokens=length)
    with Engine.load(plan, model, None, load_tokenizer(model, None)) as engine:
        recorder = Recorder(engine)
        for name, own in tokens.items():
            for way in WAYS:
                found = [record(engine, recorder, each, way, number) for number, each in enumerate(own)]
                numbers = measured(Choices.of(found, config.experts.count), config.experts, num_experts_of(config))
                runs.append({"text": name, "way": way} | numbers)
                say(f"{name}, {way}: {numbers['repeated']:.2f} repeated")
                if way == "read":
                    chosen[name] = torch.cat(found)
    return runs, chosen


def num_experts_of(config: ModelConfig) -> int:
    """The experts of all layers."""
    return sum(number * kind.block.experts.count for kind, number in config.kinds if kind.block.experts)


def over_a_link(
    model: Path, prompts: list[list[int]], max_tokens: int, gbps: float, gamma: int
) -> list[dict[str, Any]]:
    """The numbers of decoding after all prompts, plainly and with lookups, for each share of slots."""
    config, runs = read_config(model), list[dict[str, Any]]()
    assert config.experts is not None
    options = Options(offload=frozenset({"weights"}), link_gbps=gbps, device="cpu", speculation=False)
    length = max(map(len, prompts))
    plan = plan_request(model, None, options, num_prompt_tokens=length, max_tokens=max_tokens)
    for share, depth in itertools.product(LINK_SHARES, (0, gamma)):
        slots = max(round(share * config.experts.count), LEAST_SLOTS)
        placed = replace(plan.placement, resident_layers=config.num_layers, expert_slots=slots)
        composition = replace(plan.composition, gamma=depth, lookup=depth > 0)
        changed = replace(plan, placement=placed, composition=composition)
        with Engine.load(changed, model, None, load_tokenizer(model, None)) as engine:
            for way in ("greedy", "sampled"):
                totals = Counter[str]()
                for number, prompt in enumerate(prompts):
                    totals.update(decoded(engine, prompt, sampling_of(way, number, max_tokens), max_tokens))
                run = {"slots": slots, "share": share, "gamma": depth, "way": way, **per_token(totals)}
                runs.append(run)
                say(f"{slots} slots, {depth} drafted, {way}: {run['milliseconds']:.1f} ms/token")
    return runs


def decoded(engine: Engine, prompt: list[int], sampling: SamplingParams, max_tokens: int) -> dict[str, float]:
    """The counts of decoding after one prompt, without its first token."""
    steps = engine.generate(GenerationRequest(prompt, sampling, max_tokens=max_tokens))
    next(steps)
    before = engine.worker.link_stats
    for _ in steps:
        pass
    stats, experts = engine.stats, (engine.worker.link_stats - before).experts
    return {
        "tokens": stats.output_tokens - 1,
        "hits": experts.hits,
        "misses": experts.misses,
        "bytes": experts.fetched_bytes,
        "milliseconds": 1000 * stats.decode_seconds,
        "passes": next(level.passes for level in stats.levels if level.name == "target") - 1,
    }


def per_token(totals: Mapping[str, float]) -> dict[str, float]:
    """What `decoded` has counted, for each token."""
    means = {name: totals[name] / totals["tokens"] for name in ("bytes", "milliseconds", "passes")}
    return {"hit_rate": totals["hits"] / (totals["hits"] + totals["misses"])} | means


def show(runs: list[dict[str, Any]], experts: Experts) -> None:
    """The tables of distinct experts and of hits, with what the plan counts on in the last row."""
    names = [f"{run['text']}, {run['way']}" for run in runs]
    rows = [n for n in ROWS if all(n in run["distinct"] for run in runs)]
    cells = [
        [name, f"{run['repeated']:.3f}", *(f"{run['distinct'][n]:.2f}" for n in rows), f"{run['distinct_power']:.2f}"]
        for name, run in zip(names, runs, strict=True)
    ]
    planned = [f"{distinct_experts(experts, n) / experts.used:.2f}" for n in rows]
    by_chance = f"{experts.used / experts.count:.3f}"
    table(
        f"Distinct experts of rows, {experts.used} of {experts.count} a row",
        ["rows", "repeated", *map(str, rows), "power"],
        [*cells, ["plan; chance", by_chance, *planned, ""]],
    )
    cells = [
        [
            f"{name}, {slots}",
            str(n),
            f"{100 * run['wanted'][n]:.0f} %",
            *(f"{100 * hit:.0f} %" for hit in run["hits"][slots][n]),
        ]
        for slots in SLOTS
        for n in PASSES
        for name, run in zip(names, runs, strict=True)
    ]
    cells += [
        [
            f"by growth, power {power:g}",
            str(n),
            "",
            *(f"{100 * hit:.0f} %" for hit in hits_by_growth(experts, n, power)),
        ]
        for power in POWERS
        for n in PASSES
    ]
    cells += [["plan", str(n), "", *(f"{100 * hit:.0f} %" for hit in planned_hits(experts, n))] for n in PASSES]
    table(
        "Hits by the share of all experts that has slots",
        ["slots", "rows a pass", "it wants", *(f"{100 * share:.0f} %" for share in SHARES)],
        cells,
    )


def of_link(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the link's table."""
    rows = []
    for run in runs:
        first = next(each for each in runs if (each["gamma"], each["way"]) == (run["gamma"], run["way"]))
        rows.append([
            f"{100 * run['share']:.0f} %" if run["share"] else "none", str(run["slots"]), run["way"], str(run["gamma"]),
            f"{1 / run['passes']:.2f}", f"{100 * run['hit_rate']:.0f} %", f"{run['bytes'] / 1e3:.0f} KB",
            f"{run['bytes'] / first['bytes']:.2f}", f"{run['milliseconds'] / first['milliseconds']:.2f}",
            f"{run['milliseconds']:.1f}",
        ])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", default=str(texts.NOVEL))
    parser.add_argument("--stretches", type=int, default=15)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--link-gbps", type=float, default=0.05)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--choices", type=Path)
    args = parser.parse_args()
    experts, tokenizer = read_config(args.model).experts, load_tokenizer(args.model, None)
    if experts is None:
        raise UsageError(f"{args.model} has no experts")
    files = [Path(file) for file in args.texts.split(",")]
    tokens = {
        file.stem: stretches(tokenizer.encode(file.read_text(encoding="utf-8")), args.length, args.stretches)
        for file in files
    }
    runs, chosen = of_texts(args.model, tokens)
    if args.choices:
        recordings.save(args.choices, chosen, experts.count)
    show(runs, experts)
    half = args.length // 2
    prompts = [stretch[:half] for own in tokens.values() for stretch in own[: args.prompts]]
    linked = over_a_link(args.model, prompts, half, args.link_gbps, args.gamma) if args.link_gbps else []
    over = f"Experts over {args.link_gbps:g} GB/s, {len(prompts)} prompts of {half} tokens"
    title = over if linked else "Experts in slots, without a link"
    columns = [
        "in slots",
        "slots",
        "",
        "drafted",
        "tokens/pass",
        "hits",
        "a token",
        "of none",
        "time of none",
        "ms/token",
    ]
    planned = {
        "distinct": {rows: distinct_experts(experts, rows) / experts.used for rows in ROWS},
        "hits": {rows: planned_hits(experts, rows) for rows in PASSES},
        "by_growth": {power: {n: hits_by_growth(experts, n, power) for n in PASSES} for power in POWERS},
    }
    shared = about(title, SEED, experts=experts.count, used=experts.used, shares=SHARES, planned=planned)
    emit(columns, of_link(linked), shared, [*runs, *linked])


if __name__ == "__main__":
    main()
