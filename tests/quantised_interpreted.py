"""An engine on a GPU on paper whose target proposes to itself over its cache in 4 bits, its kernels in Triton's
interpreter. test_gpu_kernels.py runs this in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from kit.interpreter import without_idle_work
from kit.models import GREEDY, Sizes, changed, random_model, random_tokens, save, tiny_engine, tiny_plan
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.formats.layout import RESIDUAL
from offload.formats.quantised_kv import GROUP
from offload.kv.chunk_store import QuantisedChunks
from offload.kv.fetch import GpuFetch
from offload.kv.quantised import EXACT, QuantisedCache
from offload.model.passes import forward
from offload.pages.storage import PageStorage
from offload.plan.sizing import KV_TAIL
from paper import PaperGpu, on_paper
from paper.kernels import chunks_by_kernel, pages_by_host
from paper.programs import programs_by_interpreter

PROMPT = random_tokens(200, seed=7)  # a few groups, and a tail
OTHER = PROMPT[:130] + random_tokens(50, seed=8)
SIZES = Sizes(gamma=4, budget=0, kv_bits=4, page=64, pages=2, capacity=256, rows=8, prefill_block=64)
PLAIN = replace(SIZES, gamma=0, kv_bits=16)

without_idle_work()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("qwen2", vocab_size=264, max_position_embeddings=512, hidden_size=64, head_dim=16, seed=11)
    return save(model, tmp_path_factory.mktemp("quantiseds") / "target", tokenizer=True)


@contextmanager
def on_gpu(
    folder: Path, sizes: Sizes, *offload: str, by_kernel: bool = True, dtype: str = "fp32", link_bits: int = 16
) -> Iterator[tuple[Engine, PaperGpu]]:
    """by_kernel: the GPU fetches rows itself."""
    offloaded = frozenset(offload)
    plan = tiny_plan(folder, None, sizes, num_prompt_tokens=220, max_tokens=20, dtype=dtype, offload=offloaded)
    plan = changed(plan, device="cuda:0", resident_tiles=1, fused_prefill=False, link_bits=link_bits)
    with on_paper() as gpu, pytest.MonkeyPatch.context() as patch:
        programs_by_interpreter(gpu, patch)
        (chunks_by_kernel if by_kernel else pages_by_host)(gpu, patch)
        with tiny_engine(plan, folder) as engine:
            yield engine, gpu


def said(engine: Engine, prompt: list[int], *, reuse: bool = False) -> list[int]:
    steps = engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=6, reuse=reuse))
    return [token for step in steps for token in step.tokens]


@cache
def plainly(folder: Path, dtype: str) -> list[list[int]]:
    with on_gpu(folder, PLAIN, "kv", dtype=dtype) as (engine, gpu):
        expected = [said(engine, PROMPT), said(engine, OTHER)]
    assert gpu.problems == []
    return expected


@pytest.mark.parametrize("by_kernel", [True, False], ids=["by kernel", "by host"])
def test_the_text_is_the_targets_and_all_is_ordered(folder: Path, by_kernel: bool) -> None:
    wanted = plainly(folder, "fp32")
    with on_gpu(folder, SIZES, "kv", by_kernel=by_kernel) as (engine, gpu):
        cache = engine.worker._copies
        assert isinstance(cache, QuantisedCache)
        assert isinstance(cache._fetch, GpuFetch) == by_kernel
        assert [said(engine, PROMPT), said(engine, OTHER)] == wanted
        assert cache.coded > EXACT + GROUP
        [target] = [level for level in engine.stats.levels if level.name == "target"]
        assert target.accepted_by["self"] > target.drafted_by["self"] / 2 > 0
        assert said(engine, PROMPT, reuse=True) == wanted[0]
        assert gpu.launches["attend_codes"] >= 4  # in two layers; a graph's launches count when it is recorded
        assert gpu.launches["graph"] > 10
        assert (gpu.launches["copy_chunks"] > 0) == by_kernel
    assert gpu.problems == []


def test_the_host_does_not_wait_for_rows_to_encode(folder: Path) -> None:
    """They are in the tail."""
    with on_gpu(folder, SIZES, "kv") as (engine, gpu):
        said(engine, PROMPT)
        cache = engine.worker._copies
        assert isinstance(cache, QuantisedCache)
        before = cache.coded
        while cache.coded == before:
            forward(engine.levels["target"], [1] * 8, 1)
            waits = gpu.syncs.total()
            engine.worker.refresh(8)
            assert gpu.syncs.total() == waits
        assert before + KV_TAIL <= cache.length
    assert gpu.problems == []


def test_rows_that_are_fetched_before_they_are_home_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageStorage, "follow_home", lambda cache: None)
    with on_gpu(folder, SIZES, "kv") as (engine, gpu), torch.inference_mode():
        said(engine, PROMPT)
        problems = list(gpu.problems)
        monkeypatch.undo()
    assert any("race: read" in problem and "(copy_chunks)" in problem and "pinned" in problem for problem in problems)


# Retrieved chunks in 4 bits.


@pytest.mark.parametrize("by_kernel", [True, False], ids=["by kernel", "by host"])
@pytest.mark.parametrize("link_bits", [16, 12])
def test_retrieved_chunks_in_4_bits_change_no_text_and_all_is_ordered(
    folder: Path, link_bits: int, by_kernel: bool
) -> None:
    """Encoded from pages as they are, and packed; again after a prefill took their memory."""
    part = replace(SIZES, budget=64, chunk=GROUP)
    wanted = plainly(folder, "bf16")
    with on_gpu(folder, part, "kv", by_kernel=by_kernel, dtype="bf16", link_bits=link_bits) as (engine, gpu):
        cache = engine.worker.retrieval
        assert cache is not None
        assert isinstance(cache._chosen, QuantisedChunks)
        assert [said(engine, PROMPT), said(engine, OTHER)] == wanted
        assert cache.chunks is not None
        [target] = [level for level in engine.stats.levels if level.name == "target"]
        assert target.accepted_by["retrieval"] > 0
        assert said(engine, PROMPT, reuse=True) == wanted[0]
        assert gpu.launches["encode_groups"] > 3
        assert gpu.launches["attend_codes"] + gpu.launches["graph"] > 10
        name = "copy_chunks" if link_bits == 16 else "copy_packed_chunks"
        assert (gpu.launches[name] > 0) == by_kernel
    assert gpu.problems == []


def test_the_host_does_not_wait_for_chunks_to_encode(folder: Path) -> None:
    with on_gpu(folder, replace(SIZES, budget=64, chunk=GROUP), "kv") as (engine, gpu):
        said(engine, PROMPT)
        engine.worker.record_mass(True)
        for token in range(3):
            forward(engine.levels["target"], [token] * 8, 1)
            waits, encoded = gpu.syncs.total(), gpu.launches["encode_groups"]
            engine.worker.refresh(8)
            assert gpu.syncs.total() == waits
            assert gpu.launches["encode_groups"] > encoded
    assert gpu.problems == []


# Pages beside codes.


def all_said(engine: Engine) -> list[list[int]]:
    """The last request ends where a page does: codes of its last tokens go, and their page lies as it is again."""
    return [said(engine, PROMPT), said(engine, OTHER), said(engine, PROMPT[:192], reuse=True)]


@pytest.mark.parametrize("by_kernel", [True, False], ids=["by kernel", "by host"])
def test_pages_beside_codes_change_no_text_and_all_is_ordered(folder: Path, by_kernel: bool) -> None:
    crossed, texts = {}, {}
    for link_bits in (16, 9):
        with on_gpu(folder, SIZES, "kv", by_kernel=by_kernel, dtype="bf16", link_bits=link_bits) as (engine, gpu):
            texts[link_bits] = all_said(engine)
            crossed[link_bits] = engine.worker.link_stats.bytes_to_device
            packed = engine.worker.full.pages.packed
            assert packed is None or (packed.table.flags == RESIDUAL).any()
            assert (gpu.launches["restore_pages"] > 0) == (link_bits == 9)
        assert gpu.problems == []
    assert texts[9] == texts[16]
    assert crossed[9] < crossed[16]
