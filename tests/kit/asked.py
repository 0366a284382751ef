"""Requests that run side by side, and what each says alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kit.models import random_tokens
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.engine.sequences import Sequences
from offload.metrics import Stats
from offload.progress import Progress, ignore

NEVER = 1000


@dataclass(frozen=True)
class Asked:
    """A request. leaves: after so many tokens, if it has not come to its end."""

    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    leaves: int = NEVER

    @property
    def settings(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "reuse": False}


def some(count: int, *, seed: int, most: int, output: int) -> list[Asked]:
    """Ragged prompts of up to `most` tokens, some of which begin alike, greedy and with seeds, for up to `output`."""
    chance, book = random.Random(seed), random_tokens(most, seed=seed)
    found = []
    for number in range(count):
        prompt = random_tokens(chance.randint(1, most), seed=seed + number)
        if chance.random() < 0.5:
            common = chance.randint(1, len(prompt))
            prompt = book[:common] + prompt[common:]
        sampling = SamplingParams(temperature=0.0 if number % 2 else 1.2, seed=number)
        found.append(Asked(prompt, sampling, chance.randint(1, output), chance.choice((5, NEVER, NEVER))))
    return found


def alone(engine: Engine, asked: Asked) -> list[int]:
    steps = engine.generate(GenerationRequest(asked.prompt, asked.sampling, **asked.settings))
    return [token for step in steps for token in step.tokens]


def together(
    engine: Engine, requests: Sequence[Asked], *, in_prefills: bool = False
) -> tuple[list[list[int]], list[Stats]]:
    """What each says; one that leaves early, up to then. As many as there is room for run at a time. in_prefills:
    where they may, sequences go on while every second prompt is prefilled."""
    said: dict[int, list[int]] = {}
    stats: dict[int, Stats] = {}
    waiting = list(enumerate(requests))
    with Sequences[int](engine) as sequences:

        def go_on(progress: Progress | None = None) -> None:
            for key, step in sequences.steps():
                said[key] += step.tokens
                if step.finish is not None or len(said[key]) >= requests[key].leaves:
                    stats[key] = sequences.leave(key)

        while waiting or len(sequences):
            while waiting and sequences.has_room:
                key, asked = waiting.pop(0)
                said[key] = []
                request = GenerationRequest(asked.prompt, asked.sampling, **asked.settings)
                goes_on = in_prefills and key % 2 and sequences.may_go_on_in_prefills
                sequences.join(key, request, on_progress=go_on if goes_on else ignore)
            go_on()
    return [said[key] for key in sorted(said)], [stats[key] for key in sorted(stats)]


def check(engine: Engine, requests: Sequence[Asked]) -> None:
    """Each says together with the others what it says alone."""
    found, _ = together(engine, requests, in_prefills=True)
    for asked, tokens in zip(requests, found, strict=True):
        expected = alone(engine, asked)
        assert tokens == (expected if len(tokens) < asked.leaves else expected[: len(tokens)])
        assert tokens
