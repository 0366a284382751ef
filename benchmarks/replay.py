"""Replays: each level's tokens along a text are recorded once; any setting is then replayed on them in milliseconds.

usage: python benchmarks/replay.py [--model DIR --draft DIR] [--lengths 8192] [--tasks continue,quote] [--starts 0,0.35]
                                   [--settings default,gamma=7,lookup=no] [--offload kv --link-gbps 1]

At temperature 0 all settings write one text. The recording has, at each place of the text, the draft's token and the
retrieval level's in 16 bits, over chunks chosen a block before. The decoding code itself then runs on levels that look
their tokens up, charged the plan's seconds, over independent stretches of the text: `--stretches` of `--max-tokens`.
After a wrong token a level still gives the recorded token of that place. All settings have the default's budget, so
decisions alone are compared, on many texts. A single run depends on where blocks happen to end: `--alignments` replays
each stretch that many times, from places two tokens apart, and takes the mean. --starts: shares of the source text
after which the prompts begin. A setting fixes gamma, or lookups, or both: `gamma=7+lookup=no`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import texts
import torch
from decode import demo_models, parser_of, without_link
from report import about, emit, say
from torch import Tensor

from offload.decode.build import build_speculator
from offload.decode.distribution import Distribution
from offload.decode.sampling import SamplingParams
from offload.decode.warp import Warping
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.metrics import LevelStats
from offload.model.passes import Pass, forward
from offload.plan.planner import Options, Plan

GREEDY = SamplingParams(temperature=0.0)
PRICED = SamplingParams(temperature=1e-30, seed=0)  # writes the greedy text; a seed charges the plan's seconds
BLOCK = {True: 24, False: 8}  # tokens between two selections of chunks; an offloaded cache has longer passes


@dataclass(frozen=True)
class Recording:
    """The recorded tokens of each level. For each i past the prompt, `says` has the level's token after the first i
    tokens of the text, and `margins` the gap between its logit and the next one."""

    text: list[int]
    num_prompt: int
    says: dict[str, list[int]]
    margins: dict[str, list[float]]


class Recorded:
    """A level whose logits are the recorded token and margin."""

    def __init__(self, name: str, says: Sequence[int], margins: Sequence[float], vocab_size: int) -> None:
        self.stats, self.tokens = LevelStats(name), list[int]()
        self._says, self._margins, self._vocab_size = says, margins, vocab_size

    @property
    def length(self) -> int:
        return len(self.tokens)

    def run(self, passes: Sequence[Pass]) -> None:
        [asked] = passes
        asked.made = asked.compute(self._logits([*asked.tokens], asked.num_logits), *asked.given)

    def _logits(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        self.tokens += tokens
        ends = range(self.length - num_logits + 1, self.length + 1)
        logits = torch.zeros(num_logits, self._vocab_size)
        for row, end in enumerate(ends):
            if end < len(self._says):
                logits[row, self._says[end]] = max(self._margins[end], 1e-6)
        return logits

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


def record(engine: Engine, prompt: list[int], num_tokens: int, block: int) -> Recording:
    said = [
        token
        for step in engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=num_tokens))
        for token in step.tokens
    ]
    text, first = prompt + said, len(prompt) + 1
    says = {name: text.copy() for name in engine.levels}
    margins = {name: [1.0] * len(text) for name in engine.levels}

    def hear(name: str, start: int, rows: Tensor) -> None:
        best = rows.float().topk(2, -1).values
        says[name][start : start + len(rows)] = rows.argmax(-1).tolist()
        margins[name][start : start + len(rows)] = (best[:, 0] - best[:, 1]).tolist()

    if "draft" in engine.levels:
        level = engine.levels["draft"]
        level.truncate(0)
        for start in range(first, len(text), block):
            stop = min(start + block, len(text))
            hear("draft", start, forward(level, text[level.length : stop - 1], stop - start))
    target = engine.levels["target"]
    target.truncate(len(prompt) - engine.plan.placement.rows)
    if engine.retrieval is not None:
        engine.retrieval.truncate(0)
        engine.retrieval.full.record_mass = True
    for start in range(first, len(text), block):
        stop, pending = min(start + block, len(text)), text[target.length : start - 1]
        num_heard = 1 if start == first else block
        hear("target", start - num_heard, forward(target, pending, num_heard))
        if engine.retrieval is not None:
            level = engine.levels["retrieval"]
            engine.retrieval.refresh(len(pending))
            hear("retrieval", start, forward(level, text[level.length : stop - 1], stop - start))
    return compact(Recording(text, len(prompt), says, margins))


def compact(recording: Recording) -> Recording:
    """The recording with tokens renumbered in the order of their first use, so that distributions over them are
    small."""
    numbers: dict[int, int] = {}

    def renumbered(tokens: Sequence[int]) -> list[int]:
        return [numbers.setdefault(token, len(numbers)) for token in tokens]

    text = renumbered(recording.text)
    return replace(recording, text=text, says={name: renumbered(says) for name, says in recording.says.items()})


def play(recording: Recording, plan: Plan, start: int, num_tokens: int) -> float:
    """Milliseconds per token after the first by the plan's prices, from `start` tokens after the prompt on."""
    text, vocab_size = recording.text, 1 + max(map(max, recording.says.values()))
    levels = {
        name: Recorded(name, recording.says[name], recording.margins[name], vocab_size)
        for name in plan.composition.levels
    }
    records_mass = True

    def prepare(num_rows: int, wanted: bool) -> bool:
        """Like the retrieval cache: the pass before the one that it proposes for must record masses."""
        nonlocal records_mass
        ready, records_mass = wanted and records_mass, wanted
        if ready:
            levels["retrieval"].tokens = text[: levels["target"].length]
        return ready

    speculator = build_speculator(
        plan, levels, PRICED, Distribution(None, Warping(PRICED)), device=torch.device("cpu"), prepare_copies=prepare
    )
    sequence = text[: recording.num_prompt + start]
    levels["target"].tokens = sequence[: -plan.placement.rows]
    sequence += speculator.round(sequence, 1).tokens
    first, seconds = len(sequence), 0.0
    while (left := first + num_tokens - 1 - len(sequence)) > 0:
        step = speculator.round(sequence, left)
        sequence += step.tokens
        seconds += step.seconds
    if sequence != text[: len(sequence)]:
        raise AssertionError("a setting wrote another text")
    return 1000 * seconds / (len(sequence) - first)


def set_by_hand(plan: Plan, setting: str) -> Plan:
    for part in setting.split("+") if setting != "default" else ():
        name, _, value = part.partition("=")
        if name == "gamma":
            adaptive = tuple(level for level in plan.composition.adaptive if level != "target")
            plan = replace(plan, composition=replace(plan.composition, gamma=int(value), adaptive=adaptive))
        elif name == "lookup":
            plan = replace(plan, composition=replace(plan.composition, lookup=value == "yes"))
        else:
            raise SystemExit(f"a replay can set gamma and lookup, not {name}")
    return plan


def arguments() -> argparse.Namespace:
    settings = "default,gamma=3,gamma=7,gamma=15,lookup=no"
    parser = parser_of(__doc__, lengths="4096,8192,16384", settings=settings, max_tokens=160)
    parser.add_argument("--starts", default="0")
    parser.add_argument("--stretches", type=int, default=3)
    parser.add_argument("--alignments", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    model, draft = demo_models(args.model, args.draft)
    tokenizer, settings = load_tokenizer(model, draft), args.settings.split(",")
    offload = frozenset(filter(None, args.offload.split(",")))
    options = Options(offload=offload, link_gbps=args.link_gbps, weight_bits=16, kv_bits=16)
    lengths, starts = map(int, args.lengths.split(",")), map(float, args.starts.split(","))
    num_tokens, rows, measured = args.stretches * args.max_tokens + 2 * args.alignments, [], []
    for task, length, start in itertools.product(args.tasks.split(","), lengths, starts):
        prompt = texts.prompt(task, tokenizer, length, start)
        plan = plan_request(model, draft, options, num_prompt_tokens=len(prompt), max_tokens=num_tokens + 8)
        with Engine.load(without_link(plan), model, draft, tokenizer) as engine:
            recording = record(engine, prompt, num_tokens + 8, BLOCK[bool(plan.placement.offload)])
        say(f"{task}, {len(prompt)} tokens from {start}: recorded")
        for number in range(args.stretches):
            if len(recording.text) - len(prompt) < (number + 1) * args.max_tokens + 2 * args.alignments + 8:
                continue  # the text ended before
            places = [number * args.max_tokens + 2 * step for step in range(args.alignments)]
            played = {
                setting: fmean(play(recording, set_by_hand(plan, setting), place, args.max_tokens) for place in places)
                for setting in settings
            }
            best = min(played, key=lambda setting: played[setting])
            stretch: dict[str, Any] = {"task": task, "length": len(prompt), "start": start, "stretch": number}
            measured.append(stretch | {"milliseconds_per_token": played, "plan": plan.as_dict()})
            figures = [f"{played[setting]:.2f}" for setting in settings]
            rows.append([*map(str, stretch.values()), *figures, best])
    title = f"{model.name}, offload {args.offload or 'none'}, replayed at the plan's prices, ms/token"
    columns = [*("task", "prompt", "start", "stretch"), *settings, "best"]
    emit(columns, rows, about(title, 0), measured)


if __name__ == "__main__":
    main()
