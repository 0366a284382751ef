"""Sequences take turns: while a full pass of some waits for a tile, the others draft in the middle of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import asked
from asked import NEVER, Asked, alone, check, together
from models import GREEDY, LateLink, Sizes, changed, random_model, random_tokens, save, tiny_engine, tiny_plan
from offload import sequences
from offload.cache.residence import StreamedTiles
from offload.decode.sampling import SamplingParams
from offload.engine import Engine
from offload.model.level import Level
from offload.sequences import Sequences
from processor import OPERATORS, best, process_uses

TWO = Sizes(gamma=7, draft_gamma=3, lookup=True, adaptive=True)
FIXED = Sizes(gamma=5, draft_gamma=2)
IN_FEW_BITS = Sizes(gamma=5, draft_gamma=2, budget=0, weight_bits=4, kv_bits=4, page=32, capacity=600)
ROOM, OUTPUT = 200, 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("turns")
    whole_groups = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
    return (
        save(random_model("qwen2", vocab_size=264, seed=11, **whole_groups), root / "target", tokenizer=True),
        save(random_model(vocab_size=264, seed=12, num_hidden_layers=1), root / "draft", tokenizer=True),
    )


@contextmanager
def made(
    folders: tuple[Path, Path],
    sizes: Sizes,
    num_sequences: int,
    *,
    turns: bool = True,
    late: bool = True,
    **fields: Any,
) -> Iterator[Engine]:
    """Over a streamed cache whose tiles come when they are waited for and no sooner, or, not `late`, at once."""
    target, draft = folders
    plan = tiny_plan(
        target,
        draft,
        sizes,
        num_prompt_tokens=ROOM - OUTPUT,
        max_tokens=OUTPUT,
        dtype=fields.pop("dtype", "bf16"),
        offload=frozenset({"kv"}),
        num_sequences=num_sequences,
    )
    plan = changed(plan, turns=turns, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.parts.make_link", lambda *_: LateLink(late_in=late, late_out=late))
        engine = tiny_engine(plan, target, draft)
    with engine:
        yield engine


def some(count: int, *, seed: int) -> list[Asked]:
    return asked.some(count, seed=seed, most=ROOM - OUTPUT, output=OUTPUT)


@dataclass
class Passes:
    """That were run: of which level, by how many sequences, and how many were under way then."""

    found: list[tuple[str, int, int]] = field(default_factory=list)
    depth: int = 0

    @property
    def nested(self) -> list[tuple[str, int, int]]:
        return [each for each in self.found if each[2]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    seen, run = Passes(), sequences._run_as_one

    def watched(part: Any) -> None:
        seen.found.append((part[0].level.stats.name, len(part), seen.depth))
        seen.depth += 1
        try:
            run(part)
        finally:
            seen.depth -= 1

    monkeypatch.setattr(sequences, "_run_as_one", watched)
    return seen


@pytest.mark.parametrize("number", range(1, 9))
def test_each_of_one_to_eight_says_what_it_says_alone(folders, number, passes):
    with made(folders, TWO, number) as engine:
        check(engine, some(number + 4, seed=number))
    assert bool(passes.nested) == (number > 1)
    assert {name for name, _, _ in passes.nested} <= {"draft", "retrieval"}
    assert max(depth for _, _, depth in passes.found) <= 1


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [FIXED, replace(FIXED, draft_gamma=0), TWO])
def test_so_it_is_with_any_levels_and_any_operators(folders, sizes, dtype, operators, passes):
    with process_uses(operators), made(folders, sizes, 3, dtype=dtype) as engine:
        check(engine, some(6, seed=20))
    assert passes.nested


def test_trace(folders, passes):
    requests = [Asked(random_tokens(60, seed=number), GREEDY, OUTPUT) for number in range(4)]
    with made(folders, FIXED, 4) as engine:
        together(engine, requests)
    for each in passes.found: print("    " * each[2], each[:2])
