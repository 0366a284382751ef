"""An engine allocates what was planned: its ledger compared with the plan's bytes, and residency."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit.forked import forked_ranks
from kit.models import changed
from kit.processor import best
from offload.config.model import ModelConfig
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.errors import DoesNotFit
from offload.plan.options import Options
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.plan.what_if import LLAMA2_13B
from offload.speed.hardware import RTX_4090, Hardware
from offload.transfer.memory import Memory

MODELS = Path(__file__).resolve().parents[1] / "triforce_cli" / "models"
TARGET, DRAFT = MODELS / "demo-target", MODELS / "demo-draft"
GREEDY = SamplingParams(temperature=0.0, seed=0)
# Not in the ledger at the end of a run.
TEMPORARY = {"workspace", "selection", "fetched chunks", "rope tables", "reserve"}
PROMPT = [7 + i * i % 3900 for i in range(1100)]
SHORT = PROMPT[:200]  # where a plan for all of PROMPT counts, and not how much is said
LONGER = PROMPT[:400]  # than a budget, and than the rows that stay exact


def request(**options: object) -> Plan:
    """Fewer bits are planned only where passes were timed, and bf16 only where it is fast: named, so that neither other
    tests nor the machine matter."""
    options = {"dtype": "bf16", "weight_bits": 16, "kv_bits": 16, **options}
    return plan_request(TARGET, DRAFT, Options(device="cpu", **options), num_prompt_tokens=len(PROMPT), max_tokens=12)  # type: ignore[arg-type]


def run(plan: Plan, prompt: list[int]) -> tuple[list[int], dict[str, dict[str, int]]]:
    """(tokens, ledger after the run)."""
    with Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
        tokens = [
            token for step in engine.generate(GenerationRequest(prompt, GREEDY, max_tokens=12)) for token in step.tokens
        ]
        return tokens, dict(engine.worker.memory.allocated())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gamma": 7}, marks=pytest.mark.deep),
        pytest.param({"gamma": 0}, marks=pytest.mark.deep),
        {"gamma": 15, "draft_gamma": 0, "budget": 256},
        pytest.param({"gamma": 7, "offload": frozenset({"kv"})}, marks=pytest.mark.deep),
        pytest.param({"gamma": 0, "offload": frozenset({"kv"}), "device_memory": 0.5}, marks=pytest.mark.deep),
        {"gamma": 7, "offload": frozenset({"weights", "kv"})},
        {"gamma": 7, "offload": frozenset({"kv"}), "link_gbps": 1.0, "link_bits": 12},
        pytest.param({"gamma": 7, "device_memory": 0.078}, marks=pytest.mark.deep),
        {"gamma": 7, "device_memory": 0.062},
        pytest.param({"gamma": 7, "weight_bits": 4}, marks=pytest.mark.deep),
        pytest.param({"gamma": 7, "weight_bits": 4, "offload": frozenset({"weights", "kv"})}, marks=pytest.mark.deep),
        {"gamma": 7, "weight_bits": 6, "offload": frozenset({"weights", "kv"})},
        pytest.param({"gamma": 7, "kv_bits": 4}, marks=pytest.mark.deep),
        {"gamma": 7, "kv_bits": 4, "offload": frozenset({"weights", "kv"})},
    ],
)
def test_planned_bytes_are_allocated_bytes_within_two_percent(options: dict[str, object]) -> None:
    if {"weight_bits", "kv_bits", "link_bits"} & options.keys():
        best()  # skips where there are no kernels
    plan = request(**options)
    _, ledger = run(plan, LONGER if {"budget", "kv_bits"} & options.keys() else SHORT)
    gathered = ledger["host"].pop("gathered chunks", 0)
    assert gathered <= plan.placement.host_bytes.pop("gathered chunks", 0)
    for tier, planned in (("device", plan.placement.device_bytes), ("host", plan.placement.host_bytes)):
        lasting = {name: size for name, size in planned.items() if name not in TEMPORARY}
        assert ledger[tier].keys() == lasting.keys()
        for name, size in lasting.items():
            assert ledger[tier][name] == pytest.approx(size, rel=0.02), name


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", [frozenset({"kv"}), frozenset[str]()])
def test_each_of_two_ranks_allocates_what_was_planned_for_it(offload: frozenset[str]) -> None:
    plan = request(gamma=7, gpus=2, offload=offload)
    with forked_ranks(), Engine.load(plan, TARGET, DRAFT, load_tokenizer(TARGET, DRAFT)) as engine:
        list(engine.generate(GenerationRequest(SHORT, GREEDY, max_tokens=12)))
        first, second = engine.worker.rank_stats()
        own = dict(engine.worker.memory.allocated()["device"])
    placement = plan.placement
    lasting, others = (
        {name: size for name, size in planned.items() if name not in TEMPORARY}
        for planned in (placement.device_bytes, placement.other_device_bytes)
    )
    assert own == {name: pytest.approx(size, rel=0.02) for name, size in lasting.items()}
    assert first.device_bytes == pytest.approx(sum(lasting.values()), rel=0.01)
    assert second.device_bytes == pytest.approx(sum(others.values()), rel=0.01)
    assert second.device_bytes < 0.99 * first.device_bytes
    homes = placement.host_bytes.get("kv cache", 0)
    for rank in (first, second):
        assert homes <= 2 * rank.host_bytes <= 1.02 * placement.total_host_bytes


def test_wherever_layers_and_tiles_are_the_tokens_are_the_same() -> None:
    options = {"gamma": 7, "budget": 128}  # which a timed machine might choose otherwise
    prompt = SHORT
    expected, _ = run(request(**options), prompt)
    for memory, offload in [(0.062, ("kv",)), (0.05, ("kv", "weights"))]:
        plan = request(**options, device_memory=memory)
        assert plan.placement.offload == offload
        assert plan.placement.total_device_bytes <= memory * 1e9
        assert run(plan, prompt)[0] == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("num_resident", [9, 1, 0, 3, 7, 8])
def test_tiles_on_the_device_do_not_cross_the_link_when_decoding(num_resident: int) -> None:
    plan = request(gamma=0, offload=frozenset({"kv"}))
    plan = changed(plan, resident_tiles=num_resident, page_tokens=64, tile_tokens=128)
    with Engine.load(plan, TARGET, None, load_tokenizer(TARGET, None)) as engine:
        list(engine.generate(GenerationRequest(PROMPT[:140], GREEDY, max_tokens=8)))
        passes = engine.stats.levels[0].passes
        moved = engine.stats.decode_link.bytes_to_device
    page = 64 * 12288 // 8  # a page of one layer; the first tile has two, the second is used up to its first one
    pages = [3, 1, 0]  # that stream in a layer with 0, 1, 2 resident tiles
    share, extra = divmod(num_resident, 8)
    per_pass = page * (extra * pages[min(share + 1, 2)] + (8 - extra) * pages[share])
    assert passes * per_pass <= moved <= passes * per_pass + 4 * page  # those fetched ahead for a pass that never came


def test_a_host_block_is_exact_zeroed_and_aligned() -> None:
    memory = Memory(torch.device("cpu"))
    block = memory.allocate((3, 1001), torch.bfloat16, tier="host", purpose="test")
    assert block.shape == (3, 1001)
    assert block.untyped_storage().nbytes() == 3 * 1001 * 2
    assert not block.any()
    assert block.data_ptr() % 4096 == 0
    assert memory.allocated()["host"] == {"test": 6006}
    memory.released(block, tier="host", purpose="test")
    assert memory.allocated()["host"] == {}


def test_a_block_that_the_system_refuses_is_an_error_with_numbers() -> None:
    memory = Memory(torch.device("cpu"))
    memory.allocate((2**20,), torch.int8, tier="host", purpose="test")
    with pytest.raises(DoesNotFit, match=r"4,504 TB of host memory could not be reserved.*lower --context"):
        memory.allocate((2**52,), torch.int8, tier="host", purpose="test")


def test_a_cache_that_the_system_refuses_names_the_context_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tiles, of which the system gives six: three quarters of the context would fit, and nothing hangs. Hidden
    rows come before them."""
    plan = request(gamma=0, offload=frozenset({"kv"}))
    given, real = [], Memory._host_block

    def limited(memory: Memory, num_bytes: int) -> torch.Tensor:
        if len(given) == 1 + 6:
            raise DoesNotFit(memory._refused(num_bytes, "pinned", "CUDA error 2"))
        given.append(num_bytes)
        return real(memory, num_bytes)

    monkeypatch.setattr(Memory, "_host_block", limited)
    remedy = rf"pinned \(CUDA error 2\).*lower --context to {plan.request.capacity * 6 // 8}$"
    with pytest.raises(DoesNotFit, match=remedy):
        Engine.load(plan, TARGET, None, load_tokenizer(TARGET, None))


# The embedding.

GPU = Hardware("cuda:0", "gpu", 24 * 10**9, 128 * 10**9, True, RTX_4090)
LARGE = LLAMA2_13B.changed(vocab_size=152_064, max_positions=131_072)


def on_a_gpu(hardware: Hardware = GPU, target: ModelConfig = LARGE, **options: object) -> Plan:
    asked = Options(**options)  # type: ignore[arg-type]
    return Request(target, None, asked, hardware).plan(num_prompt_tokens=30_000, max_tokens=200)


def test_where_something_is_offloaded_the_embedding_is_on_the_host() -> None:
    """A pass reads a few rows of it; each rank has its own."""
    table = 152_064 * 5120 * 2
    for number in (1, 2):
        placement = on_a_gpu(replace(GPU, num_devices=number)).placement
        assert placement.table == "host"
        assert placement.host_bytes["target embeddings"] == number * table
        assert placement.device_bytes["target embeddings"] == table + 5120 * 2  # the head, the last norm
        assert number == 1 or placement.other_device_bytes["target embeddings"] == 5120 * 2
    resident = on_a_gpu(replace(GPU, device_free_bytes=200 * 10**9)).placement
    assert resident.table == "device"
    assert resident.device_bytes["target embeddings"] == 2 * table + 5120 * 2


@pytest.mark.parametrize(
    ("hardware", "target"),
    [
        (GPU, LARGE.changed(tie_embeddings=True)),
        (replace(GPU, has_kernels=False), LARGE),
        (replace(GPU, device="cpu", device_free_bytes=300 * 10**9, host_free_bytes=300 * 10**9), LARGE),
    ],
    ids=["the head is the same", "no kernel reads it there", "a CPU has one memory"],
)
def test_the_embedding_stays_where_it_has_to(hardware: Hardware, target: ModelConfig) -> None:
    placement = on_a_gpu(hardware, target, offload=frozenset({"kv", "weights"})).placement
    assert placement.table == "device"
    assert "target embeddings" not in placement.host_bytes


def test_a_32b_model_in_16_bits_drafts_for_itself_on_one_gpu_of_24_gb() -> None:
    """With its embedding on the GPU a copy in 4 bits had no room there, and a token took over a second."""
    large = LARGE.changed(
        hidden_size=5120, intermediate_size=27_648, num_layers=64, num_heads=40, num_kv_heads=8, head_dim=128
    )
    made = on_a_gpu(target=large)
    assert made.composition.weight_bits == 4
    assert made.predicted.seconds_per_token < 0.3
