"""The published rule for choosing chunks, which benchmarks put into an engine."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.testing import assert_close

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.kv.retrieval import RetrievalCache
from offload.plan.options import Options
from test_caches import (
    CHUNK,
    DIM,
    KV_HEADS,
    LAYERS,
    ROWS,
    Driver,
    Tape,
    assert_holds_exactly,
    make_full,
    make_retrieval,
    turn,
)

ROOT = Path(__file__).resolve().parents[1]
TARGET, DRAFT = (ROOT / "triforce_cli" / "models" / name for name in ("demo-target", "demo-draft"))


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("published")


def test_scores_are_the_last_query_that_stayed_times_each_mean_key(published: ModuleType) -> None:
    tape = Tape()
    full = make_full(tape)
    by_mean_key = published.ByMeanKey(published.LastQueries(full))
    driver = Driver(full, tape, padding=ROWS)
    driver.extend([0] * 37, phase="prefill")
    driver.extend([0] * 6)
    scores = by_mean_key.scores(full, 4, CHUNK, 40 // CHUNK)
    assert scores.shape == (LAYERS, KV_HEADS, 40 // CHUNK)
    for layer in range(LAYERS):
        q, k, _ = (tensor.double() for tensor in tape.rows(layer, 0, driver.history))
        q, k = (turn(tensor, tape.rope, torch.arange(43)) for tensor in (q, k))
        means = k[: 40 // CHUNK * CHUNK].unflatten(0, (-1, CHUNK)).mean(1)
        query = q[40].view(KV_HEADS, -1, DIM).sum(1)
        slow = torch.einsum("hd,chd->hc", query, means)
        assert_close(scores[layer].double(), slow, atol=1e-4, rtol=1e-4)


def test_a_choice_stays_while_its_tail_outgrows_its_room(published: ModuleType) -> None:
    """The tail's room grows by steps of 128 tokens; what was in the buffer must come along."""
    tape, budget = Tape(), 4 * CHUNK
    full = make_full(tape, mass=False)
    published.install(retrieval := make_retrieval(full, budget=budget))
    target, inner = Driver(full, tape, padding=ROWS), Driver(retrieval, tape)
    target.extend([0] * 20)
    retrieval.refresh(20)
    chunks = retrieval.chunks
    assert chunks is not None
    before = retrieval.nbytes()
    while len(target.history) < 165:
        inner.history = list(target.history)
        inner.extend([2] * 11)
        target.extend([0] * 7)
        inner.truncate(len(target.history))
        retrieval.refresh(7)
        assert_holds_exactly(retrieval, full, budget=budget)
    assert retrieval.chunks is chunks
    assert retrieval.nbytes() > before


def test_a_tail_that_stays_gets_the_rows_that_are_new(published: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after the last refresh, and those that came in the place of forgotten ones."""
    tape = Tape()
    full = make_full(tape, mass=False)
    published.install(retrieval := make_retrieval(full, budget=4 * CHUNK))
    target = Driver(full, tape, padding=ROWS)
    target.extend([0] * 20)
    retrieval.refresh(20)
    fill, fetched = retrieval._chosen.fill, list[tuple[int, int]]()
    monkeypatch.setattr(
        retrieval._chosen, "fill", lambda tail, wanted: fetched.append((tail.start, tail.stop)) or fill(tail, wanted)
    )
    for kept, token in ((20, 1), (27, 1), (23, 2)):
        target.truncate(kept)
        retrieval.truncate(kept)
        target.extend([token] * 7)
        retrieval.refresh(7)
        assert_holds_exactly(retrieval, full, budget=4 * CHUNK)
    assert fetched == [(20, 27), (27, 34), (23, 30)]


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [frozenset({"kv"}), frozenset[str]()])
def test_an_engine_chooses_once_for_a_prompt_and_says_what_it_says_without(
    offload: frozenset[str], published: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [7 + i * i % 3900 for i in range(220)]
    options = Options(device="cpu", gamma=15, draft_gamma=2, budget=128, chunk=16, kv_bits=16, offload=offload)
    plan = plan_request(TARGET, DRAFT, options, num_prompt_tokens=len(prompt), max_tokens=40)
    chosen, texts = list[int](), list[list[int]]()
    scores = RetrievalCache._scores
    monkeypatch.setattr(
        RetrievalCache, "_scores", lambda cache, rows: chosen.append(cache.full.length) or scores(cache, rows)
    )
    for with_it in (False, True):
        chosen.clear()
        with Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
            if with_it:
                published.install(engine.retrieval)
            steps = list(engine.generate(GenerationRequest(prompt, SamplingParams(temperature=0.0), max_tokens=40)))
            texts.append([token for step in steps for token in step.tokens])
            assert any(level.passes for level in engine.stats.levels if level.name == "retrieval")
    assert len(chosen) == 1
    assert texts[0] == texts[1]


def test_without_a_level_that_retrieves_there_is_nothing_to_choose(published: ModuleType) -> None:
    with pytest.raises(SystemExit, match="budget"):
        published.install(None)
