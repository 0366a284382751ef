"""The arena: a prefill and the retrieval cache have the same bytes in turn, and the text does not change by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.kv.retrieval import RetrievalCache
from offload.plan.options import Options
from offload.plan.planner import Plan
from offload.transfer.arena import Arena
from offload.transfer.memory import Memory

MODELS = Path(__file__).resolve().parents[1] / "triforce_cli" / "models"
TARGET, DRAFT = MODELS / "demo-target", MODELS / "demo-draft"
SAMPLED = SamplingParams(temperature=0.8, seed=3)
PROMPT = [7 + i * i % 3900 for i in range(650)]
FIRST = 400  # tokens of the prompt that are run ahead


def allocated(memory: Memory) -> int:
    return sum(memory.allocated()["device"].values())


def test_whose_turn_begins_has_all_bytes_zeroed_and_who_had_them_gives_them_up() -> None:
    arena, gave_up = Arena(memory := Memory(torch.device("cpu")), 1024), []
    arena.begin(lambda: gave_up.append("first"))
    arena.take((16, 16), torch.float32).fill_(torch.inf)
    assert not gave_up
    arena.begin(lambda: gave_up.append("second"))
    assert gave_up == ["first"]
    halves = [arena.take((256,), torch.int16), arena.take((128,), torch.float32)]
    assert not any(half.any() for half in halves)
    halves[0].fill_(1)
    assert not halves[1].any()
    assert len({half.untyped_storage().data_ptr() for half in halves}) == 1
    assert memory.allocated()["device"] == {"arena": 1024}


def test_what_does_not_fit_comes_from_memory_and_goes_back() -> None:
    arena = Arena(memory := Memory(torch.device("cpu")), 1000)
    arena.begin(lambda: None)
    taken = [arena.take((size,), torch.uint8) for size in (600, 600, 200)]
    assert not any(each.any() for each in taken)
    assert allocated(memory) == 1000 + 600
    arena.put_back(taken[1])
    arena.put_back(taken[0])  # a part of the block, which stays
    assert allocated(memory) == 1000
    arena.take((2000,), torch.uint8)
    arena.begin(lambda: None)
    assert allocated(memory) == 1000
    arena.release()
    assert memory.allocated()["device"] == {}


def test_tensors_begin_at_whole_multiples_of_256_bytes() -> None:
    """A GPU's kernels copy 16 bytes at once."""
    arena = Arena(Memory(torch.device("cpu")), 2000)
    arena.begin(lambda: None)
    taken = [arena.take((size,), torch.uint8) for size in (3, 257, 16, 1)]
    assert [each.data_ptr() - taken[0].data_ptr() for each in taken] == [0, 256, 768, 1024]
    assert arena.take((5,), torch.float32).data_ptr() - taken[0].data_ptr() == 1280


def request(**options: object) -> Plan:
    asked = Options(device="cpu", gamma=7, draft_gamma=2, chunk=16, **options)  # type: ignore[arg-type]
    return plan_request(TARGET, DRAFT, asked, num_prompt_tokens=len(PROMPT), max_tokens=24)


def noted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """From now on, the most bytes that were allocated on the device for each purpose."""
    most: dict[str, int] = {}
    real: Callable[..., torch.Tensor] = Memory.allocate

    def allocate(memory: Memory, *args: object, **more: object) -> torch.Tensor:
        block = real(memory, *args, **more)
        for purpose, size in memory.allocated()["device"].items():
            most[purpose] = max(most.get(purpose, 0), size)
        return block

    monkeypatch.setattr(Memory, "allocate", allocate)
    return most


def two_turns(plan: Plan) -> tuple[list[int], list[int]]:
    """(tokens after work ahead and a long message, how many rows each level ran for them)."""
    with Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
        engine.precompute(PROMPT[:FIRST])
        steps = list(engine.generate(GenerationRequest(PROMPT, SAMPLED, max_tokens=24, reuse=True)))
        return [token for step in steps for token in step.tokens], [level.rows for level in engine.stats.levels]


@pytest.mark.few(2)
@pytest.mark.parametrize("offload", [frozenset({"weights", "kv"}), frozenset({"kv"}), frozenset[str]()])
@pytest.mark.parametrize("budget", [64, 512])  # less than a prefill needs, and more
def test_no_more_is_allocated_than_planned_in_a_prefill_in_decoding_or_in_a_second_turn(
    offload: frozenset[str], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = request(offload=offload, budget=budget)  # which may measure passes, in memory of its own
    most = noted(monkeypatch)
    two_turns(plan)
    planned = plan.placement.device_bytes
    assert most["arena"] == planned["arena"]
    for purpose, size in most.items():
        assert size <= 1.01 * planned[purpose], purpose
    assert not planned.keys() - most.keys() - {"workspace", "selection", "fetched chunks", "rope tables"}


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [frozenset({"kv"}), frozenset[str]()])
def test_a_prefill_in_place_of_the_retrieval_cache_changes_nothing_that_is_said_or_drafted(
    offload: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with an arena whose users never share a byte."""
    plan = request(offload=offload, budget=256)
    fetched_again = []
    real = RetrievalCache._open

    def noted(cache: RetrievalCache) -> None:
        if not cache._chosen.is_open and cache.chunks is not None:
            fetched_again.append(cache.length)
        real(cache)

    monkeypatch.setattr(RetrievalCache, "_open", noted)
    tokens, rows = two_turns(plan)
    assert fetched_again == [FIRST]
    monkeypatch.setattr(Arena, "begin", lambda arena, give_up: None)
    apart = replace(plan.placement, device_bytes=plan.placement.device_bytes | {"arena": 0})
    assert two_turns(replace(plan, placement=apart)) == (tokens, rows)
    assert len(fetched_again) == 1
