"""Several ranks, each with a paced link of its own, compared with one, in one run.

usage: python benchmarks/ranks.py [--model DIR --draft DIR] [--ranks 1,2] [--length 16384] [--offload kv]
                                  [--link-gbps 1] [--max-tokens 64] [--turns 3]

In each turn every number of ranks loads the models, prefills the same prompt and continues it greedily, plainly and
with the defaults of `generate`. A full pass of plain decoding is one row over all weights and the whole cache, which is
where several links help. The ranks share the CPU's cores.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import texts
from report import about, emit, say

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.metrics import Spread, Stats
from offload.plan.planner import Options

GREEDY = SamplingParams(temperature=0.0)
WAYS = {"plain": False, "default": True}  # name -> speculation


def measure(model: Path, draft: Path | None, prompt: list[int], options: Options, max_tokens: int) -> dict[str, Any]:
    """One turn of one number of ranks."""
    plan = plan_request(model, draft, options, num_prompt_tokens=len(prompt), max_tokens=max_tokens)
    measured: dict[str, Any] = {"ranks": options.gpus, "plan": plan.as_dict()}
    with Engine.load(plan, model, draft, load_tokenizer(model, draft)) as engine:
        for _ in engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=2)):  # does all work that is done once
            pass
        measured["prefill_seconds"] = engine.stats.prefill_seconds
        for way, speculation in WAYS.items():
            steps = list(
                engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=max_tokens, speculation=speculation))
            )
            measured[way] = _numbers(engine.stats) | {"tokens": [token for step in steps for token in step.tokens]}
    assert measured["plain"].pop("tokens") == measured["default"].pop("tokens"), "speculation changed the text"
    return measured


def _numbers(stats: Stats) -> dict[str, Any]:
    target = next(level for level in stats.levels if level.name == "target")
    return {
        "milliseconds_per_token": stats.milliseconds_per_token,
        "milliseconds_per_full_pass": 1000 * (target.seconds_per_pass or 0.0),
        "seconds_in_sums": [rank.sum_seconds for rank in stats.ranks],
        "bytes_to_device": [rank.bytes_to_device for rank in stats.ranks] or [stats.decode_link.bytes_to_device],
        "decode_seconds": stats.decode_seconds,
    }


def rows_of(runs: list[dict[str, Any]], counts: list[int]) -> list[list[str]]:
    """A line for each number of ranks: medians over the turns, and how many times as fast as the first number."""
    rows = []
    for count in counts:
        own = [run for run in runs if run["ranks"] == count]
        first = [run for run in runs if run["ranks"] == counts[0]]
        cells = [str(count), f"{Spread.of([run['prefill_seconds'] for run in own]).median:.1f}"]
        for way, quantity in (("plain", "milliseconds_per_full_pass"), ("default", "milliseconds_per_token")):
            times = [a[way][quantity] / b[way][quantity] for a, b in zip(first, own, strict=True)]
            cells += [f"{Spread.of([run[way][quantity] for run in own]).median:.1f}", f"{Spread.of(times).median:.2f}x"]
        shares = [max(run["plain"]["seconds_in_sums"], default=0.0) / run["plain"]["decode_seconds"] for run in own]
        rows.append([*cells, f"{100 * Spread.of(shares).median:.0f} %"])
    return rows


def main() -> None:
    models = Path(str(resources.files("triforce_cli"))) / "models"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=models / "demo-target")
    parser.add_argument("--draft", type=Path, default=models / "demo-draft")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--offload", default="kv")
    parser.add_argument("--link-gbps", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    prompt = texts.prompt("continue", load_tokenizer(args.model, None), args.length)
    options = Options(offload=frozenset(args.offload.split(",")), link_gbps=args.link_gbps, device="cpu")
    counts, runs = [int(count) for count in args.ranks.split(",")], []
    for turn in range(args.turns):
        for count in counts:
            run = measure(args.model, args.draft, prompt, replace(options, gpus=count), args.max_tokens)
            runs.append({"turn": turn} | run)
            say(f"{count} ranks: {run['plain']['milliseconds_per_full_pass']:.1f} ms a full pass")
    columns = ["ranks", "prefill s", "full pass ms", "as fast", "ms/token", "as fast", "sums of plain decode"]
    title = f"{args.offload} over {args.link_gbps:g} GB/s a rank, {len(prompt)} tokens, {args.model.name}"
    emit(columns, rows_of(runs, counts), about(title, 0), runs)


if __name__ == "__main__":
    main()
