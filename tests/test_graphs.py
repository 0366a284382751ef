"""Passes that run as CUDA graphs, on paper: the logits of the same passes launched one by one, and when a graph is
recorded anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from models import random_tokens, save_pair
from offload.bench import text_checks
from offload.engine import Engine
from offload.errors import TriforceError, UsageError
from offload.model.graphs import VARIABLE, Graphs
from offload.plan.hardware import RTX_4090, Hardware
from paper import Card, on_paper
from paper.engines import CASES, PROMPT, Pair, engine_on_paper, loaded, said
from paper.graphs import Graph

CASE = CASES["draft, kv streamed"]
GPU = Hardware("cuda:0", "a card on paper", 2**34, 2**34, True, RTX_4090)
TOKENS = random_tokens(400, seed=7)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"), context=256)


def draft_passes(engine: Engine) -> list[Tensor]:
    """One row and more, rows taken back, and more tokens than the window's buffer has room for."""
    level = engine.levels["draft"]
    logits = [level.forward(PROMPT, 1)]
    for number, count in enumerate([1, 1, 1, 2, 3, 4, 2, 1, 3] * 12):
        logits.append(level.forward(TOKENS[number : number + count], count))
        if number % 4 == 3:
            level.truncate(level.length - 1)
    return logits


def retrieval_passes(engine: Engine) -> list[Tensor]:
    """Between refreshes, and in a tail that outgrows its room."""
    level, target, logits = engine.levels["retrieval"], engine.levels["target"], []
    for count in (3, 1, 5, 60):
        target.forward(TOKENS[:count], 1)
        engine.worker.refresh(count)
        for number in range(4):
            logits += [level.forward(TOKENS[number : number + rows], rows) for rows in (1, 1, 2, 3)]
        level.truncate(target.length)
    return logits


@pytest.mark.parametrize("passes", [draft_passes, retrieval_passes])
def test_logits_are_those_of_passes_launched_one_by_one(
    passes: Callable[[Engine], list[Tensor]], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.cache.retrieval.TAIL_TOKENS", 16)  # less than the tail will have
    found, replays = [], []
    for value in ("on", "off"):
        monkeypatch.setenv(VARIABLE, value)
        with engine_on_paper(CASE, pair) as (engine, card):
            engine.precompute(PROMPT)
            card.launches.clear()
            found.append([logits.cpu() for logits in passes(engine)])
            replays.append(card.launches["graph"])
        assert card.problems == []
    assert replays[0] > len(found[0]) // 2
    assert replays[1] == 0
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def test_a_replay_is_a_few_launches(pair: Pair) -> None:
    with engine_on_paper(CASE, pair) as (engine, card):
        said(engine)
        for level, most in (("draft", 8), ("retrieval", 8)):
            for _ in range(3):
                card.launches.clear()
                engine.levels[level].forward([1], 1)
            assert card.launches["graph"] == 1
            assert card.launches.total() <= most


@pytest.mark.parametrize("wrong", [False, True])
def test_the_doctor_compares_them(wrong: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_checks, "PROMPT", PROMPT)
    if wrong:
        monkeypatch.setattr(Graph, "replay", lambda graph: None)
    with on_paper():
        monkeypatch.setattr(text_checks, "_engine", lambda *_: loaded(CASE, pair))
        checks = text_checks.text_checks(GPU, *pair)
        [graphs] = [run for name, run, _ in checks if name == "graphs"]
        passed, shown = graphs()
    assert passed != wrong
    assert ("the same bits" in shown) != wrong


@pytest.fixture
def card_on_paper() -> Iterator[Card]:
    with on_paper() as card:
        yield card


def test_a_card_that_records_nothing_is_an_error_with_a_remedy(
    card_on_paper: Card, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    graphs, tokens = Graphs(), torch.zeros(2, device="cuda:0")
    assert graphs.run(0, tokens, lambda rows: rows + 1).tolist() == [1, 1]
    with pytest.raises(
        TriforceError, match=r"\(operation not permitted when stream is capturing\); TRIFORCE_GRAPHS=off"
    ):
        graphs.run(0, tokens, lambda rows: rows + 1)


@torch.inference_mode()
def test_graphs_are_recorded_anew_for_other_memory(card_on_paper: Card) -> None:

    graphs, tokens = Graphs(), torch.zeros(2, device="cuda:0")
    for memory in (0, 1):
        added = torch.full((2,), float(memory + 1), device="cuda:0")
        for _ in range(3):
            assert graphs.run(memory, tokens, added.__add__).tolist() == [memory + 1.0] * 2
    assert card_on_paper.launches["graph"] == 4
    assert card_on_paper.problems == []


def test_a_wrong_value_of_the_variable_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(UsageError, match="TRIFORCE_GRAPHS is 'no'; on and off are known"), engine_on_paper(CASE, pair):
        pass
