"""Ways of decoding compared: turns, numbers, and plain decoding on an engine that could do more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kit.models import GREEDY, TOKENIZER_SIZE, Sizes, random_tokens, save_pair, tiny_engine, tiny_plan
from offload.bench.comparison import PLAIN, TRIFORCE, WAYS, Comparison, Run
from offload.bench.trial import WARM_UP, Step, Trial
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.errors import TriforceError
from offload.metrics import LevelStats, Spread, Stats
from offload.plan.planner import Plan

LEVELS = Sizes(gamma=5, draft_gamma=2, budget=16, chunk=4, window=8, lookup=True)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=512)
    return folder


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_tokens(90, vocabulary=256) * 2


@pytest.fixture(scope="module")
def plan(folder: Path, prompt: list[int]) -> Plan:
    sizes = replace(LEVELS, capacity=len(prompt) + NUM_TOKENS)
    return tiny_plan(folder / "target", folder / "draft", sizes, num_prompt_tokens=len(prompt), max_tokens=NUM_TOKENS)


@pytest.fixture
def engine(folder: Path, plan: Plan) -> Iterator[Engine]:
    with tiny_engine(plan, folder / "target", folder / "draft") as engine:
        yield engine


def said(engine: Engine, prompt: list[int], *, speculation: bool) -> list[int]:
    steps = engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=NUM_TOKENS, speculation=speculation))
    return [token for step in steps for token in step.tokens]


def passes(engine: Engine) -> dict[str, int]:
    return {level.name: level.passes for level in engine.stats.levels}


def trial_of(plan: Plan, prompt: list[int], **changes: object) -> Trial:
    asked = {"prompt": tuple(prompt), "plan": plan, "sampling": GREEDY, "max_tokens": NUM_TOKENS, "repeats": 2}
    return Trial(**(asked | changes))


def run_of(way: str, turn: int, milliseconds: float, tokens: tuple[int, ...] = (1, 2, 3)) -> Run:
    stats = Stats(levels=[LevelStats("target", rounds=4, drafted=10 * turn, accepted=6)])
    return Run(way=way, turn=turn, tokens=tokens, milliseconds_per_token=milliseconds, stats=stats)


def comparison_of(plan: Plan, *runs: Run) -> Comparison:
    return Comparison(plan=plan, greedy=True, prefill_rates={PLAIN: 100.0}, runs=runs)


class TestPlainOnOneEngine:
    def test_it_is_what_an_engine_without_speculation_says_one_token_a_pass(self, engine, folder, plan, prompt):
        alone = tiny_plan(
            folder / "target", None, replace(LEVELS, gamma=0, capacity=plan.request.capacity),
            num_prompt_tokens=len(prompt), max_tokens=NUM_TOKENS,
        )  # fmt: skip
        with tiny_engine(alone, folder / "target") as plain:
            expected = said(plain, prompt, speculation=True)
        assert said(engine, prompt, speculation=False) == expected
        assert passes(engine) == {"target": NUM_TOKENS, "retrieval": 0, "draft": 0}
        assert engine.stats.refresh_seconds == 0.0
        assert engine.retrieval is not None
        assert not engine.retrieval.full.record_mass

    def test_speculation_before_and_after_it_is_the_same(self, engine, prompt):
        first = said(engine, prompt, speculation=True)
        assert 0 < passes(engine)["target"] < NUM_TOKENS
        assert passes(engine)["draft"] > 0
        assert said(engine, prompt, speculation=False) == first
        assert said(engine, prompt, speculation=True) == first
        assert passes(engine)["draft"] > 0


class TestTrial:
    def test_ways_take_turns_and_every_other_turn_is_backwards(self, plan, prompt):
        steps = trial_of(plan, prompt).steps
        assert [step.way for step in steps] == [*WAYS, *reversed(WAYS), *WAYS]
        assert [step.turn for step in steps] == [0, 0, 1, 1, 2, 2]

    def test_one_prefill_serves_all_runs_and_the_warm_up_does_not_count(self, engine, plan, prompt):
        prefilled = []
        steps = list[Step]()
        found = trial_of(plan, prompt).run(
            engine, on_step=steps.append, on_progress=lambda progress: prefilled.append(progress.done)
        )
        assert max(prefilled) == len(prompt) - plan.placement.rows
        assert prefilled == sorted(prefilled)  # it went once from the first to the last row
        assert [step.turn for step in steps].count(WARM_UP) == 2
        assert [(run.way, run.turn) for run in found.runs] == [
            (TRIFORCE, 1), (PLAIN, 1), (PLAIN, 2), (TRIFORCE, 2),
        ]  # fmt: skip
        assert all(len(run.tokens) == NUM_TOKENS for run in found.runs)
        assert found.prefill_rates.keys() == {PLAIN}
        assert found.first_difference is None

    def test_a_text_that_ends_at_once_is_refused(self, folder, plan, prompt, engine, monkeypatch):
        monkeypatch.setattr(Engine, "end_tokens", frozenset(range(TOKENIZER_SIZE)))
        with pytest.raises(TriforceError, match="ended its text with token 1, too early to be timed"):
            trial_of(plan, prompt).run(engine, on_step=lambda step: None, on_progress=lambda progress: None)

    def test_sampled_turns_have_seeds_of_their_own(self, engine, plan, prompt):
        sampling = replace(GREEDY, temperature=1.0, top_p=1.0, seed=3)
        found = trial_of(plan, prompt, sampling=sampling).run(
            engine, on_step=lambda step: None, on_progress=lambda progress: None
        )
        first, second = found.of(PLAIN)
        assert first.tokens != second.tokens
        assert not found.greedy


class TestComparison:
    def test_ratios_are_of_runs_of_the_same_turn(self, plan):
        found = comparison_of(
            plan,
            *(run_of(TRIFORCE, turn, time) for turn, time in ((1, 10.0), (2, 20.0), (3, 40.0))),
            *(run_of(PLAIN, turn, time) for turn, time in ((3, 40.0), (2, 60.0), (1, 20.0))),
        )
        assert found.milliseconds(PLAIN) == Spread(40.0, 20.0, 60.0)
        assert found.ratio == Spread(2.0, 1.0, 3.0)

    def test_counts_are_added_up_before_they_are_divided(self, plan):
        found = comparison_of(plan, run_of(PLAIN, 1, 1.0), run_of(TRIFORCE, 1, 1.0), run_of(TRIFORCE, 2, 1.0))
        assert found.acceptance == 12 / 30
        assert found.tokens_per_pass == (12 + 8) / 8

    def test_the_first_differing_token_of_any_turn_is_found(self, plan):
        found = comparison_of(
            plan,
            *(run_of(PLAIN, turn, 1.0) for turn in (1, 2, 3)),
            run_of(TRIFORCE, 1, 1.0),
            run_of(TRIFORCE, 2, 1.0, (1, 2)),
            run_of(TRIFORCE, 3, 1.0, (1, 7, 3)),
        )
        assert found.first_difference == 1
        shorter = comparison_of(plan, run_of(PLAIN, 1, 1.0), run_of(TRIFORCE, 1, 1.0, (1, 2)))
        assert shorter.first_difference == 2
