"""Engines in several threads of one process, and on several threads each, give what one gives alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
import torch

from kit.models import GREEDY, Sizes, random_model, random_tokens, save, tiny_engine, tiny_plan
from kit.processor import process_uses, threads
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest

SIZES = Sizes(gamma=5, draft_gamma=2)
PROMPTS = [random_tokens(count, seed=count, vocabulary=256) for count in (40, 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(vocab_size=264, seed=11), tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(autouse=True)
def on_kernels() -> Iterator[None]:
    with process_uses("kernels"):
        yield


def engine(folder: Path, sizes: Sizes, *, dtype: str, offload: frozenset[str]) -> Engine:
    plan = tiny_plan(folder, folder, sizes, num_prompt_tokens=100, max_tokens=40, dtype=dtype, offload=offload)
    return tiny_engine(plan, folder, folder)


def tokens_of(engine: Engine, prompt: list[int]) -> list[int]:
    return [
        token for step in engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=20)) for token in step.tokens
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_engines_in_two_threads_say_what_each_says_alone(folder: Path, dtype: str, number: int) -> None:
    """One with all on the device, the other with its tiles and weights streaming; `number` threads for the kernels of
    each, which are set in the thread that calls."""
    with (
        engine(folder, SIZES, dtype=dtype, offload=frozenset()) as first,
        engine(folder, replace(SIZES, gamma=3), dtype=dtype, offload=frozenset({"kv", "weights"})) as second,
    ):
        engines = list(zip((first, second), PROMPTS, strict=True))
        alone = [tokens_of(each, prompt) for each, prompt in engines]
        assert alone[0] != alone[1]
        start = Barrier(2)

        def several(each: Engine, prompt: list[int]) -> list[list[int]]:
            torch.set_num_threads(number)
            start.wait(60)
            return [tokens_of(each, prompt) for _ in range(2)]

        with ThreadPoolExecutor(2) as pool:
            together = [call.result() for call in [pool.submit(several, *each) for each in engines]]
        assert together == [[said] * 2 for said in alone]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_text_is_the_same_on_any_number_of_threads_after_the_prefill(folder: Path, dtype: str) -> None:
    """A pass of few rows adds the same numbers in the same order; a short prompt runs as one."""
    said = []
    for number in (1, 2, 3):
        with threads(number), engine(folder, SIZES, dtype=dtype, offload=frozenset()) as each:
            said.append(tokens_of(each, PROMPTS[0][:3]))
    assert said[0] == said[1] == said[2]
