"""Acceptance of the target's drafts in fewer bits or over a part of its cache, of a draft model's and of lookups'.

usage: python benchmarks/bits.py [--model DIR] [--draft DIR] [--lengths 8000] [--tasks continue,edit]
                                 [--temperatures 0,0.6,1]
                                 [--levels kv_bits=4,weight_bits=4,weight_bits=4+kv_bits=4,budget=2048,draft,lookup]

The target generates a text after each prompt. Then each level reads it in blocks, refreshed before each one as after a
verification. With its distribution q of a token and the target's p, a token drawn from q is accepted with probability
sum(min(p, q)); the result is the mean over the text's tokens. For lookups it is the share of the text's tokens that a
lookup proposes; a lookup that finds nothing proposes none. predicted: the plan's expectation for parts of the target.
"""

from __future__ import annotations

import argparse
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import texts
import torch
from report import about, emit, say

from offload.decode.lookup import LookupProposer
from offload.decode.sampling import SamplingParams
from offload.decode.warp import warp
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.model.passes import forward
from offload.plan.planner import Options, Plan

BLOCK = 16  # tokens
DRAFT, LOOKUP = "draft", "lookup"
TOP_P = 0.9


def plan_of(model: Path, draft: Path | None, prompt: list[int], num_tokens: int, level: str) -> Plan:
    changes = dict(part.split("=") for part in level.split("+") if "=" in part)
    bits: dict[str, Any] = {"weight_bits": 16, "kv_bits": 16} | {name: int(value) for name, value in changes.items()}
    drafts = level == DRAFT
    gamma = BLOCK - 1 if level else 0
    options = Options(device="cpu", gamma=gamma, draft_gamma=gamma if drafts else None, lookup=False, **bits)
    return plan_request(
        model, draft if drafts else None, options, num_prompt_tokens=len(prompt), max_tokens=num_tokens + 2 * BLOCK
    )


def accepted(engine: Engine, tokens: list[int], start: int, sampling: SamplingParams) -> list[float]:
    """For each token from `start` on, the probability that the target accepts a token drawn from the level below in its
    place."""
    target, own = engine.levels["target"], engine.levels[engine.plan.composition.levels[0]]
    worker, chances = engine.worker, list[float]()
    for at in range(start, len(tokens) - BLOCK + 1, BLOCK):
        q = warp(forward(own, tokens[own.length : at + BLOCK], BLOCK), sampling)
        own.truncate(at)
        p = warp(forward(target, tokens[target.length : at + BLOCK], BLOCK), sampling)
        chances += torch.minimum(p, q).sum(-1).tolist()
        own.truncate(at)
        worker.refresh(BLOCK)
    return chances


def looked_up(prompt: list[int], text: list[int]) -> float:
    """The share of the text's tokens that a lookup in the text before them proposes."""
    proposer, tokens, right = LookupProposer(), prompt + text, 0
    for at in range(len(prompt), len(tokens)):
        if proposer.offer(tokens[:at]).num_tokens:
            right += proposer.propose(tokens[:at], 1).tokens == tokens[at : at + 1]
    return right / len(text)


def measured(
    models: tuple[Path, Path | None], level: str, first: Engine, prompt: list[int], text: list[int],
    sampling: SamplingParams,
) -> tuple[float, float | None]:  # fmt: skip
    """(mean acceptance, the plan's expectation) of one level on `text`, which follows `prompt`; `first` has the
    prompt's prefill."""
    if level == LOOKUP:
        return looked_up(prompt, text), None
    model, draft = models
    plan = plan_of(model, draft, prompt, len(text), level)
    used = draft if level == DRAFT else None
    with Engine.load(plan, model, used, load_tokenizer(model, used)) as engine:
        engine.take_prompt(first)
        [*_] = engine.generate(
            GenerationRequest(prompt, SamplingParams(temperature=0.0), max_tokens=1)
        )  # also prepares the levels below
        worker, target = engine.worker, engine.levels["target"]
        target.truncate(len(prompt) - BLOCK)
        worker.record_mass(True)
        forward(target, prompt[-BLOCK:], 1)
        worker.refresh(BLOCK)
        chances = accepted(engine, prompt + text, len(prompt), sampling)
    return sum(chances) / len(chances), None if level == DRAFT else plan.predicted.acceptance


def shares(run: dict[str, Any]) -> list[str]:
    return ["" if run[name] is None else f"{run[name]:.3f}" for name in ("acceptance", "predicted")]


def main() -> None:
    models = resources.files("triforce_cli") / "models"
    parser = argparse.ArgumentParser(usage="\n".join((__doc__ or "").splitlines()[2:4]).removeprefix("usage: "))
    parser.add_argument("--model", type=Path, default=Path(str(models / "demo-target")))
    parser.add_argument("--draft", type=Path, default=None)
    parser.add_argument("--lengths", default="8000")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tasks", default="continue,edit")
    parser.add_argument("--temperatures", default="0,0.6,1")
    parser.add_argument("--levels", default="kv_bits=4,weight_bits=4,weight_bits=4+kv_bits=4,budget=2048")
    arguments = parser.parse_args()
    model, tokenizer, runs = arguments.model, load_tokenizer(arguments.model, None), []
    for length, task in product(map(int, arguments.lengths.split(",")), arguments.tasks.split(",")):
        prompt = texts.prompt(task, tokenizer, length)
        with Engine.load(plan_of(model, None, prompt, arguments.tokens, ""), model, None, tokenizer) as first:
            for temperature in map(float, arguments.temperatures.split(",")):
                sampling = SamplingParams(temperature=temperature, top_p=TOP_P, seed=0)
                steps = list(
                    first.generate(GenerationRequest(prompt, sampling, max_tokens=arguments.tokens, reuse=True))
                )
                text = [token for step in steps for token in step.tokens]
                for level in arguments.levels.split(","):
                    mean, predicted = measured((model, arguments.draft), level, first, prompt, text, sampling)
                    say(f"{task}, {len(prompt)} tokens, temperature {temperature}, {level}: {mean:.3f}")
                    runs.append(
                        {"task": task, "length": len(prompt), "temperature": temperature, "level": level}
                        | {"tokens": len(text), "acceptance": mean, "predicted": predicted}
                    )
    columns = ["task", "prompt", "temp", "level", "acceptance", "predicted"]
    rows = [[str(run[name]) for name in ("task", "length", "temperature", "level")] + shares(run) for run in runs]
    emit(columns, rows, about(f"{model.name}, acceptance of fewer bits", 0), runs)


if __name__ == "__main__":
    main()
