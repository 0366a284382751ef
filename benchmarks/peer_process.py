"""This program's engine, or transformers, as a process with the protocol of llama_cpp.py.

usage: python peer_process.py < requests > answers
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from llama_cpp import Way, serve
from reference import SDPA, Reference

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, timed
from offload.engine.request import GenerationRequest
from offload.engine.sequences import Sequences
from offload.metrics import Stats
from offload.plan.planner import Options
from offload.plan.request import Request

LOOKUP_TOKENS = 10  # as in transformers' own examples


class Ours:
    """This program's engine. Sequences are kept, so each has the rows of its last prompt for the next."""

    def __init__(self, options: dict[str, Any]) -> None:
        model, draft = folders(options)
        asked = Options(speculation=options["speculation"], dtype="bf16", device="cpu", **placed(options))
        request = timed(Request.on_this_machine(model, draft, asked))
        plan = request.plan(num_prompt_tokens=options["prompt_tokens"], max_tokens=options["max_tokens"])
        slots = options.get("slots", 1)
        plan = request.together(plan, slots, most=slots)
        self._engine = Engine.load(plan, model, draft, load_tokenizer(model, draft))
        self._sequences = Sequences[int](self._engine)
        self.about: dict[str, Any] = {"plan": plan.as_dict()}

    def generate(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        tokens, seconds, start = list[int](), list[float](), time.perf_counter()
        for step in self._engine.generate(
            GenerationRequest(request["prompt"], sampling_of(request), **ends_of(request))
        ):
            tokens += step.tokens
            seconds += [time.perf_counter() - start] * len(step.tokens)
        return tokens, seconds

    def generate_all(self, request: dict[str, Any]) -> tuple[list[list[int]], float]:
        for key, prompt in enumerate(request["prompts"]):
            self._sequences.join(key, GenerationRequest(prompt, sampling_of(request), **ends_of(request)))
        said: list[list[int]] = [[] for _ in request["prompts"]]
        start, before = time.perf_counter(), self._engine.worker.link_stats
        while len(self._sequences):
            for key, step in self._sequences.steps():
                said[key] += step.tokens
                if step.finish is not None:
                    self._sequences.leave(key)
        seconds = time.perf_counter() - start
        link = self._engine.worker.link_stats - before
        self.about["link_idle"] = Stats(decode_seconds=seconds, decode_link=link).link_idle
        return said, seconds


class Transformers:
    def __init__(self, options: dict[str, Any]) -> None:
        model, draft = folders(options)
        lookup = LOOKUP_TOKENS if options["lookup"] else None
        attention = options.get("attention", SDPA)
        self._reference = Reference(model, dtype="bf16", device="cpu", attention=attention, draft=draft, lookup=lookup)
        self.about: dict[str, Any] = {}

    def generate(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        return self._reference.generate(request["prompt"], sampling_of(request), **ends_of(request))

    def generate_all(self, request: dict[str, Any]) -> tuple[list[list[int]], float]:
        return self._reference.generate_all(request["prompts"], **ends_of(request))


def folders(options: dict[str, Any]) -> tuple[Path, Path | None]:
    return Path(options["model"]), Path(options["draft"]) if options["draft"] else None


def placed(options: dict[str, Any]) -> dict[str, Any]:
    """The placement fields of `Options`: the parts behind a link, and its speed."""
    if options.get("link_gbps") is None:
        return {}
    return {"offload": frozenset({"kv"}), "link_gbps": options["link_gbps"]}


def sampling_of(request: dict[str, Any]) -> SamplingParams:
    names = {field.name for field in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in request.items() if name in names})


def ends_of(request: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": request["max_tokens"], "end_tokens": request["end_tokens"]}


def open_way(options: dict[str, Any]) -> Way:
    torch.set_num_threads(options["threads"])
    return Ours(options) if "speculation" in options else Transformers(options)


if __name__ == "__main__":
    serve(open_way)
