"""Decoding: plain against TriForce and its levers, on the same prompts, in one run.

usage: python benchmarks/decode.py [--model DIR --draft DIR] [--lengths 4096,8192] [--tasks continue,quote]
                                   [--settings plain,default,gamma=7]
                                   [--offload kv --link-gbps 1]

A setting is `plain` (--no-speculation), `default` (the defaults of `generate`), `transformers` (its own `generate` on
the same weights) or options that change the default, joined by "+": `gamma=7+lookup=no+budget=1024`; `draft=no` leaves
the draft model out, and `selection=published` chooses chunks as TriForce's authors do (benchmarks/published.py). Every
setting continues the same prompt, prefilled once, without a seed, at top-p 0.9. ms/token counts the tokens after the
first. The settings take turns (`--turns`), so that a slow moment of the machine does not affect one alone; "predicted"
is the plan's ms/token and its share of the measured median; "vs plain" is the median over the turns of plain's ms/token
over the setting's in the same turn. At temperature 0 all settings write the same text, so only such runs compare the
settings alone; other runs also differ in the drawn tokens.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import texts
from reference import Reference
from report import about, beside, emit, say

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.metrics import Spread
from offload.plan.planner import Options, Plan

Measurement = dict[str, Any]
Runner = Callable[[], Measurement]


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

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters, without a seed: draft lengths then adapt by measured seconds."""
        return SamplingParams(temperature=self.temperature)


def changed(options: Options, setting: str) -> tuple[Options, bool]:
    """The options of `setting`, and whether it uses the draft model."""
    if setting in ("plain", "default"):
        return replace(options, speculation=setting == "default"), True
    changes: dict[str, Any] = {}
    for part in setting.split("+"):
        name, _, value = part.partition("=")
        known = {"yes": True, "no": False}
        changes[name.replace("-", "_")] = int(value) if value.isdigit() else known.get(value, value)
    with_draft = changes.pop("draft", True)
    if changes.pop("selection", None) == "published":
        changes.setdefault("kv_bits", 16)  # it supports chunks in 16 bits only
    return replace(options, **changes), with_draft


class Engines:
    """The engines of one prompt under several settings. The first prefills the prompt, the others take over its
    cache."""

    def __init__(self, case: Case) -> None:
        self._case, self._stack = case, ExitStack()
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
        tokenizer = load_tokenizer(case.model, draft)
        engine = self._stack.enter_context(Engine.load(plan, case.model, draft, tokenizer))
        if "selection=published" in setting.split("+"):
            import published  # it imports torch first

            published.install(engine.retrieval)
        if self._first is not None:
            engine.take_prompt(self._first)
        else:
            self._first = engine
            for _ in engine.generate(GenerationRequest(case.prompt, case.sampling, max_tokens=1)):
                pass

        def run() -> Measurement:
            steps = list(engine.generate(GenerationRequest(case.prompt, case.sampling, max_tokens=case.max_tokens)))
            stats = engine.stats.as_dict()
            return {
                "milliseconds_per_token": stats["milliseconds_per_token"],
                "stats": stats,
                "plan": plan.as_dict(),
                "beginning": "".join(step.text for step in steps)[:80],
            }

        return run


def without_link(plan: Plan) -> Plan:
    """`plan` with everything on the device. Its prices still include the link, and the text is the same."""
    placement = replace(plan.placement, link_bytes_per_second=None, offload=(), resident_tiles=0)
    return replace(plan, placement=placement)


def transformers_runner(case: Case) -> Runner:
    """A runner of transformers' own decoding loop on the same weights and dtype, to the end."""
    reference = Reference(case.model, dtype="bf16", device="cpu")

    def run() -> Measurement:
        _, times = reference.generate(case.prompt, case.sampling, max_tokens=case.max_tokens, end_tokens=())
        return {"milliseconds_per_token": 1000 * (times[-1] - times[0]) / (len(times) - 1)}

    return run


def measure(case: Case, settings: list[str], num_turns: int) -> dict[str, list[Measurement]]:
    results: dict[str, list[Measurement]] = {setting: [] for setting in settings}
    with Engines(case) as engines:
        runners = {}
        for setting in settings:
            say(f"{case.task}, {len(case.prompt)} tokens, temperature {case.temperature}, {setting}: loading")
            runners[setting] = transformers_runner(case) if setting == "transformers" else engines.runner(setting)
        for turn, (setting, run) in itertools.product(range(num_turns), runners.items()):
            results[setting].append(run())
            say(f"  {setting}, turn {turn + 1}: {results[setting][-1]['milliseconds_per_token']:.2f} ms/token")
    return results


def row_of(case: Case, setting: str, runs: list[Measurement], plain: list[Measurement]) -> list[str]:
    milliseconds = Spread.of([run["milliseconds_per_token"] for run in runs])
    pairs = zip(plain or runs, runs, strict=True)
    ratios = Spread.of([before["milliseconds_per_token"] / run["milliseconds_per_token"] for before, run in pairs])
    row = [
        case.task,
        f"{len(case.prompt)}",
        f"{case.temperature}",
        setting,
        f"{milliseconds.median:.2f}",
        f"{milliseconds.least:.2f} to {milliseconds.most:.2f}",
        f"{ratios.median:.2f}x ({ratios.least:.2f} to {ratios.most:.2f})" if plain else "",
    ]
    if "stats" not in runs[0]:
        return [*row, "", "", "", "", ""]
    row.append(beside(runs[0]["plan"], milliseconds.median))
    levels = [{level["name"]: level for level in run["stats"]["levels"]} for run in runs]
    for name, field in (("target", "acceptance"), ("retrieval", "acceptance"), ("target", "tokens_per_round")):
        values = [level[name][field] for level in levels if name in level and level[name][field] is not None]
        row.append(f"{sum(values) / len(values):.2f}" if values else "")
    utilisation = runs[0]["stats"]["link_utilisation"]
    return [*row, "" if utilisation is None else f"{utilisation:.2f}"]


def parser_of(about: str | None, *, lengths: str, settings: str, max_tokens: int) -> argparse.ArgumentParser:
    """The parser of common arguments of decoding benchmarks: models, prompts, settings and placement."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--draft", default=None, help="folder or none (default: the demo draft with the demo target)")
    parser.add_argument("--tasks", default="continue", help=f"of {', '.join(texts.TASKS)}")
    parser.add_argument("--lengths", default=lengths, help="prompt lengths in tokens")
    parser.add_argument("--settings", default=settings)
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--offload", default="")
    parser.add_argument("--link-gbps", type=float, default=None)
    return parser


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, lengths="4096,8192,16384,32000", settings="transformers,plain,default", max_tokens=256)
    parser.add_argument("--temperatures", default="0.6")
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


def demo_models(model: Path | None, draft: str | None) -> tuple[Path, Path | None]:
    """The folders of target and draft: the demo pair by default; with another target no draft unless it is named."""
    folder = Path(str(resources.files("triforce_cli"))) / "models"
    model = model or folder / "demo-target"
    if draft in (None, "none"):
        with_demo = draft is None and model == folder / "demo-target"
        return model, folder / "demo-draft" if with_demo else None
    return model, Path(str(draft))


def main() -> None:
    args = arguments()
    model, draft = demo_models(args.model, args.draft)
    tokenizer = load_tokenizer(model, draft)
    offload = frozenset(filter(None, args.offload.split(",")))
    options = Options(offload=offload, link_gbps=args.link_gbps)
    settings, rows, measured = args.settings.split(","), [], list[Measurement]()
    for task, length, temperature in itertools.product(
        args.tasks.split(","), map(int, args.lengths.split(",")), map(float, args.temperatures.split(","))
    ):
        prompt = texts.prompt(task, tokenizer, length)
        case = Case(model, draft, task, prompt, args.max_tokens, temperature, options)
        results = measure(case, settings, args.turns)
        plain = results.get("plain", [])
        rows += [row_of(case, setting, runs, plain) for setting, runs in results.items()]
        prompted = {"task": task, "length": len(prompt), "temperature": temperature}
        for setting, runs in results.items():
            measured += [prompted | {"setting": setting, "turn": turn} | run for turn, run in enumerate(runs)]
    link = f", link {args.link_gbps} GB/s" if args.link_gbps else ""
    title = f"{model.name}, offload {args.offload or 'none'}{link}"
    columns = [
        "task", "prompt", "temp", "setting", "ms/token", "range", "vs plain", "predicted", "accept", "accept retr.",
        "tokens/round", "link",
    ]  # fmt: skip
    emit(columns, rows, about(title, 0), measured)


if __name__ == "__main__":
    main()
