"""Launches and waits of the host in each kind of pass, counted on paper: budgets that may only go down.

Of a model of two layers with torch's operators, its KV streamed. Counts do not depend on a model's width; they grow
with layers and with the tiles that rows attend to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from kit.models import random_tokens, save_pair
from offload.decode.proposal import Proposer
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import Speculator
from offload.engine.engine import Engine
from offload.model.passes import forward
from paper.engines import CASES, Pair, engine_on_paper

PROMPT = random_tokens(75, seed=3)
CASE = replace(CASES["draft, kv streamed"], num_prompt=len(PROMPT))
SEQUENCE = [*PROMPT, 1]  # of which the caches have the prompt
SAMPLED = SamplingParams(seed=1)


@dataclass(frozen=True)
class Budget:
    """Of one pass. launches: kernels and copies. waits: of the host for the GPU. is_of_graphs: some of it is."""

    launches: int
    waits: int
    is_of_graphs: bool = True


def _pass(level: str, num_rows: int) -> Callable[[Engine], object]:
    return lambda engine: forward(engine.levels[level], [1] * num_rows, num_rows)


def _speculator(engine: Engine, sampling: SamplingParams = SAMPLED) -> Speculator:
    """Of the target."""
    return engine._make_speculator(sampling, engine.distribution(sampling, 1, ()), speculation=True)


def _retrieval(engine: Engine) -> Speculator:
    proposer = _speculator(engine)._proposers[-1]
    assert isinstance(proposer, Speculator)
    return proposer


def _drafts(engine: Engine) -> Proposer:
    return _retrieval(engine)._proposers[0]


PASSES: dict[str, tuple[Callable[[Engine], object], Budget]] = {
    "target, 1 row": (_pass("target", 1), Budget(426, 0, False)),
    "target, 4 rows": (_pass("target", 4), Budget(426, 0, False)),
    "retrieval, 1 row": (_pass("retrieval", 1), Budget(5, 0)),
    "draft, 1 row past its window": (_pass("draft", 1), Budget(5, 0)),
    "three tokens of the draft": (lambda engine: _drafts(engine).propose(SEQUENCE, 3), Budget(26, 1)),
    "retrieval round, with a draft": (
        lambda engine: _retrieval(engine).round(SEQUENCE, 3),
        Budget(32, 2),
    ),
    "round of one row, with a refresh": (lambda engine: _speculator(engine).round(SEQUENCE, 1), Budget(534, 3, False)),
    "refresh": (lambda engine: engine.worker.refresh(1), Budget(56, 3, False)),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"), context=256)


@pytest.fixture(scope="module")
def counted(pair: Pair) -> dict[str, Budget]:
    """What each pass took, one after the other on one engine."""
    counted = {}
    with engine_on_paper(CASE, pair) as (engine, gpu):
        for name, (run, budget) in PASSES.items():
            for _ in range(3 if budget.is_of_graphs else 1):  # launched one by one, recorded as a graph, and as a graph
                engine.precompute(PROMPT)
                if "draft" in name:
                    engine.levels["draft"].truncate(0)
                    forward(engine.levels["draft"], PROMPT, 1)
                launches, waits = gpu.launches.total(), gpu.syncs.total()
                run(engine)
            counted[name] = Budget(gpu.launches.total() - launches, gpu.syncs.total() - waits)
    assert gpu.problems == []
    return counted


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_its_budget(name: str, counted: dict[str, Budget]) -> None:
    budget = PASSES[name][1]
    assert counted[name].launches <= budget.launches
    assert counted[name].waits <= budget.waits
