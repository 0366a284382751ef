"""Engines of tiny random models on a GPU on paper. No tests in here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kit.models import GREEDY, Sizes, changed, random_tokens, tiny_engine, tiny_plan
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.plan.planner import Plan
from paper.gpu import PaperGpu, on_paper

Pair = tuple[Path, Path]  # the folders of target and draft
NUM_PROMPT, NUM_NEW = 37, 5  # tokens
PROMPT = random_tokens(NUM_PROMPT, seed=0)  # some drafts for it are accepted and some are not, at both levels
OTHER = PROMPT[:22] + random_tokens(12, seed=4)  # begins alike
RETRIEVED = Sizes(gamma=5)
DRAFTED = replace(RETRIEVED, draft_gamma=2, capacity=128)


@dataclass(frozen=True)
class Case:
    """A plan's levels and places. resident_tiles: of all layers; resident_layers: of two."""

    sizes: Sizes
    offload: tuple[str, ...] = ()
    resident_tiles: int = 0
    resident_layers: int = 0
    dtype: str = "fp32"
    num_sequences: int = 1
    num_prompt: int = NUM_PROMPT

    def plan(self, pair: Pair, device: str = "cuda:0") -> Plan:
        target, draft = pair
        plan = tiny_plan(
            target,
            draft if self.sizes.draft_gamma else None,
            self.sizes,
            num_prompt_tokens=self.num_prompt,
            max_tokens=4 * NUM_NEW,
            dtype=self.dtype,
            offload=frozenset(self.offload),
            num_sequences=self.num_sequences,
        )
        return changed(
            plan, device=device, resident_tiles=self.resident_tiles, resident_layers=self.resident_layers,
            fused_prefill=self.dtype != "fp32",
        )  # fmt: skip

    def plain(self) -> Case:
        """Everything on the device and nothing drafted, with the same blocks: what bits depend on."""
        return Case(Sizes(rows=self.sizes.rows, prefill_block=self.sizes.prefill_block), dtype=self.dtype)


CASES = {  # the busiest first, which are tried by default
    "draft, both streamed": Case(DRAFTED, ("kv", "weights")),
    "bf16, both streamed": Case(replace(DRAFTED, rows=8), ("kv", "weights"), dtype="bf16"),
    "adaptive, both streamed": Case(replace(DRAFTED, adaptive=True), ("kv", "weights"), resident_tiles=5),
    "tail alone, kv streamed": Case(replace(DRAFTED, chunk=128, budget=128, page=128, pages=1), ("kv",)),
    "retrieval, kv streamed": Case(RETRIEVED, ("kv",)),
    "plain": Case(Sizes()),
    "plain, kv streamed": Case(Sizes(), ("kv",), resident_tiles=3),
    "plain, weights streamed": Case(Sizes(), ("weights",)),
    "plain, both streamed": Case(Sizes(), ("kv", "weights"), resident_layers=1),
    "retrieval": Case(RETRIEVED),
    "draft": Case(DRAFTED),
    "draft, kv streamed": Case(DRAFTED, ("kv",), resident_tiles=1),
    "lookup, kv streamed": Case(replace(DRAFTED, lookup=True), ("kv",)),
    "three slots": Case(replace(DRAFTED, kv_staging=3), ("kv",)),
}
BUSIEST = CASES["draft, both streamed"]


def loaded(case: Case, pair: Pair, device: str = "cuda:0") -> Engine:
    target, draft = pair
    return tiny_engine(case.plan(pair, device), target, draft if case.sizes.draft_gamma else None)


def said(
    engine: Engine,
    prompt: Sequence[int] = PROMPT,
    sampling: SamplingParams = GREEDY,
    *,
    num_new: int = NUM_NEW,
    reuse: bool = False,
) -> list[int]:
    steps = engine.generate(GenerationRequest(prompt, sampling, max_tokens=num_new, reuse=reuse))
    return [token for step in steps for token in step.tokens]


@contextmanager
def engine_on_paper(case: Case, pair: Pair) -> Iterator[tuple[Engine, PaperGpu]]:
    with on_paper() as gpu, loaded(case, pair) as engine:
        yield engine, gpu
