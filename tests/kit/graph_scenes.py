"""Passes over whole caches as CUDA graphs, of an engine on a GPU on paper whose kernels run in Triton's interpreter. No
tests in here.

A graph is replayed with the numbers that it was recorded with, so a length, a place or a count that the host gave would
show in other logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kit.families import save_tiny
from kit.gguf_models import write_gguf
from kit.heads import with_head
from kit.interpreter import without_idle_work
from kit.models import GREEDY, Sizes, changed, random_model, random_tokens, save, tiny_engine, tiny_plan
from kit.sunk import read_as_sunk, save_sunk
from offload.config.reading import read_config
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.engine.sequences import Sequences
from offload.formats.fixed_gpu import counts_of
from offload.model.graphs import Compute, Graphs, Tensors
from offload.model.passes import forward
from paper import PaperGpu, on_paper
from paper.kernels import chunks_by_kernel
from paper.programs import programs_by_interpreter
from test_paper_bugs import Bug, plant

PROMPT = random_tokens(100, seed=7)
TOKENS = random_tokens(400, seed=3)
PLAIN = Sizes(page=16, pages=2, capacity=256, rows=8, prefill_block=64)
WHOLE = replace(PLAIN, pages=16, rows=2)  # one tile of a layer
CODED = replace(PLAIN, gamma=4, budget=0, kv_bits=4, page=64)
SUNK = ", sunk"
INDEXED = "qwen4_exp, n-grams"
HEADED = ", with its head"
FEW: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 8},
    "gemma4": {
        "global_head_dim": 272,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
    INDEXED: {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "hc_count": 2,
        "ple_layer_ids": [1],
        "indexer_budget": 48,
    },
}

STORED = " in Q8_0"

without_idle_work()


@dataclass(frozen=True)
class Case:
    """A level's passes over its whole cache. model: a family's tiny model. slots: for experts, which are on the host
    then; 0: they are on the GPU. by_cpu: number of layers whose experts the CPU runs, or with `shares` some of those
    that are in no slot. blocks: slots for blocks of keys and values, which are on the host
    then. counts: rows of passes."""

    level: str
    sizes: Sizes = PLAIN
    model: str = "qwen2"
    num_sequences: int = 1
    dtype: str = "fp32"
    slots: int = 0
    by_cpu: int = 0
    shares: bool = False
    blocks: int = 0
    counts: tuple[int, ...] = (1, 1, 3, 1, 12, 1, 3, 20)


Result = tuple[list[Tensor], int]


def saved(root: Path) -> Callable[[str], Path]:
    """The folder in `root` of each model, by its name, which is saved when it is asked for."""

    @cache
    def folder(name: str) -> Path:
        if name != "qwen2":
            fields = {"vocab_size": 264, "max_position_embeddings": 512, "hidden_size": 64, "head_dim": 16}
            if name.endswith(STORED):
                plain, family = root / f"{name} before", name.removesuffix(STORED)
                save_tiny(family, plain, tokenizer=True, **fields, **FEW[family], moe_intermediate_size=32)
                write_gguf(plain, root / f"{name}.gguf", kind=lambda each: "Q8_0" if "exp" in each else "BF16")
                return root / f"{name}.gguf"
            if name.endswith(SUNK):
                return save_sunk(name.removesuffix(SUNK), root / name, tokenizer=True, **fields)
            base = name.removesuffix(HEADED)
            made = save_tiny(base, root / name, tokenizer=True, **(fields | FEW.get(base, {})))
            return with_head(made, layer=1) if name.endswith(HEADED) else made
        model = random_model("qwen2", vocab_size=264, max_position_embeddings=512, hidden_size=64, head_dim=16, seed=11)
        return save(model, root / name, tokenizer=True)

    return folder


def in_pairs(number: int, most: int) -> int:
    """In place of `rounded_up`."""
    return min(-(-number // 2) * 2, most)


@contextmanager
def on_gpu(folder: Path, case: Case, bug: Bug | None = None) -> Iterator[tuple[Engine, PaperGpu]]:
    """bug: planted into the source."""
    number = case.num_sequences
    options: dict[str, Any] = {"num_sequences": number, "dtype": case.dtype}
    options["offload"] = frozenset(({"weights"} if case.slots else set()) | ({"kv"} if case.blocks else set()))
    with pytest.MonkeyPatch.context() as families, on_paper() as gpu, pytest.MonkeyPatch.context() as patch:
        if case.model.endswith(SUNK):
            read_as_sunk(families)
        counts_of.cache_clear()  # tensors of another GPU on paper
        draft = folder if case.model.endswith(HEADED) else None
        plan = tiny_plan(folder, draft, case.sizes, num_prompt_tokens=220, max_tokens=20, **options)
        for module in ("kv.full", "kv.quantised_attention"):
            patch.setattr(f"offload.{module}.rounded_up", in_pairs)  # else only longer texts round
        programs_by_interpreter(gpu, patch)
        if bug is not None:
            plant(bug, patch)
        chunks_by_kernel(gpu, patch)
        plan = changed(plan, device="cuda:0", fused_prefill=False, expert_slots=case.slots, cpu_experts=case.by_cpu)
        plan = changed(plan, shares_experts=case.shares, resident_layers=read_config(folder).num_layers)
        plan = changed(plan, block_slots=case.blocks)
        with tiny_engine(plan, folder, draft) as engine:
            yield engine, gpu


def one_by_one(graphs: Graphs, key: object, given: Sequence[Tensor], compute: Compute, **_: object) -> list[Tensors]:
    """In place of `Graphs.run`."""
    return compute(*given)


def passes(engine: Engine, gpu: PaperGpu, case: Case) -> Result:
    """Logits, and masses where they are kept, of passes of one row and of more, over a cache that grows past pages and
    groups, that is refreshed or left behind, and from which rows are taken back; and how many were replayed."""
    name, target, full, found = case.level, engine.levels["target"], engine.worker.full, []
    level = engine.levels[name]
    gpu.launches.clear()
    for turn in range(3):
        for number, count in enumerate(case.counts[turn:]):
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
        found, replayed = passes(engine, gpu, case)
    assert gpu.problems == []
    assert replayed == 0
    return found


def as_graphs(folder: Path, case: Case, bug: Bug | None = None) -> tuple[Result, list[str]]:
    with on_gpu(folder, case, bug) as (engine, gpu):
        engine.precompute(PROMPT)
        return passes(engine, gpu, case), gpu.problems


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


def assert_the_same(folder: Path, case: Case) -> None:
    """Logits and masses are those of passes launched one by one."""
    (found, replayed), problems = as_graphs(folder, case)
    assert problems == []
    assert replayed >= 4
    assert all(ours.equal(theirs) for ours, theirs in zip(found, expected(folder, case), strict=True))


def assert_seen(folder: Path, case: Case, bug: Bug) -> None:
    """A planted bug shows: in other logits, in an error, or in what is reported."""
    wanted = expected(folder, case)
    try:
        (found, _), problems = as_graphs(folder, case, bug)
    except (RuntimeError, ValueError, IndexError):
        return
    assert problems or not all(ours.equal(theirs) for ours, theirs in zip(found, wanted, strict=True))
