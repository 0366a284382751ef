"""The plan: what is chosen, what fits, and the arithmetic behind both."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import hypot, inf, log

import pytest

from kit.models import CURVES
from offload.config.encodings import encoded
from offload.config.mixers import Attention
from offload.config.model import ModelConfig
from offload.errors import DoesNotFit, UsageError
from offload.formats.layout import CACHED_SHARE
from offload.plan import cost_gpu
from offload.plan.choice import WORTH_TRYING
from offload.plan.composition import PLAIN, Composition
from offload.plan.cost import LOOKUP_TOKENS, Cost, Prediction
from offload.plan.cost_cpu import SHARED
from offload.plan.cost_gpu import GPU as COSTS
from offload.plan.cost_gpu import NCCL
from offload.plan.fixed_bytes import fixed_bytes
from offload.plan.passes import NETWORK, SumCosts
from offload.plan.placement import Placement, place, shortage
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.plan.sizing import Sizing, run_tiles
from offload.plan.what_if import LLAMA2_7B as LLAMA_7B
from offload.plan.what_if import remedies
from offload.speed.cpu_pass import CpuPass
from offload.speed.curves import ROWS, Curves
from offload.speed.hardware import RTX_4090, Hardware

GIB = 2**30
CPU = Hardware("cpu", "CPU", 64 * GIB, 64 * GIB, True)
GPU = Hardware("cuda:0", "GPU", 24 * GIB, 256 * GIB, True)
DEMO = LLAMA_7B.changed(
    vocab_size=4096,
    hidden_size=384,
    intermediate_size=640,
    num_layers=8,
    num_heads=6,
    num_kv_heads=6,
    head_dim=64,
    max_positions=32768,
    tie_embeddings=True,
)
DRAFT = DEMO.changed(hidden_size=128, intermediate_size=352, num_layers=3, num_heads=2, num_kv_heads=2)


def plan(
    options: Options | None = None,
    *,
    target: ModelConfig = DEMO,
    draft: ModelConfig | None = DRAFT,
    hardware: Hardware = CPU,
    prompt: int = 32000,
    max_tokens: int = 200,
) -> Plan:
    return Request(target, draft, options or Options(), hardware).plan(num_prompt_tokens=prompt, max_tokens=max_tokens)


def test_the_same_request_gives_the_same_plan() -> None:
    assert plan() == plan()


@pytest.mark.parametrize("prompt", [1, 15, 16, 511, 512, 7992, 7993, 8191, 8192, 32000])
def test_tiles_hold_the_request_in_as_few_as_their_limit_allows(prompt: int) -> None:
    made = plan(prompt=prompt)
    count = -(-made.request.capacity // 8192)
    assert made.placement.tile_tokens % made.placement.page_tokens == 0
    assert made.placement.tile_tokens <= 8192 + 512
    assert count * made.placement.tile_tokens >= made.request.capacity + 256
    assert count * (made.placement.tile_tokens - made.placement.page_tokens) < made.request.capacity + 256


def test_tiles_do_not_depend_on_gamma_since_bits_depend_on_them() -> None:
    sizes = {plan(Options(gamma=gamma), prompt=16140).placement.tile_tokens for gamma in (0, 1, 31, 63, 255)}
    assert len(sizes) == 1


def test_the_cache_is_planned_in_whole_tiles() -> None:
    made = plan(Options(offload=frozenset({"kv"})))
    tiles = -(-made.request.capacity // 8192)
    assert made.placement.host_bytes["kv cache"] == tiles * made.placement.tile_tokens * 12288
    assert "kv cache" not in made.placement.device_bytes


@pytest.mark.parametrize("offload", [frozenset({"kv"}), frozenset({"weights"}), frozenset({"weights", "kv"})])
def test_on_a_cpu_all_that_is_named_streams(offload: frozenset[str]) -> None:
    made = plan(Options(offload=offload))
    assert made.placement.resident_layers == (0 if "weights" in offload else DEMO.num_layers)
    assert ("kv cache" in made.placement.device_bytes) == ("kv" not in offload)


def test_nothing_is_offloaded_that_has_room() -> None:
    assert plan(hardware=GPU).placement.offload == ()
    assert plan().placement.offload == ()


def test_device_memory_is_filled_with_weights_first_then_tiles() -> None:
    """A 7B model on 24 GB: all layers, as many tiles as fit, and not one byte more than there is."""
    made = plan(Options(kv_bits=16), target=LLAMA_7B, draft=None, hardware=GPU, prompt=120_000)
    assert (made.placement.offload, made.placement.resident_layers) == (("kv",), 32)
    assert made.placement.resident_tiles > 0
    used, tile = made.placement.total_device_bytes, made.placement.tile_tokens * 524288 // 32
    assert GPU.device_free_bytes - 2 * tile < used <= GPU.device_free_bytes


def test_prefill_has_room_for_all_tiles_of_the_layer_that_keeps_the_fewest() -> None:
    gpu = replace(GPU, device_free_bytes=24 * GIB - 200 * 10**6)
    made = plan(Options(speculation=False), target=LLAMA_7B, draft=None, hardware=gpu, prompt=120_000).placement
    count = -(-120_200 // 8192)
    assert made.resident_tiles % 32 > 0  # layers keep unlike numbers
    streamed = -(-(32 * count - made.resident_tiles) // 32)
    assert made.device_bytes["arena"] == streamed * made.tile_tokens * 524288 // 32


@pytest.mark.parametrize("budget", [512, 4096, 16_384])
@pytest.mark.parametrize("hardware", [CPU, GPU])
def test_a_prefill_and_the_retrieval_cache_have_the_same_bytes(hardware: Hardware, budget: int) -> None:
    """Both were counted: 3 GB of a GPU went unused by 7B at 120,000 tokens, 3.7 GB by 13B."""
    made = plan(Options(budget=budget, chunk=16), target=LLAMA_7B, hardware=hardware, prompt=60_000).placement
    hidden, retrieved = 60_200 * 4096 * 2, (budget + 128) * 524288
    moved = (8 - made.resident_tiles // 32) * made.tile_tokens * 524288 // 32
    assert made.device_bytes["arena"] == max(moved if made.offload else hidden, retrieved)
    assert not {"retrieval cache", "prefill tiles"} & made.device_bytes.keys()


@pytest.mark.parametrize("number", [1, 2])
def test_where_the_cache_streams_hidden_rows_are_on_the_host_of_each_rank(number: int) -> None:
    """In the arena they were 1 GB of a GPU that decoding had no use for."""
    hardware = replace(GPU, num_devices=number, device_free_bytes=48 * GIB)

    def placed(*offload: str) -> Placement:
        options = Options(offload=frozenset(offload), kv_bits=16)
        return plan(options, target=LLAMA_7B, hardware=hardware, prompt=24_000).placement

    made = placed(*("kv", "weights")[:number])
    assert made.host_bytes["hidden rows"] == number * 24_200 * 4096 * 2
    assert made.device_bytes["hidden rows"] == 3 * 512 * 4096 * 2
    assert number == 1 or made.other_device_bytes["hidden rows"] == 3 * 512 * 4096 * 2
    made = placed(*["weights"] * (number == 1))
    assert not {"hidden rows"} & (made.host_bytes.keys() | made.device_bytes.keys())
    assert made.device_bytes["arena"] >= 24_200 * 4096 * 2


def test_several_sequences_have_one_set_of_hidden_rows() -> None:
    request = Request(LLAMA_7B, None, Options(offload=frozenset({"kv"})), GPU)
    one = request.plan(num_prompt_tokens=8000, max_tokens=200)
    four = request.together(one, 4, most=4)
    assert four.request.num_sequences > 1
    assert four.placement.host_bytes["hidden rows"] == one.placement.host_bytes["hidden rows"]
    assert four.placement.device_bytes["hidden rows"] == one.placement.device_bytes["hidden rows"]


def test_layers_leave_room_for_a_cache_that_stays_on_the_device() -> None:
    made = plan(Options(offload=frozenset({"weights"})), target=LLAMA_7B, draft=None, hardware=GPU, prompt=24_000)
    layer = LLAMA_7B.layer_weight_bytes(2)
    assert 0 < made.placement.resident_layers < 32
    assert "kv cache" not in made.placement.host_bytes
    assert GPU.device_free_bytes - layer < made.placement.total_device_bytes <= GPU.device_free_bytes


def test_layers_that_have_no_room_stream_and_the_plan_says_what_that_costs() -> None:
    small = Options(device_memory=10.0, kv_bits=16)
    made = plan(small, target=LLAMA_7B, draft=None, hardware=GPU, prompt=30_000)
    assert made.placement.offload == ("kv", "weights")
    assert 0 < made.placement.resident_layers < 32
    assert made.placement.total_device_bytes <= 10e9
    assert any("cross the link in every full pass" in note for note in made.notes)
    exact = plan(replace(small, weight_bits=16), target=LLAMA_7B, draft=None, hardware=GPU, prompt=30_000)
    assert any("in every pass, those of the retrieval level too" in note for note in exact.notes)
    plain = plan(
        replace(small, kv_bits=None, speculation=False), target=LLAMA_7B, draft=None, hardware=GPU, prompt=30_000
    )
    assert any(note.endswith("cross the link in every pass") for note in plain.notes)


def test_two_devices_hold_half_of_each_layer_and_cache_each() -> None:
    options = Options(gamma=15, budget=8192, chunk=16)
    one = plan(options, target=LLAMA_7B, hardware=GPU, prompt=30_000)
    two = plan(options, target=LLAMA_7B, hardware=replace(GPU, num_devices=2), prompt=30_000)
    assert two.placement.device_bytes["arena"] == one.placement.device_bytes["arena"] // 2 == 8320 * 262144
    table = 32_000 * 4096 * 2
    assert one.placement.offload == ("kv",)
    assert one.placement.device_bytes["target embeddings"] == table + 4096 * 2
    assert two.placement.offload == ()
    assert two.placement.device_bytes["target embeddings"] == 2 * table + 4096 * 2
    assert two.predicted.full_pass_seconds < one.predicted.full_pass_seconds


PAIR = replace(GPU, num_devices=2, rates=RTX_4090)
LONG = Options(offload=frozenset({"kv"}), gamma=7, budget=1024, chunk=16)


def test_the_links_of_several_devices_are_as_fast_as_host_memory_lets_them() -> None:
    def full_pass(hardware: Hardware, **rates: float) -> float:
        changed = replace(hardware, rates=replace(RTX_4090, **rates))
        made = plan(LONG, target=LLAMA_7B, hardware=changed, prompt=120_000)
        assert made.predicted.full_pass_seconds == pytest.approx(made.predicted.full_link_bytes / changed.link_rate)
        return made.predicted.full_pass_seconds

    free = full_pass(PAIR)
    assert full_pass(PAIR, host_read=25e9) == pytest.approx(2 * free)
    assert full_pass(PAIR, links=25e9) == pytest.approx(2 * free)
    assert full_pass(replace(PAIR, num_hosts=2), host_read=25e9) == pytest.approx(free)
    assert full_pass(GPU, host_read=10e9) == full_pass(GPU)  # its link was measured, or is typical, as it is


def test_a_measured_link_is_known_to_be_shared() -> None:
    measured = replace(RTX_4090, measured=True, links=30e9)
    made = plan(LONG, target=LLAMA_7B, hardware=replace(PAIR, rates=measured), prompt=60_000)
    assert made.placement.link_bytes_per_second == 15e9


def test_links_that_a_user_paces_are_one_for_each_rank() -> None:
    options = Options(offload=frozenset({"kv"}), link_gbps=1.0)
    one, two = (plan(options, hardware=replace(CPU, num_devices=number)) for number in (1, 2))
    assert one.predicted.full_link_bytes == pytest.approx(2 * two.predicted.full_link_bytes)
    assert one.predicted.full_pass_seconds == pytest.approx(2 * two.predicted.full_pass_seconds)


def test_sums_over_ranks_take_time_in_every_pass_of_the_target() -> None:
    """Two a layer, each of one row's hidden values from every other rank; on a GPU a full pass pads to 16 rows."""
    single = NCCL.seconds + 4096 * 2 / NCCL.rate
    padded = NCCL.seconds + 16 * 4096 * 2 / NCCL.rate
    found = plan(LONG, target=LLAMA_7B, hardware=PAIR, prompt=60_000).predicted
    assert found.retrieval_sum_seconds == pytest.approx(2 * 32 * single)
    assert found.full_sum_seconds == pytest.approx(2 * 32 * padded)
    four = plan(LONG, target=LLAMA_7B, hardware=replace(PAIR, num_devices=4), prompt=60_000).predicted
    assert four.full_sum_seconds == pytest.approx(2 * 32 * (NCCL.seconds + 3 * 16 * 4096 * 2 / NCCL.rate))
    far = plan(LONG, target=LLAMA_7B, hardware=replace(PAIR, num_hosts=2), prompt=60_000).predicted
    assert far.full_sum_seconds == pytest.approx(2 * 32 * (NETWORK.seconds + 16 * 4096 * 2 / NETWORK.rate))
    alone = plan(LONG, target=LLAMA_7B, hardware=GPU, prompt=60_000).predicted
    assert (alone.full_sum_seconds, alone.retrieval_sum_seconds) == (0.0, 0.0)
    without = plan(Options(speculation=False), target=LLAMA_7B, hardware=PAIR, prompt=60_000).predicted
    assert (without.full_sum_seconds, without.retrieval_sum_seconds) == (found.full_sum_seconds, 0.0)


def test_all_rows_of_a_pass_are_summed_at_once() -> None:
    """Whatever their number is, there are two sums a layer; only the bytes grow."""
    for hardware, block in ((PAIR, 16), (replace(CPU, num_devices=2), 32)):
        sizing = Sizing(DEMO, None, Options(), hardware, "bf16")
        found = Cost(sizing, place(sizing, 4000, PLAIN), 4000, PLAIN)
        latency = 2 * DEMO.num_layers * (NCCL if hardware is PAIR else SHARED).seconds
        assert found.device.full_sums(block) - found.device.sums(block) == 0.0
        more = found.device.full_sums(2 * block) - found.device.full_sums(block)
        assert more == pytest.approx(found.device.full_sums(block) - latency)
        if hardware is PAIR:  # whole blocks
            assert found.device.full_sums(block + 1) == found.device.full_sums(2 * block)
        three = replace(found, sizing=replace(sizing, num_sequences=3))
        assert three.device.full_sums(block) == found.device.full_sums(3 * block)


def seconds_with(sums: SumCosts, monkeypatch: pytest.MonkeyPatch, options: Options, hardware: Hardware) -> Prediction:
    monkeypatch.setattr(cost_gpu, "NCCL", sums)
    return plan(options, target=LLAMA_7B, hardware=hardware, prompt=120_000).predicted


def test_sums_are_hidden_behind_a_link_and_add_to_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    free = replace(NCCL, seconds=0.0, rate=1e18)
    slow = replace(free, seconds=5e-3)  # 0.32 s a pass
    streaming, before = (seconds_with(sums, monkeypatch, LONG, PAIR) for sums in (slow, free))
    assert streaming.full_pass_seconds == before.full_pass_seconds
    assert streaming.retrieval_pass_seconds - before.retrieval_pass_seconds == pytest.approx(0.32, rel=0.3)
    roomy = replace(PAIR, device_free_bytes=200 * GIB)
    options = Options(speculation=False)
    resident, before = (seconds_with(sums, monkeypatch, options, roomy) for sums in (slow, free))
    assert resident.full_pass_seconds - before.full_pass_seconds == pytest.approx(0.32, rel=0.3)
    blocks = -(-120_000 // 512)
    assert resident.prefill_seconds - before.prefill_seconds == pytest.approx(blocks * 0.32)


def test_with_one_device_nothing_is_summed_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(NCCL, seconds=1.0)
    assert seconds_with(slow, monkeypatch, LONG, GPU) == seconds_with(NCCL, monkeypatch, LONG, GPU)


def test_sums_of_processes_on_a_cpu_take_longer_the_more_there_are() -> None:
    target = DEMO.changed(intermediate_size=768)  # six divide it
    hosts = [replace(CPU, num_devices=number) for number in (2, 6)]
    sums = [plan(target=target, hardware=each).predicted.full_sum_seconds for each in hosts]
    assert sums[0] == pytest.approx(16 * 2e-5, rel=0.1)
    assert sums[1] > 4 * sums[0]


def test_head_and_draft_are_on_the_first_device_alone() -> None:
    made = plan(LONG, target=LLAMA_7B, hardware=PAIR, prompt=120_000).placement
    first, others = made.device_bytes, made.other_device_bytes
    table = 32_000 * 4096 * 2
    assert first["target embeddings"] == table + 4096 * 2
    assert others["target embeddings"] == 4096 * 2
    assert made.host_bytes["target embeddings"] == 2 * table
    assert first.keys() - others.keys() == {"draft layers", "draft embeddings", "draft cache"}
    same = {"target layers", "arena", "selection", "kv cache", "kv staging"}
    assert {name: first[name] for name in same} == {name: others[name] for name in same}
    assert first["rope tables"] - others["rope tables"] == 2 * (120_200 + 256) * 64 * 2
    assert made.total_other_device_bytes < made.total_device_bytes
    assert plan(LONG, target=LLAMA_7B, hardware=GPU, prompt=60_000).placement.other_device_bytes == {}


def test_a_tied_head_is_the_embedding_that_every_device_has() -> None:
    made = plan(hardware=replace(GPU, num_devices=2)).placement
    assert made.other_device_bytes["target embeddings"] == made.device_bytes["target embeddings"]


def test_logits_are_computed_on_the_first_device_alone() -> None:
    wide = DEMO.changed(vocab_size=1_000_000)
    made = plan(Options(gamma=15, budget=512), target=wide, draft=None, hardware=PAIR, prompt=4000).placement
    assert made.device_bytes["workspace"] == 16 * 1_000_000 * (2 + 36)
    assert made.other_device_bytes["workspace"] < 0.1 * made.device_bytes["workspace"]


def test_there_is_room_for_the_numbers_of_the_largest_stored_matrix() -> None:
    """A prefill multiplies with these: of a 70B model 940 MB, which no plan had counted."""
    wide = DEMO.changed(hidden_size=2048, intermediate_size=40_000, num_heads=4, num_kv_heads=4, head_dim=64)
    stored = encoded(wide, lambda name: "Q8_0" if "mlp." in name or "embed" in name or "lm_head" in name else "")

    def workspace(model: ModelConfig, hardware: Hardware, dtype: str = "bf16") -> int:
        return fixed_bytes(Sizing(model, None, Options(), hardware, dtype), 4000, PLAIN)["workspace"]

    rows, numbers = 512 * (3 * 40_000 + 6 * 2048), 2 * 40_000 * 2048
    assert workspace(wide, GPU) < rows * 2 + numbers
    assert workspace(stored, GPU) == rows * 2 + numbers * 2
    assert workspace(stored, CPU) == rows * 2 + numbers * 2
    assert workspace(stored, GPU, "fp32") == rows * 4 + numbers * 4
    assert workspace(stored, replace(GPU, has_kernels=False)) == rows * 2 + numbers * 16
    of_head = replace(stored, vocab_size=400_000)
    assert workspace(of_head, GPU) == workspace(stored, GPU)
    assert workspace(of_head, GPU, "fp32") > workspace(stored, GPU, "fp32") + 400_000 * 2048


def test_prefill_has_room_for_what_the_other_ranks_have_of_a_block() -> None:
    wide = DEMO.changed(hidden_size=8192, num_heads=8, num_kv_heads=8, head_dim=16)
    two, eight = (
        fixed_bytes(Sizing(wide, None, Options(), replace(GPU, num_devices=number), "bf16"), 4000, PLAIN)["workspace"]
        for number in (2, 8)
    )
    rows = 512 * 8192
    assert two == 512 * 3 * 320 * 2 + 6 * rows * 2 + 2 * rows * 2
    assert eight == 512 * 3 * 80 * 2 + 6 * rows * 2 + rows * (8 * 2 + 4)


def test_a_cpu_has_room_for_what_all_its_ranks_hold() -> None:
    made = plan(hardware=replace(CPU, num_devices=2)).placement
    needed = made.total_device_bytes + made.total_other_device_bytes + made.total_host_bytes
    sizing = Sizing(DEMO, DRAFT, Options(), replace(CPU, num_devices=2, host_free_bytes=needed), "bf16")
    assert shortage(sizing, made) is None
    less = replace(sizing, hardware=replace(sizing.hardware, host_free_bytes=needed - 1))
    assert shortage(less, made) is not None
    assert shortage(replace(less, hardware=replace(less.hardware, num_hosts=2)), made) is None


def test_devices_that_cannot_share_a_model_are_refused_and_not_advised() -> None:
    request = Request(LLAMA_7B, None, Options(), GPU)
    with pytest.raises(UsageError, match="gpus is 3, and 32 heads"):
        replace(request, hardware=replace(GPU, num_devices=3))
    uneven = LLAMA_7B.changed(num_heads=33, num_kv_heads=33)
    for target, advised in ((LLAMA_7B, True), (uneven, False)):
        small = replace(request, target=target, hardware=replace(GPU, device_free_bytes=5 * GIB))
        named = Request(target, None, Options(offload=frozenset({"kv"})), small.hardware)
        found = remedies(named, num_prompt_tokens=4000, max_tokens=100)
        assert any("such GPUs" in line for line in found) == advised


def test_a_prediction_knows_the_link_and_plain_decoding() -> None:
    slow, fast = (
        plan(Options(offload=frozenset({"kv"}), link_gbps=rate, link_bits=16)).predicted for rate in (1.0, 2.0)
    )
    moved = 32200 * 12288
    assert slow.full_pass_seconds == pytest.approx(moved / 1e9)
    assert fast.full_pass_seconds == pytest.approx(moved / 2e9)
    assert slow.plain_seconds_per_token == pytest.approx(moved / 1e9)
    assert slow.seconds_per_token < slow.plain_seconds_per_token / 3


def test_without_speculation_there_is_one_level_and_nothing_is_kept_for_others() -> None:
    made = plan(Options(speculation=False))
    assert (made.composition.levels, made.composition.gamma, made.composition.draft_gamma) == (("target",), 0, 0)
    assert made.placement.device_bytes["arena"] == 32_200 * 384 * 2
    assert not {"selection", "draft layers"} & made.placement.device_bytes.keys()


def test_gamma_zero_is_plain_decoding() -> None:
    made = plan(Options(gamma=0, draft_gamma=2))
    assert (made.composition.levels, made.composition.draft_gamma) == (("target",), 0)
    assert made.placement.device_bytes["arena"] == 32_200 * 384 * 2
    assert not {"selection", "draft layers"} & made.placement.device_bytes.keys()


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(speculation=False),
        Options(gamma=31, budget=64),
        Options(offload=frozenset({"kv"})),
    ],
)
@pytest.mark.parametrize("prompt", [1, 32000])
def test_rows_follow_the_device_alone_since_bits_depend_on_them(options: Options, prompt: int) -> None:
    assert plan(options, prompt=prompt).placement.rows == 8
    assert plan(options, prompt=prompt, hardware=GPU).placement.rows == 16


def seconds_of_pass(hardware: Hardware, rows: int, options: Options | None = None) -> float:
    sizing = Sizing(DEMO, None, options or Options(), hardware, "bf16")
    return Cost(sizing, place(sizing, 32000, PLAIN), 32000, PLAIN).full_pass(rows)


def test_on_a_gpu_a_pass_of_more_rows_than_a_block_has_reads_everything_again() -> None:
    one, whole, more = (seconds_of_pass(GPU, rows) for rows in (1, 16, 17))
    assert more - whole > 0.8 * one
    assert whole < 3.5 * one


@pytest.mark.parametrize(("hardware", "block"), [(CPU, 32), (GPU, 16)])
def test_draft_lengths_know_the_rows_of_a_block(hardware: Hardware, block: int) -> None:
    assert plan(hardware=hardware, prompt=4000).predicted.full_block_rows == block


def test_a_cpus_passes_take_their_bytes_by_the_curves() -> None:
    sizing = Sizing(DEMO, DRAFT, Options(), CPU, "bf16", measured=CURVES)
    found = Composition(gamma=15, draft_gamma=3, budget=1024, draft=True)
    priced = Cost(sizing, place(sizing, 32000, found), 32000, found)
    token, row = DEMO.kv_bytes_per_token(2), DEMO.layer_matrix_elements()
    weights, drafts = (
        2 * (each.num_layers * each.layer_matrix_elements() + each.vocab_size * each.hidden_size)
        for each in (DEMO, DRAFT)
    )
    eight = 4e-4 + 8 * 2e-5 + 4096 * 3e-9 + 8e-10 * weights
    assert priced.full_pass(8) == pytest.approx(eight + 32000 * token * 18e-11)
    assert priced.full_pass(8, masses=True) == pytest.approx(eight + 1.5 * 32000 * token * 18e-11)
    one = 1e-4 + 8 * 1e-5 + 4096 * 1e-9 + 4e-10 * weights
    assert priced.retrieval_pass(1) == pytest.approx(one + 1024 * token * 6e-11)
    held = 256 * DRAFT.kv_bytes_per_token(2) * 6e-11
    assert priced.draft_pass == pytest.approx(1e-4 + 3 * 1e-5 + 4096 * 1e-9 + 4e-10 * drafts + held)
    assert priced.prefill(1000) == pytest.approx(8 * (1000 * row * 8e-12 + 500_500 * 384 * 2e-12))


def test_a_prefills_hidden_rows_cross_the_link_each_way_between_two_layers() -> None:
    """As few as have room on the device do not. Over a link of 1 MB a second nothing else takes as long."""
    options = Options(offload=frozenset({"kv"}), link_gbps=1e-3)
    sizing, found = Sizing(DEMO, None, options, CPU, "bf16", measured=CURVES), PLAIN
    priced = Cost(sizing, place(sizing, 32000, found), 32000, found)
    assert priced.prefill(3 * 512) == pytest.approx(3 * 512 * 12288 / 1e6)
    assert priced.prefill(2000) == pytest.approx(2000 * (12288 + 7 * 384 * 2) / 1e6)
    streams = replace(
        priced,
        placement=place(replace(sizing, options=replace(options, offload=frozenset({"kv", "weights"}))), 32000, found),
    )
    there, back = streams.streamed_weights, 2000 * 12288
    assert streams.prefill(2000) == pytest.approx((max(there, back) + 2000 * 7 * 384 * 2) / 1e6)


def test_rows_go_home_as_fast_as_a_gpu_writes_to_the_host() -> None:
    """Which may be slower than its link brings anything."""
    rates = replace(GPU.rates, to_device=20e9, to_host=1e7, measured=True)
    sizing = Sizing(
        DEMO, None, Options(offload=frozenset({"kv"}), device_memory=0.2), replace(GPU, rates=rates), "bf16"
    )
    found = Cost(sizing, place(sizing, 32000, PLAIN), 32000, PLAIN)
    assert found.link_rate == 20e9
    back = 30000 * 12288 * (1 - found.placement.resident_tiles / found.num_tiles) + 7 * sizing.hidden_bytes(30000)
    assert found.prefill(30000) == pytest.approx(back / 1e7)


def test_several_gpus_share_the_computing_of_a_prefill() -> None:
    """And add their sums."""
    one, two = (
        Cost(sizing, place(sizing, 4000, PLAIN), 4000, PLAIN)
        for sizing in (
            Sizing(DEMO, None, Options(), hardware, "bf16") for hardware in (replace(GPU, rates=RTX_4090), PAIR)
        )
    )
    assert two.prefill(4000) - two.device.sums(4000, 8) == pytest.approx(one.prefill(4000) / 2)


def test_a_looked_up_token_takes_a_row_more() -> None:
    sizing = Sizing(DEMO, None, Options(), CPU, "bf16", measured=CURVES)
    found = Composition(lookup=True)
    priced = Cost(sizing, place(sizing, 32000, found), 32000, found)
    one, two = (priced.full_pass(rows) / LOOKUP_TOKENS for rows in (1, 2))
    assert one < priced.per_looked_up_token == two
    given = replace(priced, sizing=replace(sizing, options=Options(gamma=3)))
    without = replace(priced, composition=Composition(lookup=False))
    assert given.per_looked_up_token == without.per_looked_up_token == inf


def test_ranks_share_what_was_measured_of_a_processor_and_its_models() -> None:
    """Half of the model by half of the CPU takes as long as the whole."""
    options = Options(speculation=False)
    passes = [
        Request(DEMO, None, options, replace(CPU, num_devices=number, num_hosts=hosts), curves=CURVES)
        .plan(num_prompt_tokens=4000, max_tokens=9)
        .predicted
        for number, hosts in ((1, 1), (2, 1), (2, 2))
    ]
    alone, two, hosts = (made.full_pass_seconds - made.full_sum_seconds for made in passes)
    assert two == pytest.approx(alone)
    assert hosts == pytest.approx(alone / 2)


def test_a_cpu_that_was_not_measured_reads_at_its_rates() -> None:
    slow = replace(CPU, rates=replace(CPU.rates, device_read=CPU.rates.device_read / 4))
    assert 3.0 < seconds_of_pass(slow, 1) / seconds_of_pass(CPU, 1) < 4.0


def test_behind_a_link_a_second_block_costs_nothing() -> None:
    options = Options(offload=frozenset({"kv"}), link_gbps=1.0)
    assert seconds_of_pass(CPU, 1, options) == seconds_of_pass(CPU, 33, options)
    assert plan(options).predicted.full_block_rows == 0
    assert plan(options).predicted.full_row_seconds == 0


@pytest.mark.parametrize("hardware", [CPU, GPU])
@pytest.mark.parametrize("offload", [frozenset[str](), frozenset({"kv"})])
@pytest.mark.parametrize("prompt", [100, 4000, 32000])
@pytest.mark.few(2)
def test_nothing_that_could_be_asked_for_is_predicted_to_be_much_faster_than_what_is_planned(
    prompt: int, offload: frozenset[str], hardware: Hardware
) -> None:
    """For the mean text: what is planned is also weighed by hard ones, which want a larger budget."""
    own = plan(Options(offload=offload), prompt=prompt, hardware=hardware).predicted.seconds_per_token
    for asked in (
        *({"budget": budget} for budget in (512, 1024, 2048, 8192)),
        *({"gamma": gamma} for gamma in (1, 3, 7, 15, 31)),
        *({"draft_gamma": draft_gamma} for draft_gamma in (0, 1, 2)),
        {"chunk": 32}, {"speculation": False}, {"lookup": False},
    ):  # fmt: skip
        made = plan(Options(offload=offload, **asked), prompt=prompt, hardware=hardware)  # type: ignore[arg-type]
        assert own <= WORTH_TRYING * made.predicted.seconds_per_token, asked


def test_a_slow_link_is_worth_a_larger_budget_and_longer_drafts() -> None:
    plans = [plan(Options(offload=frozenset({"kv"}), link_gbps=rate)) for rate in (100, 10, 2, 1, 0.1)]
    budgets, lengths = [made.composition.budget for made in plans], [made.predicted.tokens_drafted for made in plans]
    assert budgets == sorted(budgets)
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert budgets[-1] == 32200 // 2 // 16 * 16


def test_on_a_gpu_a_budget_is_found_to_an_eighth_of_an_octave() -> None:
    """There it takes the place of tiles and layers: with powers of two, 7B at 120,000 tokens took 292 ms a token. By a
    hundredth others may be better for the mean text: hard ones are weighed, too."""
    hardware = replace(GPU, rates=RTX_4090)
    made = plan(target=LLAMA_7B, hardware=hardware, prompt=119_744, max_tokens=256)
    budget, chunk = made.composition.budget, made.composition.chunk
    assert budget not in {120_000 // share // chunk * chunk for share in (32, 16, 8, 4, 2)}
    for factor in (2**-0.125, 2**0.125, 0.5, 2.0):
        options = Options(budget=round(factor * budget))
        other = plan(options, target=LLAMA_7B, hardware=hardware, prompt=119_744, max_tokens=256)
        assert made.predicted.seconds_per_token <= 1.01 * other.predicted.seconds_per_token, factor


def test_on_a_cpu_a_budget_is_a_power_of_two_of_the_context() -> None:
    for options in (Options(), Options(offload=frozenset({"kv"}), link_gbps=1.0)):
        made = plan(options).composition
        assert made.budget in {32_200 // share // made.chunk * made.chunk for share in (32, 16, 8, 4, 2)}


def test_a_budget_is_whole_chunks_and_at_most_the_context() -> None:
    assert plan(Options(budget=100, chunk=16)).composition.budget == 96
    assert plan(Options(budget=5, chunk=16)).composition.budget == 16
    assert plan(Options(budget=4096, chunk=16), prompt=100).composition.budget == 288


def test_lengths_adapt_unless_they_are_given() -> None:
    assert plan().composition.adaptive == ("retrieval", "target")
    assert plan(Options(gamma=9)).composition.adaptive == ("retrieval",)
    assert plan(Options(draft_gamma=2, budget=1024)).composition.adaptive == ("target",)
    given = plan(Options(gamma=9, draft_gamma=2, budget=1024))
    assert (given.composition.adaptive, given.composition.gamma, given.composition.draft_gamma) == ((), 9, 2)
    assert plan(Options(speculation=False)).composition.adaptive == ()


def test_without_a_draft_the_retrieval_level_proposes_and_lookups_do() -> None:
    made = plan(Options(gamma=7, budget=512), draft=None)
    assert (made.composition.levels, made.composition.lookup, made.composition.draft_gamma) == (
        ("retrieval", "target"),
        True,
        15,
    )
    made = plan(Options(gamma=7, budget=512, lookup=False), draft=None)
    assert (made.composition.levels, made.composition.lookup, made.composition.draft_gamma) == (
        ("retrieval", "target"),
        False,
        0,
    )


def test_a_model_whose_weights_outweigh_its_cache_has_no_retrieval_level() -> None:
    """A pass over a part of its cache costs what a full one does: lookups, which cost nothing, are what is left."""
    made = plan(Options(weight_bits=16, kv_bits=16), target=LLAMA_7B, draft=None, hardware=GPU, prompt=2000)
    assert (made.composition.levels, made.composition.lookup) == (("target",), True)
    assert made.predicted.seconds_per_token == pytest.approx(made.predicted.plain_seconds_per_token / 1.2, rel=0.02)
    exact = Options(lookup=False, weight_bits=16, kv_bits=16)
    without = plan(exact, target=LLAMA_7B, draft=None, hardware=GPU, prompt=2000).predicted
    assert without.seconds_per_token == without.plain_seconds_per_token


# Passes of which the weights take the most, in 4 bits a quarter of the seconds.
SLOW = tuple(1.5e-8 * (1 + 0.02 * rows) for rows in ROWS)
EXACT = replace(CURVES, weights={"": SLOW})
HEAVY = replace(CURVES, weights={"": SLOW, "4 bits": tuple(0.8 * each for each in SLOW)})


def heavy_plan(options: Options | None = None, curves: Curves = HEAVY, **shapes: int) -> Plan:
    target = DEMO.changed(**shapes)
    return Request(target, None, options or Options(), CPU, curves).plan(num_prompt_tokens=8000, max_tokens=200)


def seconds(curves: Curves, num_tokens: int, weight_bits: int = 16, **more: bool) -> float:
    """Of a pass of one row over so many tokens."""
    return CpuPass(DEMO, 2, curves, weight_bits).seconds(1, num_tokens * DEMO.kv_bytes_per_token(2), **more)


def test_the_target_proposes_to_itself_with_weights_in_4_bits_where_that_is_faster() -> None:
    made = heavy_plan()
    assert made.composition.levels == ("self", "target")
    assert (made.composition.weight_bits, made.composition.budget, made.composition.draft_gamma) == (4, 0, 15)
    assert made.composition.adaptive == ("self", "target")
    exact = heavy_plan(Options(weight_bits=16))
    assert exact.composition.weight_bits == 16
    assert made.predicted.seconds_per_token < 0.7 * exact.predicted.seconds_per_token
    # Where nothing is gained: a quarter of nearly nothing.
    light = dict.fromkeys(("", "4 bits", "6 bits"), (1e-15,) * len(ROWS))
    assert heavy_plan(curves=replace(CURVES, weights=light)).composition.weight_bits == 16


def test_weights_in_4_bits_are_chosen_where_they_were_measured_and_have_whole_groups() -> None:
    assert heavy_plan(curves=EXACT).composition.weight_bits == 16
    assert heavy_plan(intermediate_size=608).composition.weight_bits == 16
    asked = heavy_plan(Options(weight_bits=4), EXACT).predicted
    assert asked.retrieval_pass_seconds < 0.5 * asked.full_pass_seconds


@pytest.mark.parametrize("gigabytes", [*(pytest.param(each, marks=pytest.mark.deep) for each in (1, 40, 64)), 56, 57])
def test_there_is_room_for_what_can_be_planned_and_for_nothing_else(gigabytes: int) -> None:
    """7B at 120,000 tokens needs some 57 GB of this host."""
    hardware, sizes = replace(GPU, host_free_bytes=gigabytes * 10**9), {"num_prompt_tokens": 119_744, "max_tokens": 256}
    room = Request(LLAMA_7B, None, Options(), hardware).fits(**sizes)
    assert room is (gigabytes > 56)
    with nullcontext() if room else pytest.raises(DoesNotFit):
        Request(LLAMA_7B, None, Options(), hardware).plan(**sizes)


def test_a_pass_to_propose_takes_the_seconds_of_its_own_weights() -> None:
    """Over a part of the cache: what it does not read is little beside what weights in 4 bits refuse at any rate."""
    planned = heavy_plan(Options(weight_bits=4, gamma=7))
    made, budget = planned.predicted, planned.composition.budget
    assert 0 < budget < 8200 / 2
    assert made.retrieval_pass_seconds == pytest.approx(seconds(HEAVY, budget, 4))
    assert made.full_pass_seconds == pytest.approx(seconds(HEAVY, 8200))


def test_what_makes_the_target_by_itself_err_adds_by_squares() -> None:
    """Weights in 4 bits, the cache in 4 bits, and what is not read of it."""

    def refused(options: Options) -> float:
        return 1.0 - heavy_plan(replace(options, gamma=7), ATTENDING_CODES).predicted.acceptance

    weights = refused(Options(weight_bits=4, budget=8192))
    cache, part = refused(Options(kv_bits=4)), refused(Options(budget=1024))
    assert weights == pytest.approx(3.0 / DEMO.hidden_size**0.5, rel=0.01)
    assert cache == pytest.approx(0.02)
    assert part == pytest.approx(0.031 * log(8200 / 1024))
    assert refused(Options(kv_bits=4, budget=1024)) == pytest.approx(hypot(cache, part))
    assert refused(Options(weight_bits=4, budget=1024)) == pytest.approx(hypot(weights, part), rel=0.01)
    assert refused(Options(weight_bits=4, kv_bits=4)) == pytest.approx(hypot(weights, cache), rel=0.01)


def test_a_pass_to_propose_brings_no_cache_over_the_link() -> None:
    """Over weights in 4 bits it runs over retrieved tokens there, and waits for no exact weights."""
    everything = frozenset({"kv", "weights"})
    made = heavy_plan(Options(weight_bits=4, offload=everything, link_gbps=0.01))
    assert made.composition.levels == ("retrieval", "target")
    assert made.composition.weight_bits == 4
    exact = heavy_plan(Options(weight_bits=16, budget=made.composition.budget, offload=everything, link_gbps=0.01))
    assert made.predicted.retrieval_pass_seconds < 0.1 * exact.predicted.retrieval_pass_seconds


def test_the_bytes_of_weights_in_4_bits_are_counted() -> None:
    with_them, without = (heavy_plan(Options(weight_bits=bits, gamma=7)).placement for bits in (4, 16))
    matrices = 8 * DEMO.layer_matrix_elements() + DEMO.vocab_size * DEMO.hidden_size
    planned = with_them.device_bytes["quantised weights"]
    assert planned == pytest.approx(matrices * 4.5 / 8, rel=0.01)
    assert "quantised weights" not in without.device_bytes


# Attention takes the most seconds, a third of them to tokens in 4 bits.
CACHED = tuple(6e-9 * (1 + 0.02 * rows) for rows in ROWS)
ATTENDING = replace(CURVES, cache=CACHED, near_cache=CACHED)
ATTENDING_CODES = replace(ATTENDING, coded_cache=tuple(each / 3 for each in CACHED))
CACHE = frozenset({"kv"})


def test_the_target_proposes_to_itself_over_its_cache_in_4_bits_where_that_is_faster() -> None:
    made = heavy_plan(Options(offload=CACHE, link_gbps=0.02), ATTENDING_CODES)
    assert made.composition.levels == ("self", "target")
    assert (made.composition.kv_bits, made.composition.weight_bits, made.composition.budget) == (4, 16, 0)
    before = heavy_plan(Options(offload=CACHE, link_gbps=0.02), ATTENDING)
    assert before.composition.levels == ("retrieval", "target")
    assert made.predicted.seconds_per_token < before.predicted.seconds_per_token
    # Where a pass over it takes as long as one over all of the exact cache, or was not measured.
    slow = replace(ATTENDING, coded_cache=CACHED)
    assert heavy_plan(curves=slow).composition.kv_bits == 16
    assert heavy_plan(Options(offload=CACHE, link_gbps=0.02, kv_bits=16), ATTENDING_CODES).composition.kv_bits == 16


def test_both_may_have_4_bits() -> None:
    both = replace(ATTENDING_CODES, weights=HEAVY.weights)
    made = heavy_plan(Options(offload=CACHE, link_gbps=0.02, weight_bits=4), both)
    assert (made.composition.weight_bits, made.composition.kv_bits) == (4, 4)


def test_a_pass_over_the_cache_in_4_bits_takes_the_seconds_that_were_measured_of_it() -> None:
    made = heavy_plan(Options(kv_bits=4, gamma=7), ATTENDING_CODES).predicted
    assert made.retrieval_pass_seconds == pytest.approx(seconds(ATTENDING_CODES, 8200, coded=True))
    assert made.full_pass_seconds == pytest.approx(seconds(ATTENDING, 8200))
    assert made.retrieval_pass_seconds < 0.5 * made.full_pass_seconds
    assert made.mass_share == 0.0
    assert 0.98 <= made.acceptance < 1.0
    weights = heavy_plan(Options(kv_bits=4, weight_bits=4, gamma=7), ATTENDING_CODES).predicted
    assert weights.acceptance < made.acceptance


def test_the_bytes_of_a_cache_in_4_bits_are_counted() -> None:
    with_it, without = (heavy_plan(Options(kv_bits=bits, gamma=7)).placement for bits in (4, 16))
    assert with_it.device_bytes["quantised cache"] == pytest.approx(
        8200 * DEMO.kv_bytes_per_token(2) * 5 / 16, rel=0.08
    )
    assert "quantised cache" not in without.device_bytes


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tiles"),
    [(32, 8, 1), (40, 40, 1), (16, 2, 4), (32, 4, 2), (20, 1, 4), (128, 1, 1), (8, 1, 8)],
)
def test_a_launch_takes_more_tiles_where_queries_of_a_row_are_few_programs(
    heads: int, kv_heads: int, tiles: int
) -> None:
    """And the plan has room for what they give, of two launches, but no more than there are tiles."""
    assert run_tiles(Attention(heads, kv_heads, 128)) == tiles

    def scratch(prompt: int) -> int:
        gpu, target = (
            replace(GPU, device_free_bytes=200 * GIB),
            LLAMA_7B.changed(num_heads=heads, num_kv_heads=kv_heads),
        )
        made = plan(Options(speculation=False), target=target, draft=None, hardware=gpu, prompt=prompt).placement
        return made.device_bytes["attention scratch"] // (16 * heads * (128 + 2) * 4) - 1

    pages = [scratch(prompt) for prompt in (4_000, 130_000)]
    assert pages == [2 * 9, 2 * 16 * tiles]


def test_on_a_gpu_the_cache_has_4_bits_where_that_is_predicted_to_pay() -> None:
    """A pass over it reads its bytes, and those of the weights. Where they have no room, a part of it has 4 bits."""
    gpu = replace(GPU, device_free_bytes=48 * GIB, rates=RTX_4090)
    made = plan(target=LLAMA_7B, draft=None, hardware=gpu, prompt=120_000)
    assert made.composition.levels == ("self", "target")
    assert made.composition.kv_bits == 4
    assert made.placement.offload == ("kv",)
    held = made.placement.device_bytes["quantised cache"]
    assert held == pytest.approx(120_200 * LLAMA_7B.kv_bytes_per_token(2) * 4.75 / 16, rel=0.01)
    weights = LLAMA_7B.weight_bytes(2)
    as_graph = COSTS.graph_seconds + LLAMA_7B.num_layers * 12 * COSTS.graph_kernel_seconds
    assert made.predicted.retrieval_pass_seconds == pytest.approx(
        as_graph + (weights + held) / (0.9 * RTX_4090.device_read), rel=0.01
    )
    assert made.predicted.full_pass_seconds > 10 * made.predicted.retrieval_pass_seconds
    small = plan(target=LLAMA_7B, draft=None, hardware=replace(gpu, device_free_bytes=24 * GIB), prompt=120_000)
    part = small.composition
    assert (part.kv_bits, part.levels) == (4, ("retrieval", "target"))
    assert part.budget % part.chunk == 0 < part.budget < 120_000
    assert part.chunk == 32
    assert small.placement.link_bits == 12  # pages are not beside codes of all tokens
    assert "quantised cache" not in small.placement.device_bytes
    codes = part.budget * LLAMA_7B.kv_bytes_per_token(2) * 4.75 / 16
    assert codes < small.placement.device_bytes["arena"] < 1.02 * codes
    gpu = replace(gpu, device_free_bytes=24 * GIB)
    exact = plan(Options(kv_bits=16), target=LLAMA_7B, draft=None, hardware=gpu, prompt=120_000)
    assert part.budget > 2 * exact.composition.budget
    assert small.predicted.acceptance > exact.predicted.acceptance
    assert small.predicted.seconds_per_token < exact.predicted.seconds_per_token


def test_on_a_cpu_a_part_of_the_cache_has_4_bits_where_that_is_asked_for() -> None:
    """There is one memory, and no room to be saved."""
    asked = heavy_plan(Options(kv_bits=4, budget=1000, gamma=7), ATTENDING_CODES)
    assert (asked.composition.budget, asked.composition.chunk, asked.composition.kv_bits) == (992, 32, 4)
    assert heavy_plan(Options(budget=1024, gamma=7), ATTENDING_CODES).composition.kv_bits == 16
    whole = heavy_plan(Options(kv_bits=4, budget=10_000, gamma=7), ATTENDING_CODES)
    assert (whole.composition.budget, whole.composition.kv_bits) == (0, 4)
    assert whole.composition == heavy_plan(Options(kv_bits=4, gamma=7), ATTENDING_CODES).composition


@pytest.mark.parametrize(
    ("hardware", "shapes", "options", "reason"),
    [
        (GPU, {"head_dim": 40}, {}, "heads of 40 numbers are not whole groups of 16"),
        (GPU, {}, {"budget": 512, "chunk": 16}, "budget is 512, and quantised chunks have 32 tokens"),
        (CPU, {"head_dim": 12}, {}, "heads of 12 numbers are not whole groups of 8"),
    ],
)
def test_a_cache_in_4_bits_that_cannot_be_is_refused(
    hardware: Hardware, shapes: dict[str, int], options: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError, match=f"kv-bits is 4.*{reason}"):
        plan(Options(kv_bits=4, **options), target=DEMO.changed(**shapes), hardware=hardware)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hardware", "shapes", "reason"),
    [
        (replace(GPU, has_kernels=False), {}, "by kernels in Triton; pip install triton, without TRIFORCE_KERNELS=off"),
        (replace(GPU, fast_bf16=False), {}, "kernels that need compute capability 8.0"),
        (CPU, {"intermediate_size": 608}, "1216 x 384, 384 x 608 .* not whole groups of 64 inputs and 16 outputs"),
    ],
)
def test_weights_in_4_bits_that_cannot_be_are_refused(hardware: Hardware, shapes: dict[str, int], reason: str) -> None:
    with pytest.raises(UsageError, match=f"weight-bits is 4.*{reason}"):
        plan(Options(weight_bits=4), target=DEMO.changed(**shapes), hardware=hardware)


def test_a_plan_says_where_more_is_pinned_than_wsl_may_allow() -> None:
    there, here = (
        plan(target=LLAMA_7B, draft=None, hardware=replace(GPU, in_wsl=in_wsl), prompt=60_000)
        for in_wsl in (True, False)
    )
    assert any("are pinned, and in WSL 2 CUDA often refuses" in note for note in there.notes)
    assert not any("WSL" in note for note in here.notes)
    assert not any("WSL" in note for note in plan(hardware=replace(GPU, in_wsl=True), prompt=500).notes)


def test_a_retrieval_level_comes_along_where_it_is_not_far_from_the_best() -> None:
    """At 4000 tokens the draft alone is predicted to be faster: on many a text it is not, and a level may rest."""
    made = plan(prompt=4000)
    assert made.composition.levels == ("draft", "retrieval", "target")
    alone = plan(Options(gamma=made.predicted.tokens_drafted, draft_gamma=1), prompt=4000).predicted
    assert made.predicted.tokens_drafted == 1
    assert made.predicted.seconds_per_token <= alone.seconds_per_token
    assert plan(prompt=1000).composition.levels == ("draft", "target")
    assert plan(prompt=1000).predicted.refresh_seconds == 0.0


@pytest.mark.parametrize(("hardware", "share"), [(CPU, 1.0), (GPU, CACHED_SHARE[12])], ids=["CPU", "gpu"])
def test_in_a_refresh_what_was_not_held_crosses_the_link(hardware: Hardware, share: float) -> None:
    """As it is packed, to a GPU; a CPU unpacks it as it gathers it. What is resident does not cross."""
    options = Options(offload=frozenset({"kv"}), budget=4096, chunk=16, kv_bits=16)
    made = plan(options, hardware=hardware)
    capacity, composition = made.request.capacity, made.composition
    sizing = Sizing(DEMO, DRAFT, options, hardware, made.request.dtype, num_sequences=2)
    num_tiles = DEMO.num_layers * sizing.num_tiles(capacity)
    half, resident = (
        Cost(sizing, replace(made.placement, resident_tiles=tiles, link_bits=12), capacity, composition)
        for tiles in (num_tiles // 2, num_tiles)
    )
    held = 2 * 4096 * DEMO.kv_bytes_per_token(2)
    crossing = 0.3 * (1 - 4096 / capacity) * held / 2 * share / sizing.link_rate
    assert half.refresh - resident.refresh == pytest.approx(crossing)


def test_a_text_shorter_than_a_chunk_is_held_whole() -> None:
    sizing, composition = Sizing(DEMO, DRAFT, Options(), CPU, "fp32"), Composition(budget=64, chunk=64)
    assert Cost(sizing, place(sizing, 40, composition), 40, composition).acceptance == 1.0


def test_where_nothing_is_drafted_a_round_is_a_pass_alone() -> None:
    """No chunks are chosen for nobody."""
    options, composition = Options(gamma=0, offload=frozenset({"kv"})), Composition(budget=4096, gamma=0)
    sizing = Sizing(DEMO, DRAFT, options, CPU, "fp32")
    cost = Cost(sizing, place(sizing, 32_000, composition), 32_000, composition)
    assert cost.refresh > 0
    assert cost.per_token == cost.full_pass(1)


def test_the_largest_context_is_the_last_that_can_be_planned() -> None:
    small = Hardware("cpu", "CPU", 2**28, 2**28, True)
    fits = Request(DEMO, DRAFT, Options(context=32768), small).largest_context()
    assert 200 < fits < 32768
    assert plan(hardware=small, prompt=fits - 200, max_tokens=200).request.capacity == fits
    with pytest.raises(DoesNotFit, match=f"fits is {fits} tokens"):
        plan(hardware=small, prompt=fits - 199, max_tokens=200)


def test_a_draft_may_propose_straight_to_the_target() -> None:
    made = plan(Options(weight_bits=16), target=LLAMA_7B, hardware=GPU, prompt=2000)
    assert made.composition.levels == ("draft", "target")
    assert "selection" not in made.placement.device_bytes
    assert made.predicted.seconds_per_token < made.predicted.plain_seconds_per_token


def test_a_set_bandwidth_is_for_links_of_a_cpu() -> None:
    with pytest.raises(UsageError, match="link-gbps paces the link of a CPU"):
        plan(Options(offload=frozenset({"kv"}), link_gbps=1.0), hardware=GPU)


def test_speculation_pays_more_the_longer_the_context() -> None:
    predictions = [plan(prompt=length).predicted for length in (100, 4000, 16000, 32000)]
    times = [predicted.plain_seconds_per_token / predicted.seconds_per_token for predicted in predictions]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_an_output_past_the_context_is_cut_with_a_note() -> None:
    made = plan(prompt=32700, max_tokens=200)
    assert made.request.max_tokens == 68
    assert made.request.capacity == 32768
    assert "200" in made.notes[0]
    assert "68" in made.notes[0]


def test_a_prompt_past_the_context_is_refused_with_what_fits() -> None:
    with pytest.raises(DoesNotFit, match=r"40000 tokens.* 32768.* 32568"):
        plan(prompt=40000)
    with pytest.raises(DoesNotFit, match=r"raise --context \(up to 32768\)"):
        plan(Options(context=1000), prompt=1000)


def test_a_context_past_the_models_limit_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="try --context 32768"):
        plan(Options(context=40000), prompt=5)


def test_what_does_not_fit_names_the_largest_context_that_does() -> None:
    small = replace(CPU, host_free_bytes=GIB // 4, device_free_bytes=GIB // 4)
    with pytest.raises(DoesNotFit, match=r"largest context that fits is (\d+) tokens") as caught:
        plan(hardware=small)
    fits = int(str(caught.value).split("fits is ")[1].split(" ")[0])
    assert 0 < fits < 32000
    assert plan(hardware=small, prompt=fits - 1, max_tokens=1).request.capacity == fits
    with pytest.raises(DoesNotFit):
        plan(hardware=small, prompt=fits, max_tokens=1)


def test_a_gpu_counts_both_memories_and_offers_to_offload() -> None:
    with pytest.raises(DoesNotFit, match=r"device memory.*--offload auto"):
        plan(Options(offload=frozenset()), target=LLAMA_7B, draft=None, hardware=GPU, prompt=120_000)
    made = plan(Options(offload=frozenset({"kv"})), target=LLAMA_7B, draft=None, hardware=GPU, prompt=60_000)
    assert made.placement.total_device_bytes <= GPU.device_free_bytes
    assert made.request.dtype == "bf16"


@pytest.mark.parametrize(
    ("asked", "hardware", "dtype"),
    [("auto", CPU, "bf16"), ("auto", replace(CPU, fast_bf16=False), "fp32"), ("fp16", CPU, "fp16")],
)
def test_dtype_on_a_cpu(asked: str, hardware: Hardware, dtype: str) -> None:
    assert plan(Options(dtype=asked), hardware=hardware).request.dtype == dtype


@pytest.mark.parametrize(
    "silly",
    [
        {"context": 1},
        {"budget": 0},
        {"chunk": 3},
        {"chunk": 1024},
        {"gamma": -1},
        {"gamma": 256},
        {"draft_gamma": -2},
        {"window": 0},
        {"sinks": -1},
        {"dtype": "int4"},
        {"offload": frozenset({"disk"})},
        {"link_gbps": 0.0, "offload": frozenset({"kv"})},
        {"link_gbps": 1.0, "offload": frozenset()},
        {"device_memory": 0.0},
        {"weight_bits": 8},
        {"kv_bits": 8},
    ],
)
def test_silly_options_are_refused_by_name(silly: dict[str, object]) -> None:
    name = next(iter(silly)).replace("_", "-")
    with pytest.raises(UsageError, match=name):
        Options(**silly)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "draft", "unused"),
    [
        (Options(speculation=False, gamma=4, budget=512, chunk=8), DRAFT, ["gamma", "budget", "chunk"]),
        (Options(draft_gamma=3, gamma=4, lookup=False), None, ["draft-gamma"]),
        (Options(draft_gamma=3, gamma=4, budget=512, chunk=8), DRAFT, []),
        (Options(draft_gamma=3, gamma=4), None, []),  # lookups are drafted for the retrieval level
        (Options(gamma=0), DRAFT, []),
        (Options(), DRAFT, []),
        (Options(weight_bits=4), None, []),
        (Options(weight_bits=4, speculation=False), None, ["weight-bits"]),
        (Options(weight_bits=16, speculation=False), None, []),
        (Options(kv_bits=4), None, []),
        (Options(kv_bits=4, chunk=32), None, ["chunk"]),
        (Options(kv_bits=4, speculation=False), None, ["kv-bits"]),
    ],
)
def test_what_was_given_and_is_not_used_is_said(options: Options, draft: ModelConfig | None, unused: list[str]) -> None:
    notes = plan(options, draft=draft).notes
    assert [note.split()[0].removeprefix("--") for note in notes if "is not used" in note] == unused


def test_calls_over_a_tile_that_is_there_are_one_launch() -> None:
    """Where a pass is no graph: several GPUs, say."""
    hardware = replace(GPU, num_devices=2)
    made = plan(Options(gpus=2, speculation=False), target=LLAMA_7B, draft=None, hardware=hardware, prompt=100_000)
    sizing = Sizing(LLAMA_7B, None, Options(), hardware, "bf16")
    tiles = LLAMA_7B.num_layers * sizing.num_tiles(made.request.capacity)

    def calls(resident: int) -> float:
        placement = replace(made.placement, resident_tiles=resident)
        cost = Cost(replace(sizing, hardware=fast), placement, made.request.capacity, PLAIN)
        return cost.device.full(1, masses=False)

    fast = replace(hardware, rates=replace(RTX_4090, device_read=1e18))
    assert (calls(0) - calls(tiles)) / tiles == pytest.approx(COSTS.tile_seconds - COSTS.resident_tile_seconds)
    assert calls(tiles) == pytest.approx(
        COSTS.pass_seconds + LLAMA_7B.num_layers * COSTS.layer_seconds + tiles * COSTS.resident_tile_seconds
    )
