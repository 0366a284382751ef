"""Chunks that a GPU's kernel fetches from the host by itself, on paper: what it waits for, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kit.models import save_pair
from offload.engine.engine import Engine
from offload.kv.fetch import GpuFetch
from offload.model.passes import forward
from offload.pages.storage import PageStorage
from offload.pages.traffic import Traffic

pytest.importorskip("triton")

from paper.engines import CASES, OTHER, PROMPT, Pair, engine_on_paper, loaded, said
from paper.gpu import PaperGpu, on_paper
from paper.kernels import chunks_by_kernel
from paper.streams import MILLISECONDS

STREAMED = ["draft, kv streamed", "retrieval, kv streamed", "tail alone, kv streamed", "retrieval"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"), context=256)


@contextmanager
def by_kernel(name: str, pair: Pair) -> Iterator[tuple[Engine, PaperGpu]]:
    with on_paper() as gpu, pytest.MonkeyPatch.context() as patch:
        chunks_by_kernel(gpu, patch)
        with loaded(CASES[name], pair) as engine:
            assert engine.worker.retrieval is not None
            assert isinstance(engine.worker.retrieval._chosen._fetch, GpuFetch)
            yield engine, gpu


def refreshes(engine: Engine, gpu: PaperGpu) -> list[tuple[int, int]]:
    """Launches and waits of one after each of some passes."""
    engine.precompute(PROMPT)
    counted = []
    for count in (1, 3, 4):
        forward(engine.levels["target"], [1] * count, count)
        launches, waits = gpu.launches.total(), gpu.syncs.total()
        engine.worker.refresh(count)
        counted.append((gpu.launches.total() - launches, gpu.syncs.total() - waits))
    return counted


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STREAMED)
def test_text_is_the_same_and_all_is_ordered(name: str, pair: Pair) -> None:
    with engine_on_paper(CASES[name].plain(), pair) as (engine, _):
        expected = [said(engine, PROMPT), said(engine, OTHER)]
    with by_kernel(name, pair) as (engine, gpu):
        assert [said(engine, PROMPT), said(engine, OTHER, reuse=True)] == expected
    assert gpu.problems == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["retrieval, kv streamed", "retrieval"])
def test_the_host_does_not_wait_for_a_refresh(name: str, pair: Pair) -> None:
    held = []
    with by_kernel(name, pair) as (engine, gpu):
        for launches, waits in refreshes(engine, gpu):
            assert waits == 0
            assert launches <= 42
        assert gpu.launches["copy_chunks"] > 3
        held.append(engine.worker.retrieval)
    with engine_on_paper(CASES[name], pair) as (engine, other):
        assert all(waits > 0 for _, waits in refreshes(engine, other))
        held.append(engine.worker.retrieval)
    assert gpu.problems == other.problems == []


def test_the_seconds_of_refreshes_are_the_gpus(pair: Pair) -> None:
    """The host waits for none of them: by its clock they would take next to nothing."""
    with by_kernel("retrieval, kv streamed", pair) as (engine, _):
        for prompt in (PROMPT, OTHER):
            said(engine, prompt)
            number = engine.stats.refresh_seconds / (MILLISECONDS / 1e3)
            assert number == pytest.approx(round(number))
            assert 1 <= round(number) <= engine.stats.levels[0].rounds


def test_a_kernel_that_does_not_wait_for_new_rows_is_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageStorage, "follow_home", lambda cache: None)
    with by_kernel("retrieval, kv streamed", pair) as (engine, gpu):
        refreshes(engine, gpu)
        problems = list(gpu.problems)
        monkeypatch.undo()
    assert any("race: read" in problem and "(copy_chunks)" in problem and "pinned" in problem for problem in problems)


def test_a_host_that_does_not_wait_for_the_kernel_is_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to the homes, as when a session is opened."""
    for waits in (True, False):
        with by_kernel("retrieval, kv streamed", pair) as (engine, gpu), torch.inference_mode():
            if not waits:
                monkeypatch.setattr(Traffic, "read_by_kernel", lambda traffic: None)
            refreshes(engine, gpu)
            full = engine.worker.full
            full.wait_home()
            full.pages.page(0, 0).zero_()
            reported = [problem for problem in gpu.problems if "race: write by host" in problem]
            monkeypatch.undo()
        assert bool(reported) != waits
