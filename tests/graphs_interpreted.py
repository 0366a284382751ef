"""Passes over whole caches as CUDA graphs, of an engine on a GPU on paper whose kernels run in Triton's interpreter:
test_gpu_kernels.py runs this in a process of its own.

A graph is replayed with the numbers that it was recorded with, so a length, a place or a count that the host gave would
show in other logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from families import save_tiny
from interpreter import without_idle_work
from models import GREEDY, Sizes, changed, random_model, random_tokens, save, tiny_engine, tiny_plan
from offload.config.reading import read_config
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.engine.sequences import Sequences
from offload.model.graphs import VARIABLE, Compute, Graphs, Tensors
from offload.model.passes import Pass, forward
from paper import PaperGpu, on_paper
from paper.graphs import Graph
from paper.kernels import chunks_by_kernel
from paper.programs import programs_by_interpreter
from sunk import read_as_sunk, save_sunk
from test_paper_bugs import Bug, plant

PROMPT = random_tokens(100, seed=7)
TOKENS = random_tokens(400, seed=3)
PLAIN = Sizes(page=16, pages=2, capacity=256, rows=8, prefill_block=64)
CODED = replace(PLAIN, gamma=4, budget=0, kv_bits=4, page=64)
SUNK = ", sunk"
FEW = {
    "qwen3_5": {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
}

without_idle_work()


@dataclass(frozen=True)
class Case:
    """A level's passes over its whole cache. model: a family's tiny model. slots: for experts, which are on the host
    then; 0: they are on the GPU. by_cpu: number of layers whose experts the CPU runs. streams: so are the layers."""

    level: str
    sizes: Sizes = PLAIN
    model: str = "qwen2"
    num_sequences: int = 1
    dtype: str = "fp32"
    slots: int = 0
    by_cpu: int = 0
    streams: bool = False


CASES = {
    "target": Case("target"),
    "target that records masses": Case("target", replace(PLAIN, gamma=4)),
    "cache in 4 bits": Case("self", CODED),
    "windows": Case("target", model="qwen2, windows"),
    "windows, drafted rows": Case("self", CODED, "qwen2, windows"),
    "sink logits": Case("target", model="qwen2, windows, sunk"),
    "sink logits, drafted rows": Case("self", CODED, "qwen2, windows, sunk"),
    "states": Case("target", model="qwen3_5"),
    "states, drafted rows": Case("self", CODED, "qwen3_5"),
    "experts": Case("target", model="qwen3_moe", dtype="bf16"),
    "experts in slots": Case("target", model="qwen3_moe", dtype="bf16", slots=2),
    "experts that the CPU runs": Case("target", model="qwen3_moe", dtype="bf16", slots=2, by_cpu=1),
    "experts in slots, drafted rows": Case("self", CODED, model="qwen3_moe", dtype="bf16", slots=3),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
Result = tuple[list[Tensor], int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        root = tmp_path_factory.mktemp("graphs") / name
        if name != "qwen2":
            fields = {"vocab_size": 264, "max_position_embeddings": 512, "hidden_size": 64, "head_dim": 16}
            if name.endswith(SUNK):
                return save_sunk(name.removesuffix(SUNK), root, tokenizer=True, **fields)
            return save_tiny(name, root, tokenizer=True, **fields, **FEW.get(name, {}))
        model = random_model("qwen2", vocab_size=264, max_position_embeddings=512, hidden_size=64, head_dim=16, seed=11)
        return save(model, root, tokenizer=True)

    return folder


def in_pairs(number: int, most: int) -> int:
    """In place of `rounded_up`."""
    return min(-(-number // 2) * 2, most)


@contextmanager
def on_gpu(folder: Path, case: Case, bug: Bug | None = None) -> Iterator[tuple[Engine, PaperGpu]]:
    """bug: planted into the source."""
    number = case.num_sequences
    options: dict[str, Any] = {"num_sequences": number, "dtype": case.dtype}
    options["offload"] = frozenset({"weights"} if case.slots else ())
    with pytest.MonkeyPatch.context() as families, on_paper() as gpu, pytest.MonkeyPatch.context() as patch:
        if case.model.endswith(SUNK):
            read_as_sunk(families)
        plan = tiny_plan(folder, None, case.sizes, num_prompt_tokens=220, max_tokens=20, **options)
        for module in ("kv.full", "kv.quantised_attention"):
            patch.setattr(f"offload.{module}.rounded_up", in_pairs)  # else only longer texts round
        programs_by_interpreter(gpu, patch)
        if bug is not None:
            plant(bug, patch)
        chunks_by_kernel(gpu, patch)
        plan = changed(plan, device="cuda:0", fused_prefill=False, expert_slots=case.slots, cpu_experts=case.by_cpu)
        if not case.streams:
            plan = changed(plan, resident_layers=read_config(folder).num_layers)
        with tiny_engine(plan, folder) as engine:
            yield engine, gpu


def one_by_one(graphs: Graphs, key: object, given: Sequence[Tensor], compute: Compute, **_: object) -> list[Tensors]:
    """In place of `Graphs.run`."""
    return compute(*given)


def passes(engine: Engine, gpu: PaperGpu, name: str) -> Result:
    """Logits, and masses where they are kept, of passes of one row and of more, over a cache that grows past pages and
    groups, that is refreshed or left behind, and from which rows are taken back; and how many were replayed."""
    level, target, full, found = engine.levels[name], engine.levels["target"], engine.worker.full, []
    gpu.launches.clear()
    for turn in range(3):
        for number, count in enumerate((1, 1, 3, 1, 12, 1, 3, 20)[turn:]):
            if name != "target" and number == 2:  # tokens that it has not seen, some in drafted rows' places
                level.truncate(target.length)
                forward(target, TOKENS[number : number + 2], 1)
            found.append(forward(level, TOKENS[number : number + count], min(count, 3)).cpu())
            if name == "target" and full.mass_chunk is not None:
                found.append(full.mass(count).cpu())
        if name == "target":
            level.truncate(len(PROMPT) + turn)
        else:
            level.truncate(target.length)
            forward(target, TOKENS[:30], 1)
            engine.worker.refresh(30)
    return found, gpu.launches["graph"]


@cache
def expected(folder: Path, case: Case) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch, on_gpu(folder, case) as (engine, gpu):
        patch.setattr(Graphs, "run", one_by_one)
        engine.precompute(PROMPT)
        found, replayed = passes(engine, gpu, case.level)
    assert gpu.problems == []
    assert replayed == 0
    return found


def as_graphs(folder: Path, case: Case, bug: Bug | None = None) -> tuple[Result, list[str]]:
    with on_gpu(folder, case, bug) as (engine, gpu):
        engine.precompute(PROMPT)
        return passes(engine, gpu, case.level), gpu.problems


@EVERY
def test_logits_and_masses_are_those_of_passes_launched_one_by_one(case: Case, folders: Callable[[str], Path]) -> None:
    folder = folders(case.model)
    (found, replayed), problems = as_graphs(folder, case)
    assert problems == []
    assert replayed >= 4
    assert all(ours.equal(theirs) for ours, theirs in zip(found, expected(folder, case), strict=True))


def texts(folder: Path, case: Case, prompts: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Greedy texts of requests that run side by side."""
    with on_gpu(folder, case) as (engine, gpu):
        said: dict[int, list[int]] = {}
        with Sequences[int](engine) as sequences:
            for key, prompt in enumerate(prompts):
                sequences.join(key, GenerationRequest(prompt, GREEDY, max_tokens=9))
            while len(sequences):
                for key, step in sequences.steps():
                    said.setdefault(key, []).extend(step.tokens)
                    if step.finish is not None:
                        sequences.leave(key)
        assert gpu.problems == []
        return [said[key] for key in sorted(said)], gpu.launches["graph"]


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


SLOTS = "offload.weights.experts"
RACES = [
    Bug("an expert is used before it has arrived", SLOTS, "                event.wait()", "                pass"),
    Bug("an expert arrives in a slot that is still computed with", SLOTS, "(self._link.record(),)", "()"),
    Bug("another slot runs", SLOTS, "torch.tensor([*slots.values()],", "torch.tensor([*slots.values()][::-1],"),
]


@pytest.mark.parametrize("bug", [None, *RACES], ids=lambda bug: bug.description if bug else "none")
def test_a_race_for_an_experts_slot_is_seen(bug: Bug | None, folders: Callable[[str], Path]) -> None:
    case, found = Case("target", model="qwen3_moe", dtype="bf16"), []
    for own, planted in ((case, None), (replace(case, slots=3), bug)):
        with on_gpu(folders(case.model), own, planted) as (engine, gpu):
            engine.precompute(PROMPT[:9])
            found.append([forward(engine.levels["target"], [token], 1).cpu() for token in TOKENS[:3]])
            problems = gpu.problems
    alike = all(map(torch.equal, *found))
    assert (alike and problems == []) == (bug is None)


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


STATES = "offload.kv.states"
LAYER_STATES = "offload.kv.layer_states"


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


FULL, PLACES, LEVEL = "offload.kv.full", "offload.kv.places", "offload.model.level"
ATTENTION, ROTATION = "offload.kernels.gpu.attention", "offload.kernels.gpu.rotation"
EXPERTS = "offload.kernels.gpu.experts"
BUGS = [
    ("target", Bug("a graph serves however far rows reach", FULL,
                   "return self._places.number, self._reach, kept",
                   "return self._places.number, kept")),
    ("target", Bug("positions are those of the recorded pass", PLACES,
                   "there[2 : 2 + num_rows]", "there[2 : 2 + num_rows].clone()")),
    ("target", Bug("slots are those of the recorded pass", PLACES,
                   "there[2 + num_rows :]", "there[2 + num_rows :].clone()")),
    ("target", Bug("passes of any number of logits share a graph", LEVEL,
                   "*sizes, *map(len, given)", "*map(len, given)")),
    ("target", Bug("the rows whose logits are wanted are those of the recorded pass", LEVEL,
                   "hidden.index_select(0, *rows) if rows else hidden",
                   "hidden[len(first.tokens) - first.num_logits : len(first.tokens)]")),
    ("target that records masses", Bug("masses stay in the graph's own memory", FULL,
                                       "self._mass[layer][:, :, : mass.shape[2]].copy_(mass)",
                                       "self._mass = [*self._mass[:layer], mass, *self._mass[layer + 1 :]]")),
    ("target that records masses", Bug("a graph keeps masses in memory that was given back", FULL,
                                       "self._reach, kept", "self._reach, self._records")),
    ("cache in 4 bits", Bug("a graph attends to the codes that were there", ATTENTION,
                            "COUNTED=bounds is not None", "COUNTED=False")),
    ("cache in 4 bits", Bug("a graph of fewer codes serves", "offload.kv.quantised",
                            "self._held.shape, self._attention.graph_key", "self._held.shape")),
    ("windows", Bug("a window begins where the recorded pass's did", ATTENTION, "RING=run.ring", "RING=False")),
    ("states", Bug("as many tokens are replayed as in the recorded pass", LAYER_STATES,
                   "self._there if self._alike and not settles else None", "None")),
    ("states", Bug("states stay where a graph found them", STATES, "self.layers.ran(self._start)", "pass")),
    ("states", Bug("a graph reads inputs that were given back", LAYER_STATES,
                   "self._number, self.states.data_ptr(), self.inputs.data_ptr()", "self._number")),
    ("experts", Bug("the host says which experts run", EXPERTS, "lines = arranged(chosen, ",
                    "lines = arranged(torch.tensor(chosen.tolist(), dtype=torch.int32, device=rows.device), ")),
    ("experts", Bug("as many tiles run as in the recorded pass", EXPERTS, "tiles = len(lines.expert_of)",
                    "tiles = int((lines.expert_of >= 0).sum())")),
    ("windows, drafted rows", Bug("drafted rows take the place of known ones", ROTATION,
                                  "BOUNDED=places.bounds is not None", "BOUNDED=False")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[bug.description for _, bug in BUGS])
def test_a_planted_bug_is_seen(name: str, bug: Bug, folders: Callable[[str], Path]) -> None:
    folder = folders(CASES[name].model)
    wanted = expected(folder, CASES[name])
    try:
        (found, _), problems = as_graphs(folder, CASES[name], bug)
    except (RuntimeError, ValueError, IndexError):
        return
    assert problems or not all(ours.equal(theirs) for ours, theirs in zip(found, wanted, strict=True))
