"""Plans for GPUs on which the target proposes to itself with its weights in 4 bits."""

from __future__ import annotations

from dataclasses import replace
from math import hypot, log

import pytest

from offload.config.model import ModelConfig
from offload.errors import UsageError
from offload.formats.layout import code_bytes
from offload.plan.cost import own_acceptance
from offload.plan.cost_gpu import GPU as COSTS
from offload.plan.options import Options
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.plan.sizing import low_bit_tail
from offload.plan.what_if import LLAMA2_7B, LLAMA2_13B, LLAMA_68M
from offload.speed.hardware import RTX_4090, Hardware

GPU = Hardware("cuda:0", "a GPU", 24 * 10**9, 128 * 10**9, True, RTX_4090)
EXACT = Options(weight_bits=16)


def plan(
    options: Options | None = None, target: ModelConfig = LLAMA2_13B, hardware: Hardware = GPU, tokens: int = 119_744
) -> Plan:
    return Request(target, LLAMA_68M, options or Options(), hardware).plan(num_prompt_tokens=tokens, max_tokens=256)


def test_where_weights_stream_a_copy_in_few_bits_proposes() -> None:
    """13B at 120,000 tokens on one GPU of 24 GB: nothing that the retrieval level needs crosses the link."""
    made, exact = plan(), plan(EXACT)
    assert made.composition.weight_bits == 6
    assert made.composition.levels == ("draft", "retrieval", "target")
    assert made.placement.offload == ("kv", "weights")
    assert made.placement.total_device_bytes <= GPU.device_free_bytes
    assert made.placement.resident_layers < exact.placement.resident_layers
    assert made.predicted.retrieval_pass_seconds < 0.1 * exact.predicted.retrieval_pass_seconds
    unread = 0.031 * log(made.request.capacity / made.composition.budget)
    assert made.composition.kv_bits == 4
    assert made.predicted.acceptance == pytest.approx(1 - hypot(0.85 / 5120**0.5, 0.02, unread))
    assert made.predicted.seconds_per_token < 0.6 * exact.predicted.seconds_per_token
    assert made.predicted.plain_seconds_per_token == exact.predicted.plain_seconds_per_token


def test_6_bits_are_believed_more_and_4_leave_more_room() -> None:
    six, four = (plan(Options(weight_bits=bits)) for bits in (6, 4))
    assert six.predicted.acceptance > four.predicted.acceptance
    assert six.composition.budget < four.composition.budget
    assert (six.placement.weight_link_bits, four.placement.weight_link_bits) == (8, 9)
    assert six.predicted.seconds_per_token < 0.85 * four.predicted.seconds_per_token
    short_of_room = plan(hardware=replace(GPU, device_free_bytes=16 * 10**9))
    assert short_of_room.composition.weight_bits == 4


def test_a_share_of_accepted_tokens_is_none_at_the_least() -> None:
    """Of so narrow a model 4 bits leave nothing."""
    assert own_acceptance(4, 4, 16, 1.0) == 0.0


def test_where_all_of_the_cache_has_room_in_4_bits_the_exact_weights_propose() -> None:
    """7B at 32,768 tokens."""
    made = plan(target=LLAMA2_7B, tokens=32_512)
    assert made == plan(EXACT, LLAMA2_7B, tokens=32_512)
    assert (made.composition.weight_bits, made.composition.kv_bits, made.composition.budget) == (16, 4, 0)


def test_what_is_predicted_is_of_the_levels_that_are_planned() -> None:
    """Weights in 6 bits are a little faster for the mean text of 7B at 32,768 tokens, and slower for hard ones."""
    made = plan(target=LLAMA2_7B, tokens=32_512)
    predicted, drafted = made.predicted, made.predicted.tokens_drafted
    assert predicted.tokens_per_round == pytest.approx((1 - predicted.acceptance ** (drafted + 1)) / 0.02)
    seconds = predicted.full_pass_seconds + drafted * predicted.retrieval_token_seconds
    assert predicted.seconds_per_token == pytest.approx(seconds / predicted.tokens_per_round)


def test_where_a_part_of_it_has_room_weights_in_few_bits_leave_room_for_more() -> None:
    """7B at 120,000 tokens."""
    made, exact = plan(target=LLAMA2_7B), plan(EXACT, LLAMA2_7B)
    assert (made.composition.weight_bits, made.composition.kv_bits) == (6, 4)
    assert made.composition.budget > 1.5 * exact.composition.budget
    assert made.predicted.acceptance > exact.predicted.acceptance
    assert made.predicted.seconds_per_token < exact.predicted.seconds_per_token


def test_a_retrieval_level_does_not_take_the_place_of_a_draft_that_pays() -> None:
    """A large draft leaves less room for chunks: without it more of them would be predicted to be a little faster."""
    wide = {"num_layers": 8, "hidden_size": 2048, "intermediate_size": 5504, "num_heads": 16, "num_kv_heads": 16}
    draft, gpu = LLAMA_68M.changed(head_dim=128, **wide), replace(GPU, device_free_bytes=14 * 10**9)
    made = Request(LLAMA2_13B, draft, Options(), gpu).plan(num_prompt_tokens=60_000, max_tokens=200)
    assert made.composition.levels == ("draft", "retrieval", "target")


def test_the_copy_has_the_bytes_of_its_blocks() -> None:
    made = plan().placement.device_bytes["quantised weights"]
    shapes = [(3 * 5120, 5120), (5120, 5120), (2 * 13_824, 5120), (5120, 13_824)]
    layer = sum(code_bytes(*shape, 6) for shape in shapes) + 2 * 5120 * 2
    assert made == 40 * layer + code_bytes(32_000, 5120, 6)
    assert "quantised weights" not in plan(EXACT).placement.device_bytes


def test_each_of_two_gpus_has_a_copy_of_its_shard() -> None:
    wanted = Options(weight_bits=4)
    placement = plan(wanted, hardware=replace(GPU, num_devices=2)).placement
    whole = plan(wanted).placement.device_bytes["quantised weights"]
    ours, theirs = (sizes["quantised weights"] for sizes in (placement.device_bytes, placement.other_device_bytes))
    assert ours - theirs == code_bytes(32_000, 5120, 4)
    assert ours + theirs == pytest.approx(whole, rel=1e-3)


def test_a_pass_to_propose_reads_the_copy_and_what_was_retrieved() -> None:
    made = plan()
    codes = made.composition.budget * LLAMA2_13B.kv_bytes_per_token(2) * 4.75 / 16
    exact = (32 + low_bit_tail(made.composition.drafted)) * LLAMA2_13B.kv_bytes_per_token(2)
    kept = (codes + exact) / COSTS.read_share
    copy = made.placement.device_bytes["quantised weights"] / COSTS.coded_share
    assert made.predicted.retrieval_pass_seconds == pytest.approx(
        (kept + copy) / RTX_4090.device_read + as_graph(LLAMA2_13B)
    )


def as_graph(model: ModelConfig) -> float:
    """Seconds that a pass takes beside its bytes."""
    return COSTS.graph_seconds + model.num_layers * 12 * COSTS.graph_kernel_seconds


def test_over_the_whole_cache_a_pass_to_propose_reads_all_of_it() -> None:
    """Where everything is on the GPU: no budget, no refresh; blocks are padded to 16 rows as the target's."""
    slow = replace(RTX_4090, device_read=1e11)
    hardware = replace(GPU, device_free_bytes=48 * 10**9, rates=slow)
    made = plan(Options(weight_bits=4, kv_bits=16, gamma=3), LLAMA2_7B, hardware, 500)
    assert made.composition.levels == ("draft", "self", "target")
    copy = made.placement.device_bytes["quantised weights"] / COSTS.coded_share
    cache = made.request.capacity * LLAMA2_7B.kv_bytes_per_token(2) / COSTS.read_share
    rows = 1 + 15 * COSTS.row_share
    assert made.predicted.retrieval_pass_seconds == pytest.approx((copy + cache) / 1e11 * rows + as_graph(LLAMA2_7B))
    assert made.predicted.refresh_seconds == 0.0
    assert made.predicted.retrieval_pass_seconds < 0.4 * made.predicted.full_pass_seconds


@pytest.mark.parametrize("changes", [{"has_kernels": False}, {"fast_bf16": False}])
def test_it_is_chosen_where_its_kernels_run(changes: dict[str, bool]) -> None:
    assert plan(hardware=replace(GPU, **changes)).composition.weight_bits == 16


def test_it_is_for_rows_of_16_bits() -> None:
    assert plan(Options(dtype="fp32"), tokens=10_000).composition.weight_bits == 16
    with pytest.raises(UsageError, match=r"weight-bits is 4: on cuda:0 rows of 16 bits alone .* try --dtype bf16"):
        plan(Options(dtype="fp32", weight_bits=4), tokens=10_000)
    refused = replace(GPU, has_kernels=False)
    with pytest.raises(UsageError, match="weight-bits is 4: cuda:0 multiplies them by kernels in Triton"):
        plan(Options(weight_bits=4), hardware=refused)
