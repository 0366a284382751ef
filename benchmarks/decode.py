"""Decoding: plain against TriForce and its levers, on the same prompts, in one run.

usage: python benchmarks/decode.py [--model DIR --draft DIR] [--lengths 4096,8192] [--tasks continue,quote]
                                   [--settings plain,default,gamma=7] [--offload kv --link-gbps 1]

A setting is `plain` (--no-speculation), `default` (what `generate` does by itself), `transformers` (its own `generate`
on the same weights) or options over the default, joined by "+": `gamma=7+lookup=no+budget=1024`; `draft=no` leaves the
draft model out. Every setting continues the same prompt, prefilled once, with the same seeds, at top-p 0.9. ms/token
counts the tokens after the first. The settings take turns, seed by seed: a slow moment of the machine does not hit one
alone, and "vs plain" is the median over the seeds of plain's ms/token over the setting's in the same turn. Lengths
adapt by measured seconds, as they do without --seed. At temperature 0 all settings write the same text, whatever the
seed: then only runs at temperature 0 compare settings, at others they compare what was drawn too.
`--clock plan` decides and measures by the plan's prices, not by the machine's clock (plan_clock.py): one seed says all.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import texts
import torch
from plan_clock import PlanClock
from report import emit, environment, say, spread

from offload.decode.sampling import SamplingParams
from offload.engine import Engine, load_tokenizer, plan_request
from offload.plan.planner import Options

Measurement = dict[str, Any]
Runner = Callable[[int], Measurement]  # seed -> what was measured


@dataclass(frozen=True)
class Case:
    """One prompt on one pair of models."""

    model: Path
    draft: Path | None
    task: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    options: Options

    def sampling(self, seed: int) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=seed)


def changed(options: Options, setting: str) -> tuple[Options, bool]:
    """The options of `setting`, and whether the draft model is there."""
    if setting in ("plain", "default"):
        return replace(options, speculation=setting == "default"), True
    changes: dict[str, Any] = {}
    for part in setting.split("+"):
        name, _, value = part.partition("=")
        known = {"yes": True, "no": False}
        changes[name.replace("-", "_")] = int(value) if value.isdigit() else known.get(value, value)
    with_draft = changes.pop("draft", True)
    return replace(options, **changes), with_draft


class Engines:
    """Engines of one prompt under several settings. The first prefills it, the others take over its cache."""

    def __init__(self, case: Case, clock: PlanClock | None) -> None:
        self._case, self._stack, self._clock = case, ExitStack(), clock
        self._first: Engine | None = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def runner(self, setting: str) -> Runner:
        case = self._case
        options, with_draft = changed(case.options, setting)
        draft = case.draft if with_draft else None
        plan = plan_request(case.model, draft, options, num_prompt_tokens=len(case.prompt), max_tokens=case.max_tokens)
        if self._clock is not None:
            plan = replace(plan, link_bytes_per_second=None)  # its prices know the link
        tokenizer = load_tokenizer(case.model, draft)
        engine = self._stack.enter_context(Engine.load(plan, case.model, draft, tokenizer))
        if self._first is not None:
            engine.take_prompt(self._first)
        else:
            self._first = engine
            for _ in engine.generate(case.prompt, case.sampling(0), max_tokens=1):
                pass

        if self._clock is not None:
            self._clock.wind(engine)

        def run(seed: int) -> Measurement:
            steps = list(engine.generate(case.prompt, case.sampling(seed), max_tokens=case.max_tokens))
            stats = engine.stats.as_dict()
            return {
                "milliseconds_per_token": stats["milliseconds_per_token"],
                "stats": stats,
                "plan": plan.as_dict(),
                "beginning": "".join(step.text for step in steps)[:80],
            }

        return run


def transformers_runner(case: Case) -> Runner:
    """transformers' own decoding loop on the same weights and dtype."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """When each token came; the first call brings the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None: ...

    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.bfloat16).eval()
    law: dict[str, Any] = {"do_sample": False}
    if case.temperature:
        law = {"do_sample": True, "temperature": case.temperature, "top_p": 0.9, "top_k": 0}

    def run(seed: int) -> Measurement:
        torch.manual_seed(seed)
        clock = Clock()
        model.generate(
            torch.tensor([case.prompt]),
            attention_mask=torch.ones(1, len(case.prompt), dtype=torch.long),
            max_new_tokens=case.max_tokens,
            min_new_tokens=case.max_tokens,
            streamer=clock,
            **law,
        )
        times = clock.times[1:]
        return {"milliseconds_per_token": 1000 * (times[-1] - times[0]) / (len(times) - 1)}

    return run


def measure(case: Case, settings: list[str], seeds: list[int], clock: PlanClock | None) -> dict[str, list[Measurement]]:
    results: dict[str, list[Measurement]] = {setting: [] for setting in settings}
    with Engines(case, clock) as engines, clock.running() if clock else nullcontext():
        runners = {}
        for setting in settings:
            say(f"{case.task}, {len(case.prompt)} tokens, temperature {case.temperature}, {setting}: loading")
            runners[setting] = transformers_runner(case) if setting == "transformers" else engines.runner(setting)
        for seed, (setting, run) in itertools.product(seeds, runners.items()):
            results[setting].append(run(seed))
            say(f"  {setting}, seed {seed}: {results[setting][-1]['milliseconds_per_token']:.2f} ms/token")
    return results


def row_of(case: Case, setting: str, runs: list[Measurement], plain: list[Measurement]) -> list[str]:
    milliseconds = spread([run["milliseconds_per_token"] for run in runs])
    pairs = zip(plain or runs, runs, strict=True)
    ratios = spread([before["milliseconds_per_token"] / run["milliseconds_per_token"] for before, run in pairs])
    row = [
        case.task,
        f"{len(case.prompt)}",
        f"{case.temperature}",
        setting,
        f"{milliseconds['median']:.2f}",
        f"{milliseconds['min']:.2f} to {milliseconds['max']:.2f}",
        f"{ratios['median']:.2f}x ({ratios['min']:.2f} to {ratios['max']:.2f})" if plain else "",
    ]
    if "stats" not in runs[0]:
        return [*row, "", "", "", ""]
    levels = [{level["name"]: level for level in run["stats"]["levels"]} for run in runs]
    for name, field in (("target", "acceptance"), ("retrieval", "acceptance"), ("target", "tokens_per_round")):
        values = [level[name][field] for level in levels if name in level and level[name][field] is not None]
        row.append(f"{sum(values) / len(values):.2f}" if values else "")
    utilisation = runs[0]["stats"]["link_utilisation"]
    return [*row, "" if utilisation is None else f"{utilisation:.2f}"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=_models() / "demo-target")
    parser.add_argument("--draft", default=None, help="folder or none (default: the demo draft with the demo target)")
    parser.add_argument("--tasks", default="continue", help=f"of {', '.join(texts.TASKS)}")
    parser.add_argument("--lengths", default="4096,8192,16384,32000", help="prompt lengths in tokens")
    parser.add_argument("--temperatures", default="0.6")
    parser.add_argument("--settings", default="transformers,plain,default")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--offload", default="")
    parser.add_argument("--link-gbps", type=float, default=None)
    parser.add_argument("--clock", choices=("machine", "plan"), default="machine")
    return parser.parse_args()


def _models() -> Path:
    return Path(str(resources.files("triforce_cli"))) / "models"


def main() -> None:
    args = arguments()
    draft = _models() / "demo-draft" if args.draft is None and args.model == _models() / "demo-target" else None
    if args.draft not in (None, "none"):
        draft = Path(args.draft)
    tokenizer = load_tokenizer(args.model, draft)
    offload = frozenset(filter(None, args.offload.split(",")))
    options = Options(offload=offload, link_gbps=args.link_gbps, pace="measured")
    settings, rows, document = args.settings.split(","), [], []
    for task, length, temperature in itertools.product(
        args.tasks.split(","), map(int, args.lengths.split(",")), map(float, args.temperatures.split(","))
    ):
        prompt = texts.prompt(task, tokenizer, length)
        case = Case(args.model, draft, task, prompt, args.max_tokens, temperature, options)
        results = measure(case, settings, list(range(args.seeds)), PlanClock() if args.clock == "plan" else None)
        plain = results.get("plain", [])
        rows += [row_of(case, setting, runs, plain) for setting, runs in results.items()]
        about = {"task": task, "length": len(prompt), "temperature": temperature}
        document += [about | {"setting": setting, "runs": runs} for setting, runs in results.items()]
    link = f", link {args.link_gbps} GB/s" if args.link_gbps else ""
    title = f"{args.model.name}, offload {args.offload or 'none'}{link}, the {args.clock}'s clock"
    columns = [
        "task", "prompt", "temp", "setting", "ms/token", "range", "vs plain", "accept", "accept retr.", "tokens/round",
        "link",
    ]  # fmt: skip
    emit(title, columns, rows, {"environment": environment(0), "title": title, "results": document})


if __name__ == "__main__":
    main()
