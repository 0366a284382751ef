"""Prefill time with the cache and weights offloaded over a paced link, compared with everything resident, in one run.

usage: python benchmarks/prefill.py [--model DIR] [--length 16384] [--link-gbps 1,2]
"""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from report import about, emit, say

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.metrics import Spread
from offload.plan.planner import Options


def prefill_seconds(model: Path, prompt: list[int], options: Options) -> dict[str, float]:
    """Seconds of prefill and to the first token of a new engine, and the bytes that crossed the link."""
    plan = plan_request(model, None, options, num_prompt_tokens=len(prompt), max_tokens=1)
    with Engine.load(plan, model, None, load_tokenizer(model, None)) as engine:
        for _ in engine.generate(GenerationRequest(prompt, SamplingParams(temperature=0.0), max_tokens=1)):
            pass
        stats = engine.stats
        return {
            "prefill_seconds": stats.prefill_seconds,
            "first_token_seconds": stats.first_token_seconds,
            "bytes_to_device": stats.prefill_link.bytes_to_device,
            "bytes_to_host": stats.prefill_link.bytes_to_host,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(str(resources.files("triforce_cli"))) / "models/demo-target")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "examples" / "persuasion.txt")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--link-gbps", default="1,2")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prompt = load_tokenizer(args.model, None).encode(args.text.read_text(encoding="utf-8"))[: args.length]
    cases = {"resident": Options(speculation=False)}
    for gbps in map(float, args.link_gbps.split(",")):
        for offload in ("kv", "weights,kv"):
            options = Options(speculation=False, offload=frozenset(offload.split(",")), link_gbps=gbps)
            cases[f"offload {offload}, {gbps:g} GB/s"] = options
    results: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(args.repeats):
        for name, options in cases.items():
            results[name].append(prefill_seconds(args.model, prompt, options))
            say(f"{name}: {results[name][-1]['prefill_seconds']:.2f} s")
    resident = Spread.of([run["prefill_seconds"] for run in results["resident"]]).median
    rows = []
    for name, runs in results.items():
        seconds = Spread.of([run["prefill_seconds"] for run in runs])
        first = Spread.of([run["first_token_seconds"] for run in runs])
        rows.append(
            [
                name,
                f"{seconds.median:.2f}",
                f"{seconds.least:.2f} to {seconds.most:.2f}",
                f"{len(prompt) / seconds.median:.0f}",
                f"{seconds.median / resident:.2f}x",
                f"{first.median:.2f}",
            ]
        )
    columns = ["placement", "prefill s", "range", "tokens/s", "vs resident", "first token s"]
    title = f"prefill of {len(prompt)} tokens, {args.model.name}"
    measured = [{"placement": name} | run for name, runs in results.items() for run in runs]
    emit(columns, rows, about(title, 0), measured)


if __name__ == "__main__":
    main()
