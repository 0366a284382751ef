"""Decoding: plain against TriForce, on one prompt at several lengths, in one run.

usage: python benchmarks/decode.py [--model DIR --draft DIR] [--lengths 4096,8192] [--offload kv --link-gbps 1]

Modes: "plain" decodes one row at a time, as fast as it can; "no-speculation" is `--no-speculation` (blocks of rows, as
its bits are those of speculation); "triforce" is what `generate` does by itself; "transformers" is its `generate` on
the same weights. Every mode continues the same prompt with the same seeds at temperature 0.6, top-p 0.9. ms/token
counts the tokens after the first. The modes take turns, seed by seed: a slow moment of the machine does not hit one
alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from report import emit, environment, say, spread

from offload.decode.sampling import SamplingParams
from offload.engine import Engine, load_tokenizer, plan_request
from offload.plan.planner import Options, Plan

Measurement = dict[str, Any]
Runner = Callable[[int], Measurement]  # seed -> what was measured


@dataclass(frozen=True)
class Case:
    """One prompt on one pair of models."""

    model: Path
    draft: Path | None
    prompt: list[int]
    max_tokens: int
    options: Options


def plan_of(case: Case, mode: str) -> Plan:
    options = case.options if mode == "triforce" else replace(case.options, speculation=False)
    plan = plan_request(case.model, case.draft, options, num_prompt_tokens=len(case.prompt), max_tokens=case.max_tokens)
    return replace(plan, rows=1) if mode == "plain" else plan


def triforce_runner(case: Case, mode: str, open_engines: ExitStack) -> Runner:
    """Our engine under the plan of `mode`; the prompt is prefilled once."""
    plan = plan_of(case, mode)
    tokenizer = load_tokenizer(case.model, case.draft)
    engine = open_engines.enter_context(Engine.load(plan, case.model, case.draft, tokenizer))

    def run(seed: int) -> Measurement:
        for _ in engine.generate(case.prompt, SamplingParams(seed=seed), max_tokens=case.max_tokens):
            pass
        stats = engine.stats.as_dict()
        return {"milliseconds_per_token": stats["milliseconds_per_token"], "stats": stats, "plan": plan.as_dict()}

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

    def run(seed: int) -> Measurement:
        torch.manual_seed(seed)
        clock = Clock()
        model.generate(
            torch.tensor([case.prompt]),
            attention_mask=torch.ones(1, len(case.prompt), dtype=torch.long),
            max_new_tokens=case.max_tokens,
            min_new_tokens=case.max_tokens,
            do_sample=True,
            temperature=0.6,
            top_p=0.9,
            top_k=0,
            streamer=clock,
        )
        times = clock.times[1:]
        return {"milliseconds_per_token": 1000 * (times[-1] - times[0]) / (len(times) - 1)}

    return run


def measure(case: Case, modes: list[str], seeds: list[int]) -> dict[str, list[Measurement]]:
    results: dict[str, list[Measurement]] = {mode: [] for mode in modes}
    with ExitStack() as engines:
        runners = {}
        for mode in modes:
            say(f"{len(case.prompt)} tokens, {mode}: loading")
            runners[mode] = (
                transformers_runner(case) if mode == "transformers" else triforce_runner(case, mode, engines)
            )
        for seed in seeds:
            for mode, run in runners.items():
                results[mode].append(run(seed))
                say(f"  {mode}, seed {seed}: {results[mode][-1]['milliseconds_per_token']:.2f} ms/token")
    return results


def row_of(length: int, mode: str, runs: list[Measurement], plain: float | None) -> list[str]:
    milliseconds = spread([run["milliseconds_per_token"] for run in runs])
    row = [
        f"{length}",
        mode,
        f"{milliseconds['median']:.2f}",
        f"{milliseconds['min']:.2f} to {milliseconds['max']:.2f}",
        f"{plain / milliseconds['median']:.2f}x" if plain else "",
    ]
    if "stats" not in runs[0]:
        return [*row, "", "", "", ""]
    levels = [{level["name"]: level for level in run["stats"]["levels"]} for run in runs]
    for name, field in (("target", "acceptance"), ("retrieval", "acceptance"), ("target", "tokens_per_round")):
        values = [level[name][field] for level in levels if name in level and level[name][field] is not None]
        row.append(f"{sum(values) / len(values):.2f}" if values else "")
    utilisation = runs[0]["stats"]["link_utilisation"]
    return [*row, "" if utilisation is None else f"{utilisation:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = Path(str(resources.files("triforce_cli"))) / "models"
    parser.add_argument("--model", type=Path, default=models / "demo-target")
    parser.add_argument("--draft", default=None, help="folder or none (default: the demo draft with the demo target)")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "examples" / "persuasion.txt")
    parser.add_argument("--lengths", default="4096,8192,16384,32512", help="prompt lengths in tokens")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", default="transformers,plain,no-speculation,triforce")
    parser.add_argument("--offload", default="")
    parser.add_argument("--link-gbps", type=float, default=None)
    for name in ("gamma", "draft-gamma", "budget", "chunk"):
        parser.add_argument(f"--{name}", type=int, default=None)
    args = parser.parse_args()
    draft = models / "demo-draft" if args.draft is None and args.model == models / "demo-target" else None
    if args.draft not in (None, "none"):
        draft = Path(args.draft)
    tokens = load_tokenizer(args.model, draft).encode(args.text.read_text(encoding="utf-8"))
    options = Options(
        offload=frozenset(filter(None, args.offload.split(","))),
        link_gbps=args.link_gbps,
        gamma=args.gamma,
        draft_gamma=args.draft_gamma,
        budget=args.budget,
        chunk=args.chunk,
    )
    seeds, modes, rows, document = list(range(args.seeds)), args.modes.split(","), [], []
    for length in map(int, args.lengths.split(",")):
        case = Case(args.model, draft, tokens[:length], args.max_tokens, options)
        if len(case.prompt) < length:
            raise SystemExit(f"the text has {len(case.prompt)} tokens, {length} are asked for")
        results = measure(case, modes, seeds)
        plain = None
        if "plain" in results:
            plain = spread([run["milliseconds_per_token"] for run in results["plain"]])["median"]
        rows += [row_of(length, mode, runs, plain) for mode, runs in results.items()]
        document += [{"length": length, "mode": mode, "runs": runs} for mode, runs in results.items()]
    link = f", link {args.link_gbps} GB/s" if args.link_gbps else ""
    title = f"{args.model.name}, offload {args.offload or 'none'}{link}"
    columns = ["prompt", "mode", "ms/token", "range", "vs plain", "accept", "accept retr.", "tokens/round", "link"]
    emit(title, columns, rows, {"environment": environment(0), "title": title, "results": document})


if __name__ == "__main__":
    main()
