"""Passes over whole caches as CUDA graphs, see `graph_scenes`: test_gpu_kernels.py runs
this in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.graph_scenes import (
    CODED,
    PLAIN,
    PROMPT,
    TOKENS,
    Case,
    assert_the_same,
    on_gpu,
    saved,
    texts,
)
from kit.models import Sizes
from offload.model.graphs import VARIABLE, Graphs
from offload.model.passes import Pass, forward
from paper.graphs import Graph

CASES = {
    "target": Case("target"),
    "target that records masses": Case("target", replace(PLAIN, gamma=4)),
    "cache in 4 bits": Case("self", CODED),
    "windows": Case("target", model="qwen2, windows"),
    "windows, drafted rows": Case("self", CODED, "qwen2, windows"),
    "sink logits": Case("target", model="qwen2, windows, sunk"),
    "sink logits, drafted rows": Case("self", CODED, "qwen2, windows, sunk"),
    "wide heads": Case("target", replace(PLAIN, gamma=4), "gemma4"),
    "wide heads, drafted rows": Case("self", CODED, "gemma4"),
    "states": Case("target", model="qwen3_5"),
    "states, drafted rows": Case("self", CODED, "qwen3_5"),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return saved(tmp_path_factory.mktemp("graphs"))


@EVERY
def test_logits_and_masses_are_those_of_passes_launched_one_by_one(case: Case, folders: Callable[[str], Path]) -> None:
    assert_the_same(folders(case.model), case)


@pytest.mark.parametrize(
    ("sizes", "model"),
    [(PLAIN, "qwen2"), (CODED, "qwen2"), (PLAIN, "qwen3_5"), (CODED, "qwen3_5")],
    ids=["plain", "cache in 4 bits", "states", "states and cache in 4 bits"],
)
def test_texts_of_several_sequences_are_those_of_passes_launched_one_by_one(
    sizes: Sizes, model: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them ends before the others."""
    prompts = [PROMPT, PROMPT[:40] + TOKENS[:31], TOKENS[40:73]]
    case, found = Case("target", sizes, model, num_sequences=3), {}
    for value in ("on", "off"):
        monkeypatch.setenv(VARIABLE, value)
        found[value], replayed = texts(folders(model), case, prompts)
        assert (replayed > 3) == (value == "on")
    assert found["on"] == found["off"]


@torch.inference_mode()
def test_passes_of_several_sequences_share_one_graph(folders: Callable[[str], Path]) -> None:
    with on_gpu(folders("qwen2"), Case("target", num_sequences=2)) as (engine, gpu):
        other = engine.beside()
        levels = [each.levels["target"] for each in (engine, other)]
        for each in (engine, other):
            each.precompute(PROMPT[:50])
        gpu.launches.clear()
        for number in range(5):  # the first two are launched one by one
            asked = [
                Pass(level, TOKENS[number : number + count], 1) for level, count in zip(levels, (2, 1), strict=True)
            ]
            levels[0].run(asked)
        assert gpu.launches["graph"] == 3
        other.worker.release()
    assert gpu.problems == []


@torch.inference_mode()
def after_a_broken_pass(folder: Path, break_off: Callable[[pytest.MonkeyPatch], None] | None) -> tuple[Tensor, int]:
    """The logits of a pass after one that was broken off, and the tokens that the cache kept of 45."""
    with on_gpu(folder, CASES["states"]) as (engine, gpu), pytest.MonkeyPatch.context() as patch:
        level, tokens = engine.levels["target"], [*PROMPT[:40], *TOKENS[:7]]
        engine.precompute(tokens[:40])
        for token in tokens[40:45]:
            forward(level, [token], 1)
        if break_off is not None:
            break_off(patch)
            with suppress(KeyboardInterrupt):
                forward(level, tokens[45:46], 1)
            patch.undo()
        level.truncate(45)
        kept = level.length
        assert gpu.problems == []
        return forward(level, tokens[kept:], 1).cpu(), kept


def interrupted(patch: pytest.MonkeyPatch) -> None:
    """After the graph was launched."""

    def replay(graph: Graph) -> None:
        launch(graph)
        raise KeyboardInterrupt

    launch = Graph.replay
    patch.setattr(Graph, "replay", replay)


def without_memory(patch: pytest.MonkeyPatch) -> None:
    """When another graph is recorded."""

    @contextmanager
    def recorded(*args: Any, **more: Any) -> Iterator[None]:
        with record(*args, **more):
            yield
        raise torch.OutOfMemoryError

    record = torch.cuda.graph
    patch.setattr(torch.cuda, "graph", recorded)
    patch.setattr(Graphs, "run", lambda graphs, *args, **_: Graphs._record(graphs, (0, ()), args[1], args[2]))


@pytest.mark.parametrize("break_off", [interrupted, without_memory])
def test_states_are_right_after_a_pass_that_was_broken_off(
    break_off: Callable[[pytest.MonkeyPatch], None], folders: Callable[[str], Path]
) -> None:
    folder = folders("qwen3_5")
    (found, kept), (wanted, _) = (after_a_broken_pass(folder, each) for each in (break_off, None))
    assert found.equal(wanted)
    assert (kept < 45) == (break_off is interrupted)
