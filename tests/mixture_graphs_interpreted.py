"""Passes of mixtures of experts as CUDA graphs, see `graph_scenes`: test_gpu_kernels.py runs
this in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.graph_scenes import (
    CODED,
    HEADED,
    INDEXED,
    PROMPT,
    TOKENS,
    WHOLE,
    Case,
    assert_seen,
    assert_the_same,
    on_gpu,
    saved,
    texts,
)
from kit.interpreter import rounds_products_once, rounds_to_bf16, runs_assembly
from kit.models import GREEDY
from offload.engine.request import GenerationRequest
from offload.kv.indexed import IndexedCache
from offload.model.graphs import VARIABLE
from offload.model.passes import forward
from test_expert_slots import AtRandom
from test_paper_bugs import Bug

EXPERTS = "offload.kernels.gpu.experts"
INDEXED_CACHE, INDEX, BLOCKS = "offload.kv.indexed", "offload.kv.block_index", "offload.kv.block_cache"
CHOOSING = (*[1] * 9, 3, 5)  # blocks become whole in replays, too
CASES = {
    "experts": Case("target", model="qwen3_moe", dtype="bf16"),
    "experts in slots": Case("target", model="qwen3_moe", dtype="bf16", slots=2),
    "experts that the CPU runs": Case("target", model="qwen3_moe", dtype="bf16", slots=2, by_cpu=1),
    "experts in slots, drafted rows": Case("self", CODED, model="qwen3_moe", dtype="bf16", slots=3),
    "chosen blocks": Case("target", WHOLE, INDEXED, dtype="bf16", counts=CHOOSING),
    "chosen blocks of the host": Case("target", WHOLE, INDEXED, dtype="bf16", counts=CHOOSING, blocks=32),
    "chosen blocks of the host, few slots": Case("target", WHOLE, INDEXED, dtype="bf16", counts=CHOOSING, blocks=16),
    "chosen blocks and experts of the host": Case(
        "target", WHOLE, INDEXED, dtype="bf16", counts=CHOOSING, blocks=32, slots=3
    ),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
BUGS = [
    ("experts", Bug("the host says which experts run", EXPERTS, "lines = arranged(chosen, ",
                    "lines = arranged(torch.tensor(chosen.tolist(), dtype=torch.int32, device=rows.device), ")),
    ("experts", Bug("as many tiles run as in the recorded pass", EXPERTS, "tiles = len(lines.expert_of)",
                    "tiles = int((lines.expert_of >= 0).sum())")),
    ("chosen blocks", Bug("as many blocks are to be seen as in the recorded pass", INDEXED_CACHE,
                          "tokens = self.index.indexer, positions + 1", "tokens = self.index.indexer, 1 + (positions "
                          "if real is None else torch.arange(self._start, self._stop, device=real.device))")),
    ("chosen blocks", Bug("index keys go where the recorded pass's went", INDEX, "index_copy_(0, own.last, ",
                          "index_copy_(0, torch.arange(start, start + len(index.k), device=rope.cos.device) "
                          "% num_raw, ")),
    ("chosen blocks", Bug("as many blocks become whole as in the recorded pass", INDEX,
                          "(ratio - 1 if moving else start % ratio)", "start % ratio")),
    ("chosen blocks of the host", Bug("rows go home where the recorded pass's went", BLOCKS,
                                      "self.copies.new_rows(rows, positions,", "self.copies.new_rows(rows, "
                                      "torch.arange(start, start + len(positions), device=positions.device),")),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return saved(tmp_path_factory.mktemp("graphs"))


@EVERY
def test_logits_are_those_of_passes_launched_one_by_one(case: Case, folders: Callable[[str], Path]) -> None:
    assert_the_same(folders(case.model), case)


def test_a_pass_whose_experts_torchs_operators_run_is_no_graph(folders: Callable[[str], Path]) -> None:
    """In fp32: the host asks which experts run."""
    with on_gpu(folders("qwen3_moe"), Case("target", model="qwen3_moe")) as (engine, gpu):
        engine.precompute(PROMPT[:20])
        for token in TOKENS[:3]:
            forward(engine.levels["target"], [token], 1)
        assert gpu.launches["graph"] == gpu.num_graphs == 0
        assert gpu.syncs["copy to host"] > 0
    assert gpu.problems == []


@pytest.mark.parametrize("slots", [3, 8])
def test_experts_that_cross_the_link_say_what_resident_ones_say(slots: int, folders: Callable[[str], Path]) -> None:
    """Their passes are several graphs; copies and computation are ordered."""
    own = Case("target", model="qwen3_moe", dtype="bf16")
    found = []
    for case in (own, replace(own, slots=slots)):
        found.append(texts(folders(case.model), case, [PROMPT[:30]]))
    (said, replayed), (streamed, pieces) = found
    assert streamed == said
    assert pieces == 3 * replayed > 0  # two layers


WEIGHTS = "offload.weights"
RACES = [
    Bug("an expert is used before it has arrived", f"{WEIGHTS}.expert_slots", "lambda event: event.wait()",
        "lambda _: None"),
    Bug("an expert arrives in a slot that is still computed with", f"{WEIGHTS}.expert_homes",
        "home, (end or self._link.record(),)", "home, ()"),
    Bug("an expert arrives in a slot that a later computation reads", f"{WEIGHTS}.streamed_experts",
        "yield batch\n        self._slots.computed(slots.values(), self._homes.computed())",
        "self._slots.computed(slots.values(), self._homes.computed())\n        yield batch"),
    Bug("another slot runs", f"{WEIGHTS}.streamed_experts", "torch.tensor([*places.values()],",
        "torch.tensor([*places.values()][::-1],"),
]  # fmt: skip


@pytest.mark.parametrize("bug", [None, *RACES], ids=lambda bug: bug.description if bug else "none")
def test_a_race_for_an_experts_slot_is_seen(bug: Bug | None, folders: Callable[[str], Path]) -> None:
    case, found = Case("target", model="qwen3_moe", dtype="bf16"), []
    for own, planted in ((case, None), (replace(case, slots=3), bug)):
        with on_gpu(folders(case.model), own, planted) as (engine, gpu):
            engine.precompute(PROMPT[:20])  # 12 rows of a prefill want nearly all experts
            found.append([forward(engine.levels["target"], [token], 1).cpu() for token in TOKENS[:3]])
            problems = gpu.problems
    alike = all(map(torch.equal, *found))
    assert (alike and problems == []) == (bug is None)


@torch.inference_mode()
@pytest.mark.parametrize("slots", [16, 32])
def test_chosen_blocks_of_the_host_say_what_those_of_the_gpu_say(slots: int, folders: Callable[[str], Path]) -> None:
    """In passes and in prefills between them, whose copies are ordered with the GPU's own."""
    own, found = Case("target", WHOLE, INDEXED, dtype="bf16", counts=CHOOSING), []
    for case in (own, replace(own, blocks=slots)):
        found.append(between_prefills(folders(case.model), case))
    assert all(map(torch.equal, *found))


def between_prefills(folder: Path, case: Case) -> list[Tensor]:
    """Logits of passes before and after a prefill that goes on."""
    with on_gpu(folder, case) as (engine, gpu):
        engine.precompute(PROMPT[:60])
        level, found = engine.levels["target"], []
        for stop in (61, 62, 66, 67, 68):
            found.append(forward(level, PROMPT[level.length : stop], 1).cpu())
        engine.precompute(PROMPT)
        found += [forward(level, [token], 1).cpu() for token in TOKENS[:3]]
        assert gpu.problems == []
        return found


def test_a_head_drafts_in_graphs_what_it_drafts_kernel_by_kernel(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From hidden rows of several streams, for a model whose chosen blocks and experts cross the link."""
    drafting = replace(WHOLE, gamma=3, draft_gamma=3, budget=0)
    case, found = Case("target", drafting, INDEXED + HEADED, dtype="bf16", blocks=32, slots=3), []
    for value in ("off", "on"):
        monkeypatch.setenv(VARIABLE, value)
        with on_gpu(folders(case.model), case) as (engine, gpu):
            steps = engine.generate(GenerationRequest(PROMPT[:40], GREEDY, max_tokens=12))
            found.append([token for step in steps for token in step.tokens])
            assert (engine.levels["draft"]._graphs is not None) == (gpu.launches["graph"] > 20) == (value == "on")
            assert engine.levels["draft"].stats.passes > 12
            assert gpu.problems == []
    assert found[0] == found[1]


STALE = Bug("a graph chooses by keys that were given back", INDEXED_CACHE,
            "self._places.number, self.index.graph_key", "self._places.number, 0")  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("bug", [None, STALE], ids=["none", "a planted one"])
def test_graphs_are_recorded_again_when_there_is_room_for_more_keys(
    bug: Bug | None, folders: Callable[[str], Path]
) -> None:
    case = Case("target", WHOLE, INDEXED, dtype="bf16", blocks=32)
    with on_gpu(folders(case.model), case, bug) as (engine, gpu):
        engine.precompute(PROMPT[:20])
        for tokens in (TOKENS[:3], TOKENS[3:6]):
            for token in tokens:
                forward(engine.levels["target"], [token], 1)
            engine.worker.full.index.reserve(2000)
        assert (gpu.problems == [] and gpu.launches["graph"] == 4) == (bug is None)


UNNOTED = Bug("rows of a pass that was broken off are forgotten", INDEXED_CACHE,
              "self._note_writes()  # of a forward that was broken off, too", "pass")  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("bug", [None, UNNOTED], ids=["none", "a planted one"])
def test_a_pass_that_is_broken_off_is_waited_for(
    bug: Bug | None, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows that are on their way home are there before the host reads homes."""
    case, attended = Case("target", WHOLE, INDEXED, dtype="bf16", blocks=32), IndexedCache._attended

    def interrupted(*args: Any) -> Tensor:
        attended(*args)
        raise KeyboardInterrupt

    with on_gpu(folders(case.model), case, bug) as (engine, gpu):
        engine.precompute(PROMPT[:20])
        monkeypatch.setattr(IndexedCache, "_attended", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forward(engine.levels["target"], TOKENS[:1], 1)
        engine.worker.full.wait_home()
        assert engine.worker.full.page_of_all(1)[0].clone().any()
        assert (gpu.problems == []) == (bug is None)


UNORDERED = Bug("the host reads homes before a pass's rows are there", INDEXED_CACHE,
                "self.pages.wrote_home(self._start, self._stop)", "pass")  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("bug", [None, UNORDERED], ids=["none", "a planted one"])
def test_a_race_for_a_home_is_seen(bug: Bug | None, folders: Callable[[str], Path]) -> None:
    """Rows of passes go home by a kernel, and those of prefills by copies."""
    case = Case("target", WHOLE, INDEXED, dtype="bf16", counts=CHOOSING, blocks=32)
    with on_gpu(folders(case.model), case, bug) as (engine, gpu):
        worker, level = engine.worker, engine.levels["target"]
        for tokens in (PROMPT[:20], PROMPT[20:30]):
            worker.target.prefill(worker._target_cache, tokens, worker._hidden_rows)
            for token in TOKENS[:3]:
                forward(level, [token], 1)
        worker.full.wait_home()
        assert worker.full.page_of_all(1)[0].clone().any()
        assert (gpu.problems == []) == (bug is None)


@torch.inference_mode()
@pytest.mark.parametrize("by_cpu", [1, 2])
def test_experts_that_the_cpu_runs_say_what_the_gpus_say(by_cpu: int, folders: Callable[[str], Path]) -> None:
    """But for the order of their sums: the same routes, and copies that computation waits for."""
    case, found, rows = Case("target", model="qwen3_moe", dtype="bf16"), [], []
    for own in (case, replace(case, slots=3, by_cpu=by_cpu)):
        with on_gpu(folders(case.model), own) as (engine, gpu):
            engine.precompute(PROMPT[:20])  # the last 8 in a pass
            rows.append(engine.worker.full.pages.store.home(1, 0).cpu()[:, 0, :, :12])
            found.append([forward(engine.levels["target"], TOKENS[:n], n).cpu().float() for n in (1, 3, 1)])
            assert gpu.problems == []
            kinds = [type(each).__name__ for each in engine.worker.target.weights.experts]
            assert kinds.count("HostExperts") == own.by_cpu
    assert torch.equal(*rows)  # a prefill runs on the GPU
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


@torch.inference_mode()
def test_any_missed_expert_may_run_on_either(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks: the same bits wherever experts are and whoever runs them, launched and as graphs."""
    whole = Case("target", model="qwen3_moe in Q8_0", dtype="bf16")
    for change in (rounds_to_bf16, rounds_products_once, runs_assembly):
        change(monkeypatch)
    monkeypatch.setattr("offload.weights.experts.Split", lambda: AtRandom(3))
    found, by_cpu = [], []
    for own in (whole, replace(whole, slots=3), replace(whole, slots=3, by_cpu=2, shares=True)):
        with on_gpu(folders(own.model), own) as (engine, gpu):
            engine.precompute(PROMPT[:20])
            found.append([forward(engine.levels["target"], TOKENS[:n], n).cpu() for n in (1, 3, 1, 1, 3, 1, 1)])
            assert gpu.problems == []
            by_cpu.append(sum(each.stats.by_cpu for each in engine.worker.target.weights.streamed_experts))
    assert by_cpu[:2] == [0, 0]
    assert by_cpu[2] > 0
    for resident, *others in zip(*found, strict=True):
        assert all(torch.equal(resident, each) for each in others)


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[bug.description for _, bug in BUGS])
def test_a_planted_bug_is_seen(name: str, bug: Bug, folders: Callable[[str], Path]) -> None:
    assert_seen(folders(CASES[name].model), CASES[name], bug)
